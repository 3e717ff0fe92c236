"""Quantization: the experts of a BF16 or FP16 checkpoint to a checkpoint as compressed-tensors stores it."""
