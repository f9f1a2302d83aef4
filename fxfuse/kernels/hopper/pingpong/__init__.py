"""The kernels that matter most, once more in Gluon for compute capability 9.0: warpgroups that multiply in turns."""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .exponentials import exponentials_kernel
from .products import d_weight_kernel
from .stats import stats_kernel

__all__ = ["d_weight_kernel", "describe", "exponentials_kernel", "stats_kernel"]


def describe(matrix: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """A descriptor of blocks that lie in shared memory as the tensor cores read them."""
    bits = 8 * matrix.element_size()
    return TensorDescriptor(matrix, shape, strides, block, gl.NVMMASharedLayout(128, bits, rank=2))
