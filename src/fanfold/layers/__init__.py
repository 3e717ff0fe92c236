"""Modules that hold tensors and call operations."""
