"""Kernels, one file each: in Triton, and in CUDA C++ where Triton cannot say it. The only modules that import triton or CUDA's
bindings: callers import them when a tensor is on CUDA.
"""
