"""Device kernels by job, each folder with its reference."""
