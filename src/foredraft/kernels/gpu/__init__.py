"""Triton kernels for NVIDIA GPUs. Modules that import triton are imported by `loading.load_kernels` alone."""
