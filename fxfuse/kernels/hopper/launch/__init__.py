"""The launches of these kernels for the operands of one call, a file for each family of kernels."""

from __future__ import annotations

from .classes import OrderedClasses
from .dlogits import GradientsOfLogits
from .operands import EVERY_ROW, Bad, Classes, Listed, Rows, Stats, Sum, fits, takes
from .products import Products

__all__ = ["EVERY_ROW", "Bad", "Call", "Classes", "Listed", "Rows", "Stats", "Sum", "fits", "takes"]


class Call(GradientsOfLogits, Products, OrderedClasses):
    """The operands of one call, and the launches on them."""
