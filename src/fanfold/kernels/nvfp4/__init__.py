"""NVFP4 as matrix units want it: packed activations, swizzled scales, products of both operands in 4 bits (W4A4).

Block-scaled products of sm_100 and later are compiled, never run.
"""
