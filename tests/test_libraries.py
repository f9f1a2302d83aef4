"""Other libraries' own functions, as they are installed: TRL, torchtune, LitGPT, verl, torchtitan, lm-eval and others.

Each runs twice: compiled with the projection in one graph, and in eager code on the logits that a compiled projection
returns. Values and gradients are eager's, and each function has its verdict, so that a rule that is lost, or gained,
shows. A library that is not installed is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, dense_reads, new_sites
from torch import Tensor

BATCH, TIME, HIDDEN, VOCAB = 2, 6, 8, 33


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


# --- functions of logits --------------------------------------------------------------------------------------


@dataclass
class World:
    """What the functions take beside logits: labels ``y``, with ignored ones ``masked``, and logits of a teacher."""

    x: Tensor
    w: Tensor
    y: Tensor
    masked: Tensor
    teacher: Tensor

    @classmethod
    def make(cls) -> World:
        g = torch.Generator().manual_seed(0)
        y = torch.randint(VOCAB, (BATCH, TIME), generator=g)
        masked = y.clone()
        masked[0, :2] = -100
        return cls(
            torch.randn(BATCH, TIME, HIDDEN, generator=g).requires_grad_(),
            torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=g)),
            y,
            masked,
            torch.randn(BATCH, TIME, VOCAB, generator=g),
        )


def _chunks(z: Tensor) -> list[Tensor]:
    return list(z.chunk(2, dim=1))


def _flat(*tensors: Tensor) -> list[Tensor]:
    return [t.flatten(0, 1) for t in tensors]


STYLES = ("one_graph", "eager_on_deferred")

# By name: the module, and what is called with it, logits [B, T, V] and the world. The rest of the name says the case.
Program = tuple[str, Callable[[Any, Tensor, World], Any]]
PROGRAMS: dict[str, Program] = {
    # TRL
    "trl_selective_log_softmax": ("trl.trainer.utils", lambda m, z, s: m.selective_log_softmax(z, s.y)),
    "trl_selective_log_softmax_warm": (
        "trl.trainer.utils",
        lambda m, z, s: m.selective_log_softmax(z, s.y, temperature=0.7, row_mask=s.masked != -100),
    ),
    "trl_selective_log_softmax_of_several": (
        "trl.trainer.utils",
        lambda m, z, s: m.selective_log_softmax(z, torch.stack([s.y, s.y.flip(1)], -1)),
    ),
    "trl_selective_log_softmax_bf16": (
        "trl.trainer.utils",
        lambda m, z, s: m.selective_log_softmax(z.bfloat16(), s.y),
    ),
    "trl_entropy_from_logits": ("trl.trainer.utils", lambda m, z, s: m.entropy_from_logits(z)),
    "trl_entropy_from_logits_in_chunks": ("trl.trainer.utils", lambda m, z, s: m.entropy_from_logits(z, chunk_size=5)),
    "trl_log_softmax_and_entropy": (
        "trl.trainer.utils",
        lambda m, z, s: m.selective_log_softmax_and_entropy(z, s.y, temperature=0.7, row_mask=s.masked != -100),
    ),
    "trl_log_softmax_and_entropy_as_a_metric": (
        "trl.trainer.utils",
        lambda m, z, s: m.selective_log_softmax_and_entropy(z, s.y, entropy_requires_grad=False),
    ),
    "trl_orpo_logps": (
        "trl.experimental.orpo",
        lambda m, z, s: m.ORPOTrainer.get_batch_logps(z, s.masked, average_log_prob=True),
    ),
    "trl_cpo_logps": ("trl.experimental.cpo", lambda m, z, s: m.CPOTrainer.get_batch_logps(z, s.masked)),
    "trl_gkd_jsd": (
        "trl.experimental.gkd",
        lambda m, z, s: m.GKDTrainer.generalized_jsd_loss(z, s.teacher, s.masked),
    ),
    "trl_gkd_forward_kl": (
        "trl.experimental.gkd",
        lambda m, z, s: m.GKDTrainer.generalized_jsd_loss(z, s.teacher, beta=0, temperature=0.7),
    ),
    "trl_gkd_reverse_kl": (
        "trl.experimental.gkd",
        lambda m, z, s: m.GKDTrainer.generalized_jsd_loss(z, s.teacher, beta=1, reduction="sum"),
    ),
    # torchtune
    "torchtune_chunked_ce": (
        "torchtune.modules.loss",
        lambda m, z, s: m.CEWithChunkedOutputLoss(num_output_chunks=2)(_chunks(z), s.masked),
    ),
    "torchtune_forward_kl": (
        "torchtune.modules.loss",
        lambda m, z, s: m.ForwardKLLoss()(*_flat(z, s.teacher, s.masked)),
    ),
    "torchtune_reverse_kl": (
        "torchtune.modules.loss",
        lambda m, z, s: m.ReverseKLLoss()(*_flat(z, s.teacher, s.masked)),
    ),
    "torchtune_symmetric_kl": (
        "torchtune.modules.loss",
        lambda m, z, s: m.SymmetricKLLoss()(*_flat(z, s.teacher, s.masked)),
    ),
    "torchtune_chunked_forward_kl": (
        "torchtune.modules.loss",
        lambda m, z, s: m.ForwardKLWithChunkedOutputLoss(2)(_chunks(z), _chunks(s.teacher), s.masked),
    ),
    "torchtune_logits_to_logprobs": ("torchtune.rlhf", lambda m, z, s: m.logits_to_logprobs(z, s.y, temperature=0.7)),
    "torchtune_batch_log_probs": ("torchtune.rlhf", lambda m, z, s: m.get_batch_log_probs(z, s.masked)),
    "torchtune_truncated_log_probs": (
        "torchtune.rlhf",
        lambda m, z, s: m.logits_to_logprobs(m.truncate_sequence_for_logprobs(z, 3), s.y[:, 3:]),
    ),
    # LitGPT
    "litgpt_chunked_ce": ("litgpt.utils", lambda m, z, s: m.chunked_cross_entropy(z, s.masked, chunk_size=5)),
    "litgpt_unchunked_ce": ("litgpt.utils", lambda m, z, s: m.chunked_cross_entropy(z, s.masked, chunk_size=0)),
    "litgpt_ce_of_chunks": ("litgpt.utils", lambda m, z, s: m.chunked_cross_entropy(_chunks(z), s.masked)),
    "litgpt_unchunked_ce_of_chunks": (
        "litgpt.utils",
        lambda m, z, s: m.chunked_cross_entropy(_chunks(z), s.masked, chunk_size=0),
    ),
    # verl
    "verl_logprobs": ("verl.utils.torch_functional", lambda m, z, s: m.logprobs_from_logits(z, s.y)),
    "verl_logprobs_flat": ("verl.utils.torch_functional", lambda m, z, s: m.logprobs_from_logits(*_flat(z, s.y))),
    "verl_logprobs_naive": ("verl.utils.torch_functional", lambda m, z, s: m.logprobs_from_logits_naive(z, s.y)),
    "verl_logprobs_bf16": (
        "verl.utils.torch_functional",
        lambda m, z, s: m.logprobs_from_logits_v2(z.bfloat16(), s.y),
    ),
    "verl_logprobs_of_a_response": (
        "verl.utils.torch_functional",
        lambda m, z, s: m.log_probs_from_logits_response(s.y, z, 3),
    ),
    "verl_entropy": ("verl.utils.torch_functional", lambda m, z, s: m.entropy_from_logits(z)),
    "verl_entropy_in_chunks": (
        "verl.utils.torch_functional",
        lambda m, z, s: m.entropy_from_logits_with_chunking(z.flatten(0, 1), chunk_size=5),
    ),
    "verl_sum_pi_squared": (
        "verl.utils.torch_functional",
        lambda m, z, s: m.calculate_sum_pi_squared_from_logits(z),
    ),
    "verl_warm_logprobs_and_entropy": ("verl.utils.torch_functional", lambda m, z, s: _verl_actor(m, z, s)),
    # torchtitan
    "torchtitan_ce": ("torchtitan.components.loss", lambda m, z, s: m.cross_entropy_loss(z, s.masked)),
    "torchtitan_logprobs": ("torchtitan.components.loss", lambda m, z, s: m.compute_logprobs(z, s.masked)),
    "torchtitan_logprobs_and_entropy": (
        "torchtitan.components.loss",
        lambda m, z, s: m.compute_logprobs(z, s.masked, return_entropy=True),
    ),
}

# Where logits are computed nevertheless, in these styles.
DENSE = {
    "trl_gkd_jsd": STYLES,
    "trl_gkd_forward_kl": STYLES,
    "trl_gkd_reverse_kl": STYLES,
    "torchtune_forward_kl": STYLES,
    "torchtune_reverse_kl": STYLES,
    "torchtune_symmetric_kl": STYLES,
    "torchtune_chunked_forward_kl": STYLES,
    "torchtitan_logprobs_and_entropy": STYLES,
    "verl_warm_logprobs_and_entropy": ("eager_on_deferred",),
}


def _verl_actor(m: Any, z: Tensor, s: World) -> Any:
    """verl's actor: temperature in place, then log-probabilities and entropy."""
    z = m.post_process_logits(s.y, z, temperature=0.7, top_k=None, top_p=None)
    return m.logprobs_from_logits(z, s.y), m.entropy_from_logits(z)


def _run(program: Callable[..., Any], world: World) -> list[Any]:
    """What ``program`` returns, and the gradients of the hidden states and the weight."""
    out = program(world.x, world.w)
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    roots = [out for out in outs if out.requires_grad]
    grads = torch.autograd.grad([(root.float() * torch.linspace(0.5, 1.5, root.numel()).view(root.shape)).sum()
                                 for root in roots], (world.x, world.w)) if roots else ()  # fmt: skip
    return [*(out.detach() for out in outs), *grads]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_function(name: str, style: str) -> None:
    module, function = PROGRAMS[name]
    library = pytest.importorskip(module)
    world = World.make()

    def eager(x: Tensor, w: Tensor) -> Any:
        return function(library, F.linear(x, w), world)

    expected = _run(eager, world)
    head = compiled(F.linear)
    ours = compiled(eager) if style == "one_graph" else lambda x, w: function(library, head(x, w), world)
    with new_sites() as sites, dense_reads() as reads:
        actual = _run(ours, world)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if "bf16" in name else {}
    torch.testing.assert_close(actual, expected, **tolerance)
    assert sites
    dense = [*reads, *(site.reason for site in sites if site.reason)]
    assert bool(dense) == (style in DENSE.get(name, ())), dense
    if style == "one_graph" and not dense:
        assert {site.status for site in sites} == {"fused"}, sites
