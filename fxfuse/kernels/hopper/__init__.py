"""Triton kernels on tensor descriptors: compacted rows, persistent programs, the tensor-memory accelerator."""
