"""Kernels for NVIDIA GPUs, written in Triton: quantized linears, paged attention and what lies between them. Importing this package does not import Triton."""
