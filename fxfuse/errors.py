"""Every exception and warning that fxfuse raises, in one place.

A message begins with the statement of the program that was running, ``file.py:line``, where one is known; it says
what happened, and what to do. Errors that eager PyTorch would have raised too are in PyTorch's words.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from . import compat
from .report.source import caller

if TYPE_CHECKING:
    from .reasons import Reason


class FxfuseError(RuntimeError):
    """An error of fxfuse itself, as opposed to one that eager PyTorch would have raised too."""


class StaleLogitsError(FxfuseError):
    """Deferred logits are read when they can be computed no more.

    The hidden states, the weight or the bias of their projection have changed, or a CUDA graph is being captured.
    """


class FxfuseWarning(UserWarning):
    """fxfuse could not do a part of its work. What the program computes is right all the same."""


def _projection(where: str) -> str:
    return f"the projection at {where}" if where else "the projection"


def _here(message: str) -> str:
    # Dynamo, which cannot look at frames, names the statement itself.
    where = "" if torch.compiler.is_dynamo_compiling() else caller()
    return f"{where}: {message}" if where else message


# --- what eager PyTorch would raise too -----------------------------------------------------------------------

INDEX_OUT_OF_RANGE = (
    "fxfuse: a class index is out of range [0, vocab) and is not ignore_index. The same call with tensors on a CPU "
    "names it; CUDA_LAUNCH_BLOCKING=1 shows where it was made"
)


def index_out_of_range(
    value: int, vocab: int, by: Literal["nll_loss", "gather", "indexing"]
) -> IndexError | RuntimeError:
    """What ``nll_loss`` and indexing (IndexError) or ``gather`` (RuntimeError) raise for this class on a CPU."""
    if by == "nll_loss":
        return IndexError(f"Target {value} is out of bounds.")
    kind = RuntimeError if by == "gather" else IndexError
    return kind(f"index {value} is out of bounds for dimension 1 with size {vocab}")


# --- wrong calls ----------------------------------------------------------------------------------------------


def not_a_tensor(function: str, argument: str, value: object) -> TypeError:
    """One of fxfuse's functions is called with something else in the place of a tensor."""
    return TypeError(
        _here(
            f"fxfuse.{function}(): argument {argument!r} must be a Tensor, not {type(value).__name__}. Make one of it "
            "first, with torch.as_tensor"
        )
    )


def target_of_another_shape(target: Sequence[int], leading: Sequence[int]) -> ValueError:
    """A target does not repeat the leading dimensions of hidden states that have several."""
    return ValueError(
        _here(
            f"fxfuse.linear_cross_entropy(): the target has shape {tuple(target)}, but the leading dimensions of the "
            f"input are {tuple(leading)}. Give both the same, or flatten both"
        )
    )


def unknown_transform(step: str, known: Iterable[str]) -> ValueError:
    """An op is called with a transform of the logits that it does not know."""
    return ValueError(
        _here(
            f"{step!r} is no step of a transform of logits. A transform is steps with spaces between them, 'mul:0.5 "
            f"tanh': {', '.join(known)}, where mul, add and the clamps have a number behind a colon"
        )
    )


def bad_options(given: object) -> ValueError:
    """``options=`` of ``torch.compile`` is no dict, or has a key that is no string."""
    return ValueError(_here(f"options must be a dict with strings for keys, not {given!r}"))


def unknown_option(key: str, known: Iterable[str]) -> ValueError:
    """``options=`` of ``torch.compile`` has a key that is neither fxfuse's nor Inductor's."""
    known = sorted(known)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    own = ", ".join(option for option in known if option.startswith("fxfuse."))
    return ValueError(
        _here(
            f"unknown option {key!r}; did you mean {near[0]!r}? fxfuse's options are {own}; every other key is "
            "Inductor's."
        )
    )


def bad_option(key: str, value: object, expected: str) -> ValueError:
    """An option of fxfuse has a value of the wrong type or range."""
    return ValueError(_here(f"option {key!r} must be {expected}, not {value!r}"))


# --- the ops --------------------------------------------------------------------------------------------------


def not_differentiable(op: str, argument: str) -> FxfuseError:
    """A gradient is required of an argument of an op that has none for it."""
    return FxfuseError(
        _here(
            f"fxfuse::{op} has no gradient for `{argument}`, which requires one. Detach it, or write this loss with "
            "torch.nn.functional, which fxfuse leaves as it is in that case."
        )
    )


def gradient_not_made(op: str) -> FxfuseError:
    """An op that makes its gradients in the forward pass was told to leave one out that is required."""
    return FxfuseError(
        _here(
            f"fxfuse::{op} was told not to compute a gradient that is now required. Pass need_input, need_weight and "
            "need_bias as the operands' requires_grad."
        )
    )


def no_double_backward(op: str) -> FxfuseError:
    """The backward of a fused head is called with ``create_graph=True``."""
    return FxfuseError(
        _here(
            f"fxfuse::{op} has no second derivative, but its backward was called with create_graph=True. Call "
            'backward without it, or compile with options={"fxfuse.enabled": False}.'
        )
    )


def no_forward_mode(op: str) -> FxfuseError:
    """A fused head that was compiled before is given the tangents of forward-mode differentiation."""
    return FxfuseError(
        _here(
            f"fxfuse::{op} has no forward-mode derivative, but an operand carries a tangent. Compile inside of the "
            'dual_level, where fxfuse leaves the program as it is, or with options={"fxfuse.enabled": False}.'
        )
    )


# --- deferred logits ------------------------------------------------------------------------------------------

_WITHOUT_DEFERRAL = 'compile with options={"fxfuse.defer_logits": False} (and no mode) to have them computed at once'

STEP_NOT_TRACEABLE = (
    "fxfuse copies the weight here, before the optimizer changes it, for logits that nothing has read. Compile the "
    'step without fullgraph, or the model with options={"fxfuse.defer_logits": False}'
)


def not_traceable() -> Exception:
    """Another compiled function uses deferred logits: Dynamo breaks its graph there, or raises under ``fullgraph``."""
    return compat.untraceable(
        "Logits of a compiled model that are not computed yet (fxfuse.deferred.DeferredLogits) break the graph of "
        "another compiled function where it uses them. Compile it without fullgraph, or compute the loss inside of the "
        f"first function, or {_WITHOUT_DEFERRAL}."
    )


def stale_logits(operand: str, how: str, head: str) -> StaleLogitsError:
    """Deferred logits are read, and an operand of the projection at ``head`` is no longer what it was."""
    names = {"input": "the hidden states", "weight": "the weight", "bias": "the bias"}
    return StaleLogitsError(
        _here(
            f"The logits of {_projection(head)} were not computed, because nothing had needed their values; now that "
            f"something does, {names[operand]} of the projection cannot be used any more: {how}. Have them computed "
            f"before that (`logits.data_ptr()` does), or {_WITHOUT_DEFERRAL}. (A step of a torch.optim optimizer that "
            "has this very tensor would have been fine.)"
        )
    )


def read_in_capture(head: str) -> StaleLogitsError:
    """Deferred logits are read for the first time in the capture of a CUDA graph that they were not made in."""
    return StaleLogitsError(
        _here(
            f"The logits of {_projection(head)} are read for the first time while a CUDA graph is captured. Replays "
            "would compute them again, of what the hidden states and the weight are then. Have them computed before "
            f"that (`logits.data_ptr()` does), or {_WITHOUT_DEFERRAL}."
        )
    )


def gradient_went_past(function: str, head: str) -> FxfuseError:
    """A gradient is asked for of logits which a fused loss has gone past already."""
    return FxfuseError(
        _here(
            f"{function} wants the gradient of the logits of {_projection(head)}, but a fused loss was computed "
            "from them whose gradient goes to the hidden states and the weight directly. Call `register_hook` or "
            f"`retain_grad` on the logits before the loss is computed, or {_WITHOUT_DEFERRAL}."
        )
    )


def deferred_cannot(what: str, head: str) -> FxfuseError:
    """The shape or the memory of deferred logits is changed in place."""
    return FxfuseError(
        _here(
            f"{what} would change the shape or the memory of the logits of {_projection(head)}, which are not "
            f"computed yet. Use the function that returns a new tensor, or {_WITHOUT_DEFERRAL}."
        )
    )


def put_in_place_of(function: object, names: Sequence[str]) -> FxfuseError:
    """One function of the program's stands for several of PyTorch's, one of which reads deferred logits."""
    return FxfuseError(
        _here(
            f"{' and '.join(names)} are one function of the program's, {function!r}, so that it cannot be told which "
            f"of them reads deferred logits. Put a function of its own in the place of each, or {_WITHOUT_DEFERRAL}."
        )
    )


# --- compilation ----------------------------------------------------------------------------------------------


def kept_dense(where: str, reason: Reason) -> FxfuseError:
    """Under ``fxfuse.strict``, a head is kept for a reason that the user can mend."""
    at = f" (at {reason.where})" if reason.where and reason.where != where else ""
    return FxfuseError(
        f"{where}: the logits are kept, because {reason.sentence}{at}. Remedy: {reason.remedy}. Without "
        "fxfuse.strict the program runs as it is."
    )


def arguments_share_memory() -> FxfuseWarning:
    """Arguments of a compiled graph share memory that did not when it was captured, and the graph writes to them."""
    return FxfuseWarning(
        f"{caller()}: arguments of this compiled function share memory in this call, and did not when it was compiled. "
        "It writes to one of them, so this call runs as it was captured, without being compiled or fused. To have it "
        "compiled, pass copies (tensor.clone())."
    )


def analysis_failed(failure: Exception, heads: Iterable[str]) -> FxfuseWarning:
    """fxfuse itself failed at a graph, whose heads are at these places, and has left it as it was."""
    at = ", ".join(dict.fromkeys(heads)) or caller()
    return FxfuseWarning(
        f"{at}: fxfuse could not analyse this graph and left it as it was ({type(failure).__name__}: {failure}). The "
        'program is right but not fused; please report this, with the program. options={"fxfuse.enabled": False} '
        "compiles without fxfuse, and without this warning."
    )


def not_told(failure: Exception) -> FxfuseWarning:
    """fxfuse itself failed at finding out for its report how logits are used."""
    return FxfuseWarning(
        f"fxfuse could not tell its report how logits are used ({type(failure).__name__}: {failure}). The program is "
        "right and fused where it can be; please report this, with the program."
    )


def watching_failed(failure: Exception) -> FxfuseWarning:
    """What draws or measures heads for the report failed at one."""
    return FxfuseWarning(
        f"fxfuse could not take a head apart for its report ({type(failure).__name__}: {failure}). The program is not "
        "affected; the report lacks what was to be shown of it. Please report this, with the program."
    )
