"""The gradients of a head on a GPU, from the gradient of its logits window by window; products by cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor

from .cuda import ProductSum


class Gradients:
    """Sums over windows of products with the gradient of the logits, in float32.

    ``rows [N, D]`` is what the weight's gradient is made of: the hidden states, perhaps with zeros in some rows.
    ``cut`` has the windows, as ``cuda.windows_of`` makes them; ``undo`` is a one-element factor of the results.
    """

    def __init__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor,
        needs: tuple[bool, ...],
        cut: tuple[list[slice], list[slice]],
        undo: Tensor | None,
    ) -> None:
        self.weight, self.rows, self.undo, self.needs = weight, rows, undo, needs
        self.dtypes = (input.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        at_rows, at_classes = cut
        self.d_input = self.d_weight = None
        if needs[0]:
            self.d_input = ProductSum(input.shape, input, self.dtypes[0], len(at_classes), undo)
        if needs[1]:
            self.d_weight = ProductSum(weight.shape, weight, self.dtypes[1], len(at_rows), undo)
        self.d_bias = weight.new_zeros((weight.shape[0] if needs[2] else 0,), dtype=torch.float32)

    def add(self, at_rows: slice, at_classes: slice, dz: Tensor) -> None:
        """Add what the window ``dz`` of the gradient gives, in the operands' dtype."""
        if self.d_input is not None:
            self.d_input.add(at_rows, dz, self.weight[at_classes])
        if self.d_weight is not None:
            self.d_weight.add(at_classes, dz.t(), self.rows[at_rows])
        if self.needs[2]:
            self.d_bias[at_classes] += dz.sum(0, dtype=torch.float32)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of input, weight and bias in the dtypes of the three; empty where not needed."""
        if self.undo is not None:
            self.d_bias *= self.undo
        d_input, d_weight = (
            self.weight.new_empty((0,), dtype=dtype) if total is None else total.result()
            for total, dtype in zip((self.d_input, self.d_weight), self.dtypes, strict=False)
        )
        return d_input, d_weight, self.d_bias.to(self.dtypes[2])
