"""Triton kernels.  ``tiles`` chooses launch shapes and needs no Triton; every other module here imports it."""
