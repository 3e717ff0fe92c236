"""NVFP4 as matrix units want it: packed activations, swizzled scales, products of both operands in 4 bits (W4A4).

The kernels have run in Triton's interpreter and compile for every arch; they have not yet run on a GPU. Block-scaled
products of sm_100 and later are compiled, never run.
"""
