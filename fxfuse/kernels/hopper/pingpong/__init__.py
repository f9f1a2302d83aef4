"""The kernels that matter most, once more in Gluon for compute capability 9.0: warpgroups that multiply in turns."""

from __future__ import annotations

import functools

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .dlogits import dlogits_kernel
from .exponentials import exponentials_kernel
from .exponentials_together import exponentials_together_kernel
from .input_together import d_input_together_kernel
from .products import d_weight_kernel
from .products_together import d_weight_together_kernel, input_sums_together_kernel
from .stats import stats_kernel
from .stats_together import stats_together_kernel

__all__ = [
    "d_input_together_kernel",
    "d_weight_kernel",
    "d_weight_together_kernel",
    "describe",
    "dlogits_kernel",
    "exponentials_kernel",
    "exponentials_together_kernel",
    "input_sums_together_kernel",
    "stats_kernel",
    "stats_together_kernel",
]


def describe(matrix: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """A descriptor of blocks that lie in shared memory as the tensor cores read them."""
    return TensorDescriptor(matrix, shape, strides, block, _layout(block[-1]))


@functools.cache
def _layout(columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(min(128, 2 * columns), 16, rank=2)
