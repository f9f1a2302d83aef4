"""Several GPUs in one process: operands elsewhere than on the current device, a model that lies on two."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, dense_reads, problem, value_and_grads
from torch import Tensor

import fxfuse
from fxfuse.deferred import DeferredLogits

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

HERE, ELSEWHERE = "cuda:0", "cuda:1"


def _loss(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return fxfuse.linear_cross_entropy(input, weight, target)


def _log_probs(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return fxfuse.linear_log_probs(input, weight, target)


def _divergence(input: Tensor, weight: Tensor) -> Tensor:
    student, teacher = F.linear(input, weight), F.linear(input.detach() * 0.5, weight.detach())
    return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean")


def _compiled(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    fused = compiled(f)
    return lambda input, weight, target: fused(input, weight)


OPS = {
    "loss": _loss,
    "log-probabilities": _log_probs,
    "all log-probabilities": _compiled(lambda input, weight: F.linear(input, weight).log_softmax(-1)),
    "best classes": _compiled(lambda input, weight: F.linear(input, weight).topk(5).values),
    "divergence": _compiled(_divergence),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("shape", [(300, 64, 1000), (520, 2048, 3000), (5, 64, 1000)], ids=str)
def test_the_current_device_does_not_matter(shape: tuple[int, int, int], name: str, dtype: torch.dtype) -> None:
    """Nor which came first: the second and third call of a kind are launched from what earlier ones wrote down."""
    torch.cuda.set_device(HERE)
    found = []
    for device in (HERE, ELSEWHERE, HERE, ELSEWHERE, ELSEWHERE, HERE):
        p = problem(*shape, dtype, device)
        found.append(value_and_grads(lambda x, w, y=p.target: OPS[name](x, w, y), p.input, p.weight))
        assert {tensor.device for tensor in found[-1]} == {torch.device(device)}
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a.cpu(), b.cpu())


def test_the_first_call_of_a_thread_may_be_on_any_device() -> None:
    """Of calls that earlier ones wrote down."""
    problems = [problem(300, 64, 1000, torch.bfloat16, device) for device in (HERE, ELSEWHERE)]

    def run(i: int) -> list[Tensor]:
        p = problems[i]
        return value_and_grads(lambda x, w: _loss(x, w, p.target), p.input, p.weight)

    for _ in range(3):
        expected = [run(0), run(1)]
    for first in (0, 1):
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(lambda first=first: [run(first), run(1 - first)]).result()
        for got, want in zip(found, (expected[first], expected[1 - first]), strict=True):
            assert all(map(torch.equal, got, want))


class _Model(torch.nn.Module):
    def __init__(self, body: str, head: str) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(1000, 64, device=body)
        self.head = torch.nn.Linear(64, 1000, bias=False, device=head)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(ids).to(self.head.weight.device))
        return logits


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("body", [HERE, ELSEWHERE])
def test_a_head_on_another_device(body: str, inner: str) -> None:
    """With the loss in eager code, a read of what came before an optimizer's step, and reads from another stream."""
    torch.cuda.set_device(HERE)
    torch.manual_seed(0)
    eager = _Model(body, ELSEWHERE)
    models = (copy.deepcopy(eager), eager)
    ours = compiled(models[0], inner=inner)
    ids = torch.randint(1000, (8, 33), device=body)
    labels = ids[:, 1:].to(ELSEWHERE).flatten()
    for _ in range(3):
        best = []
        for run, model in ((ours, models[0]), (eager, eager)):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            logits = run(ids[:, :-1])
            with dense_reads() as reads:
                F.cross_entropy(logits.flatten(0, 1), labels).backward()
            assert not reads
            if run is ours:
                assert isinstance(logits, DeferredLogits)
            optimizer.step()
            side = torch.cuda.Stream(ELSEWHERE)
            side.wait_stream(torch.cuda.current_stream(ELSEWHERE))
            with torch.cuda.stream(side):
                best.append(logits.detach().flatten(0, 1).log_softmax(-1)[:, 0])
            with torch.cuda.stream(torch.cuda.Stream(HERE)):
                best.append(logits.detach().flatten(0, 1).max(-1).values)
        torch.cuda.synchronize(ELSEWHERE)
        torch.testing.assert_close(best[:2], best[2:])
        for a, b in zip(models[0].parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
            a.grad = b.grad = None
