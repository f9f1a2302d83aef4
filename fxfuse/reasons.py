"""Why a head was kept dense: a closed list, each with a code, a sentence and a remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One row of the list.

    ``mendable`` says whether the user can do something about it, which is what ``fxfuse.strict`` raises for.
    """

    code: str
    sentence: str  # may hold {detail}
    remedy: str
    mendable: bool = True


_KINDS = (
    Kind(
        "too_small",
        "the logits are only {detail}, less than fxfuse.min_logits_bytes",
        'compile with backend="fxfuse", options={"fxfuse.min_logits_bytes": 0} (and no mode) to fuse every head',
        mendable=False,
    ),
    Kind(
        "repeated",
        "what reads the logits would multiply the weight by {detail}, if they were not kept",
        "read each row once, as by one `gather` of several classes in the place of repeated rows, and by losses of the "
        'same temperature; or fuse every head, by options={"fxfuse.min_logits_bytes": 0}',
        mendable=False,
    ),
    Kind(
        "weight_copied",
        "fusing would make copies of the weight or of its gradient, {detail}",
        "mask classes by adding a vector of 0 and -inf, which copies nothing, and compute one loss of all rows in the "
        'place of many of few; or fuse every head, by options={"fxfuse.min_logits_bytes": 0}',
        mendable=False,
    ),
    Kind(
        "returned",
        "the logits leave the compiled function ({detail})",
        "return them as the projection made them (the vocabulary last, their operands unchanged) under "
        "fxfuse.defer_logits; or return only the loss from the compiled function",
    ),
    Kind(
        "checkpointed",
        "the logits leave a checkpointed part of the compiled function ({detail})",
        "make them outside of the checkpoint; or compute the loss inside of it too",
    ),
    Kind(
        "unknown_reader",
        "{detail} reads the logits, and fxfuse has no rule for it",
        "read them only through cross_entropy, log_softmax and gather, nll_loss, logsumexp, entropy, argmax or topk; "
        "take anything else, such as another metric, from a separate call (what is part of the loss itself may need "
        "all logits in any spelling)",
    ),
    Kind(
        "unsupported_argument",
        "{detail}",
        "use the default for this argument, or one that the message names as supported",
    ),
    Kind(
        "changing_number",
        "{detail} takes a number that changes from call to call",
        "multiply or divide the logits themselves by it, before anything else is done to them; or let it stay the same",
    ),
    Kind(
        "probability_targets",
        "the targets of {detail} are class probabilities, so every class of every row is read",
        "pass class indices (int64) as targets, with label_smoothing= for smoothed ones; probabilities of another "
        "model are fused where its head is in the same graph",
    ),
    Kind(
        "vocabulary_split",
        "{detail} splits the vocabulary of one projection into several",
        "take them one by one, by `chunk`, `split` or slices of the last dimension, and their losses after that",
    ),
    Kind(
        "class_dim",
        "{detail} works along a dimension that is not the vocabulary",
        "apply it along the vocabulary dimension: the last, or dimension 1 for cross_entropy and nll_loss",
    ),
    Kind(
        "mutated",
        "{detail} changes the logits in place",
        "use the out-of-place form (`z = z / t`, with a t for each row where some rows change; `masked_fill` for an "
        "assignment)",
    ),
    Kind(
        "operand_mutated",
        "{detail} changes the hidden states, the weight or the targets after the projection has read them",
        "make the change before the projection, or to a copy (`x = x * 2` for `x *= 2`)",
    ),
    Kind(
        "subclass",
        "{detail} is a tensor subclass (sharded, quantised or wrapped), whose values fxfuse does not see",
        "unwrap it before the projection, or leave this head to the library that wraps it",
        mendable=False,
    ),
    Kind(
        "functional_transform",
        "the head is inside a torch.func transform ({detail})",
        "take the loss outside of the transform, or use torch.autograd.grad",
        mendable=False,
    ),
    Kind(
        "device",
        "the head is on {detail}; fxfuse has kernels for CPU and CUDA",
        "move the model to a CPU or CUDA device",
        mendable=False,
    ),
    Kind(
        "dtype",
        "{detail}",
        "use float32, float16, bfloat16 or float64 throughout, and int64 class indices",
    ),
    Kind(
        "shape",
        "{detail}",
        "give indices the shape of the logits in all but the vocabulary, and weights a fixed shape, as a Parameter has",
    ),
    Kind(
        "internal_error",
        "fxfuse failed while analysing this graph ({detail}) and left it unchanged",
        "please report this, with the program, as a bug of fxfuse",
        mendable=False,
    ),
)

KINDS = {kind.code: kind for kind in _KINDS}


@dataclass(frozen=True)
class Reason:
    """Why one head was kept dense.

    Attributes:
        code: one of ``reasons.KINDS``.
        sentence: what happened, complete.
        remedy: what the user can do about it.
        where: ``file.py:line`` of the operation that needs the logits, or None if not known.
        source: the text of that line, which the report adds; empty if it cannot be read.
    """

    code: str
    sentence: str
    remedy: str
    where: str | None = None
    source: str = ""

    @property
    def mendable(self) -> bool:
        """Whether the user can do something about it; only then does ``fxfuse.strict`` raise."""
        return KINDS[self.code].mendable


def because(code: str, detail: str = "", where: str | None = None) -> Reason:
    """The reason ``code`` with its sentence filled in."""
    kind = KINDS[code]
    return Reason(code, kind.sentence.format(detail=detail), kind.remedy, where)
