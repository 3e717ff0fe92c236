"""The functions that are exported, a file a family of kernels: sizes, buffers, and every kernel with its values."""
