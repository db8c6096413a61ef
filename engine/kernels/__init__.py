"""Triton kernels, one file a kernel. The only modules that import triton: callers import them when a tensor is on CUDA."""
