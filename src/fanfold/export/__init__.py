"""Kernels for hosts in other languages: PTX, cubin, a manifest and a C launcher, made without a GPU."""
