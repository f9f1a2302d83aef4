"""For every reason, a program that is kept for it, and the same program after its remedy was followed, which is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, new_sites
from programs import BATCH, VOCAB, World, ce
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxfuse.reasons import KINDS

Program = Callable[[World], Any]


class Remedy(NamedTuple):
    """``words`` are of the remedy that was followed from ``before`` to ``after``.

    ``world`` and the options are those of ``before`` where they matter, and the options ``also`` of ``after``.
    """

    words: str
    before: Program
    after: Program
    world: Callable[[], World] = World.make
    options: dict[str, Any] = {}  # noqa: RUF012 (nobody writes to it)
    also: dict[str, Any] = {}  # noqa: RUF012


def _wrapped_world() -> World:
    from torch.testing._internal.two_tensor import TwoTensor

    s = World.make()
    s.w = TwoTensor(s.w.detach(), s.w.detach())
    return s


def _written_rows(s: World) -> Tensor:
    z = s.z
    z[:, 1:] /= 2
    return ce(z, s.y)


def _scaled_rows(s: World) -> Tensor:
    z = s.z
    z = z / torch.tensor([1.0, 2, 2, 2, 2], device=z.device, dtype=z.dtype)[:, None]
    return ce(z, s.y)


def _hidden_states_written(s: World) -> Tensor:
    x = s.x.detach() * 1
    z = F.linear(x, s.w)
    x *= 2
    return ce(z, s.y) + x.sum()


def _hidden_states_copied(s: World) -> Tensor:
    x = s.x.detach() * 1
    z = F.linear(x, s.w)
    x = x * 2
    return ce(z, s.y) + x.sum()


def _metric_beside(s: World) -> Any:
    z = s.z
    return ce(z, s.y), z.sort(-1).values[..., 0]


def _capped(s: World) -> Tensor:
    return ce(torch.tanh(s.z / s.number) * s.number, s.y)


def _world_of_another_number() -> World:
    """Than the program was compiled for."""
    s = World.make()
    for s.number in (3.0, 2.0):
        compiled(_capped, dynamic=True)(s)
        torch._dynamo.reset()
    return s


def _under_grad_of_func(s: World) -> Tensor:
    return torch.func.grad(lambda x: ce(F.linear(x, s.w.detach()), s.y))(s.x.detach())


def _repeated(s: World) -> Tensor:
    log_probs = s.z.log_softmax(-1)[:, :, None].expand(-1, -1, 8, -1)
    return log_probs.gather(-1, s.y[:, :, None, None].expand(-1, -1, 8, 1))[..., 0]


def _gathered(s: World) -> Tensor:
    return s.z.log_softmax(-1).gather(-1, s.y[:, :, None].expand(-1, -1, 8))


def _one_row(s: World) -> Tensor:
    return F.linear(s.x[:1, :1], s.w)


def _loss_alone(s: World) -> Tensor:
    return ce(F.linear(s.x, s.w.detach()), s.y)


# Every head is large enough, and yet only fused where that takes less.
ALL_SIZES = {"min_logits_bytes": 1}

REMEDIES: dict[str, Remedy] = {
    "too_small": Remedy(
        'options={"fxfuse.min_logits_bytes": 0}',
        lambda s: ce(s.z, s.y),
        lambda s: ce(s.z, s.y),
        options={"min_logits_bytes": 1 << 20},
    ),
    "repeated": Remedy("one `gather` of several classes", _repeated, _gathered, options=ALL_SIZES, also=ALL_SIZES),
    "weight_copied": Remedy(
        "adding a vector of 0 and -inf",
        lambda s: ce(_one_row(s).masked_fill(torch.arange(VOCAB) > 9, float("-inf")), s.y[:1, :1] * 0),
        lambda s: ce(
            _one_row(s) + torch.zeros(VOCAB).masked_fill(torch.arange(VOCAB) > 9, float("-inf")), s.y[:1, :1] * 0
        ),
        options=ALL_SIZES,
        also=ALL_SIZES,
    ),
    "returned": Remedy(
        "the vocabulary last",
        lambda s: (ce(s.z, s.y), F.linear(s.x, s.w, s.b).mT),
        lambda s: (ce(s.z, s.y), F.linear(s.x, s.w, s.b)),
    ),
    "checkpointed": Remedy(
        "compute the loss inside of it too",
        lambda s: ce(checkpoint(F.linear, s.x, s.w, use_reentrant=False), s.y),
        lambda s: checkpoint(lambda x, w: ce(F.linear(x, w), s.y), s.x, s.w, use_reentrant=False),
    ),
    "unknown_reader": Remedy("take anything else", _metric_beside, lambda s: ce(s.z, s.y)),
    "unsupported_argument": Remedy(
        "use the default for this argument",
        lambda s: ce(s.z, s.y, size_average=False),
        lambda s: ce(s.z, s.y, reduction="sum"),
    ),
    "changing_number": Remedy(
        "let it stay the same",
        _capped,
        lambda s: ce(torch.tanh(s.z / 2.0) * 2.0, s.y),
        _world_of_another_number,
        options={"dynamic": True},
    ),
    "probability_targets": Remedy(
        "pass class indices",
        lambda s: F.cross_entropy(s.z.mT, F.one_hot(s.y, VOCAB).mT.to(s.x.dtype)),
        lambda s: F.cross_entropy(s.z.mT, s.y),
    ),
    "vocabulary_split": Remedy(
        "by `chunk`",
        lambda s: F.cross_entropy(
            s.z[..., :16].unflatten(-1, (2, 8)).flatten(0, 2), s.y.flatten().repeat_interleave(2) % 8
        ),
        lambda s: (
            sum(F.cross_entropy(part.flatten(0, 1), s.y.flatten() % 8) for part in s.z[..., :16].chunk(2, -1)) / 2
        ),
    ),
    "class_dim": Remedy(
        "apply it along the vocabulary dimension",
        lambda s: F.cross_entropy(s.z[:, :VOCAB], s.y.new_zeros(BATCH, VOCAB)),
        lambda s: F.cross_entropy(s.z.mT, s.y),
    ),
    "mutated": Remedy("use the out-of-place form", _written_rows, _scaled_rows),
    "operand_mutated": Remedy("to a copy", _hidden_states_written, _hidden_states_copied),
    "subclass": Remedy(
        "unwrap it before the projection",
        lambda s: ce(F.linear(s.x.detach(), s.w), s.y),
        lambda s: ce(F.linear(s.x.detach(), s.w), s.y),
        _wrapped_world,
    ),
    "functional_transform": Remedy("take the loss outside of the transform", _under_grad_of_func, _loss_alone),
    "device": Remedy(
        "move the model to a CPU or CUDA device",
        lambda s: ce(F.linear(s.x.to("meta"), s.w.to("meta")), s.y.to("meta")),
        lambda s: ce(F.linear(s.x.cpu(), s.w.cpu()), s.y.cpu()),
    ),
    "dtype": Remedy(
        "float32, float16, bfloat16 or float64 throughout",
        lambda s: ce(s.z.to(torch.int64).to(s.x.dtype), s.y),
        lambda s: ce(s.z.to(s.x.dtype), s.y),
    ),
    "shape": Remedy(
        "give indices the shape of the logits in all but the vocabulary",
        lambda s: s.z.gather(-1, s.y[:, :3, None]),
        lambda s: s.z[:, :3].gather(-1, s.y[:, :3, None]),
    ),
}


def _reasons(program: Program, world: World, **options: Any) -> tuple[set[str], set[str]]:
    """The statuses of the heads of a program, and why some were kept."""
    torch._dynamo.reset()
    with new_sites() as sites:
        compiled(program, **options)(world)
    return {site.status for site in sites}, {site.reason.code for site in sites if site.reason}


def test_every_reason_has_a_remedy() -> None:
    """But for a fault of fxfuse itself, of which the remedy is to report it."""
    assert set(KINDS) - set(REMEDIES) == {"internal_error"}


@pytest.mark.parametrize("code", REMEDIES)
def test_a_remedy_works_when_followed(code: str) -> None:
    remedy = REMEDIES[code]
    assert remedy.words in KINDS[code].remedy
    _, reasons = _reasons(remedy.before, remedy.world(), **remedy.options)
    assert reasons == {code}
    statuses, reasons = _reasons(remedy.after, World.make(), **remedy.also)
    assert not reasons and statuses and statuses <= {"fused", "deferred"}
