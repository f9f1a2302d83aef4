"""Every exception and warning that fxfuse raises, in one place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .reasons import Reason

INDEX_OUT_OF_RANGE = "fxfuse: a class index is out of range [0, vocab) and is not ignore_index"


class FxfuseError(RuntimeError):
    """An error of fxfuse itself, as opposed to one that eager PyTorch would have raised too."""


class StaleLogitsError(FxfuseError):
    """Deferred logits are read after their operands have changed."""


class FxfuseWarning(UserWarning):
    """fxfuse could not do its work and left the program as it was."""


def index_out_of_range(value: int, vocab: int, *, nll: bool) -> Exception:
    """What ``nll_loss`` (IndexError) or ``gather`` (RuntimeError) raises for this class on a CPU."""
    if nll:
        return IndexError(f"Target {value} is out of bounds.")
    return RuntimeError(f"index {value} is out of bounds for dimension 1 with size {vocab}")


def not_differentiable(op: str, argument: str) -> Exception:
    return FxfuseError(
        f"fxfuse::{op} has no gradient for `{argument}`, which requires one. Detach it, or write this loss with "
        "torch.nn.functional, which fxfuse leaves as it is in that case."
    )


def gradient_not_made(op: str) -> Exception:
    return FxfuseError(
        f"fxfuse::{op} was told not to compute a gradient that is now required. Pass need_input, need_weight and "
        "need_bias as the operands' requires_grad."
    )


def no_double_backward(op: str) -> Exception:
    return FxfuseError(
        f"fxfuse::{op} has no second derivative, but its backward was called with create_graph=True. Call backward "
        'without it, or compile with options={"fxfuse.enabled": False}.'
    )


def no_forward_mode(op: str) -> Exception:
    return FxfuseError(
        f"fxfuse::{op} has no forward-mode derivative, but an operand carries a tangent. Compile inside of the "
        'dual_level, where fxfuse leaves the program as it is, or with options={"fxfuse.enabled": False}.'
    )


_WITHOUT_DEFERRAL = 'compile with options={"fxfuse.defer_logits": False} (and no mode) to have them computed at once'


NOT_TRACEABLE = (
    "Logits of a compiled model that are not computed yet (fxfuse.DeferredLogits) break the graph of another compiled "
    "function where it uses them. Compile it without fullgraph, or compute the loss inside of the first function, or "
    f"{_WITHOUT_DEFERRAL}."
)


def stale_logits(operand: str, how: str) -> StaleLogitsError:
    names = {"input": "the hidden states", "weight": "the weight", "bias": "the bias"}
    return StaleLogitsError(
        "These logits of a compiled model were not computed, because nothing had read them; now that something does, "
        f"{names[operand]} of their projection cannot be used any more: {how}. Read them before that (`logits.amax()` "
        f"does), or {_WITHOUT_DEFERRAL}. (The step of a torch.optim optimizer would have been fine, but for logits "
        "that are made inside of its closure.)"
    )


def gradient_went_past(function: str) -> FxfuseError:
    return FxfuseError(
        f"{function} wants the gradient of logits of a compiled model, but a fused loss was computed from them whose "
        "gradient goes to the hidden states and the weight directly. Call `register_hook` or `retain_grad` on the "
        f"logits before the loss is computed, or {_WITHOUT_DEFERRAL}."
    )


def deferred_cannot(what: str) -> FxfuseError:
    return FxfuseError(
        f"{what} would change the shape or the memory of logits of a compiled model that are not computed yet. Use the "
        f"function that returns a new tensor, or {_WITHOUT_DEFERRAL}."
    )


def unknown_option(key: str, known: Iterable[str]) -> ValueError:
    known = sorted(known)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    own = ", ".join(option for option in known if option.startswith("fxfuse."))
    return ValueError(
        f"unknown option {key!r}; did you mean {near[0]!r}? fxfuse's options are {own}; every other key is Inductor's."
    )


def bad_option(key: str, value: object, expected: str) -> ValueError:
    return ValueError(f"option {key!r} must be {expected}, not {value!r}")


def analysis_failed(failure: Exception) -> str:
    return (
        f"fxfuse could not analyse a graph and left it as it was ({type(failure).__name__}: {failure}). "
        "The program is right but not fused; please report this."
    )


def not_told(failure: Exception) -> str:
    return (
        f"fxfuse could not tell its report how logits are used ({type(failure).__name__}: {failure}). The program is "
        "right and fused where it can be; please report this."
    )


def watching_failed(failure: Exception) -> str:
    return (
        f"fxfuse could not take a head apart for its report ({type(failure).__name__}: {failure}). "
        "The program is not affected; the report lacks what was to be shown of it. Please report this."
    )


def kept_dense(where: str, reason: Reason) -> Exception:
    return FxfuseError(f"{where}: the logits are kept, because {reason.sentence}. Remedy: {reason.remedy}.")
