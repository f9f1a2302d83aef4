"""fxfuse: ``torch.compile(model, backend="fxfuse")`` never builds the logits of a language model.

The backend needs no import. This module has the fused functions themselves, and the record of what was fused.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version

from .errors import FxfuseError, FxfuseWarning
from .functional import linear_cross_entropy, linear_log_probs, linear_logsumexp
from .reasons import Reason
from .report.explain import explain, reads, sites, summary
from .report.records import Read, Report, Site

try:
    __version__ = _version("fxfuse")
except PackageNotFoundError:  # a source tree on the path, never installed
    __version__ = "0+unknown"

__all__ = [
    "FxfuseError",
    "FxfuseWarning",
    "Read",
    "Reason",
    "Report",
    "Site",
    "explain",
    "linear_cross_entropy",
    "linear_log_probs",
    "linear_logsumexp",
    "reads",
    "sites",
    "summary",
]
