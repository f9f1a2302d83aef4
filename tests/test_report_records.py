"""What the report knows: chains, variants, worth, graphs, breaks, readers at run time, and its documented JSON form."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from programs import FUSED, KEPT, World
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import fxfuse
from fxfuse.errors import FxfuseWarning
from fxfuse.reasons import Reason
from fxfuse.report import GraphRecord, Report, Site, records
from fxfuse.report.records import Cost, Ending, FusedRead, Journal, Measured, Projection, Read, Use, journal
from fxfuse.report.source import line_at, location
from fxfuse.report.words import step, word

OPTIONS = {"fxfuse.inner": "eager", "fxfuse.min_logits_bytes": 0}
DOCUMENT = Path(__file__).parent.parent / "docs" / "report.md"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(torch.nn.Module):
    def __init__(self, read: Callable[..., Any]) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 8)
        self.lm_head = torch.nn.Linear(8, 64, bias=False)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.read = read

    def forward(self, ids: torch.Tensor) -> Any:
        return self.read(self, self.embed(ids), ids)


def ids(batch: int = 2) -> torch.Tensor:
    return torch.randint(64, (batch, 6))


def report_of(read: Callable[..., Any], **options: Any) -> Report:
    since = len(journal)
    own = {**OPTIONS, **{f"fxfuse.{name}": value for name, value in options.items()}}
    torch.compile(Model(read), backend="fxfuse", options=own)(ids())
    return journal.report(since)


def site_of(read: Callable[..., Any], **options: Any) -> Site:
    (site,) = report_of(read, **options)
    return site


def ce(z: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(z.reshape(-1, z.shape[-1]), y.reshape(-1), **options)


# Chains


def _capped(m: Any, x: Any, y: Any) -> Any:
    z = m.lm_head(x)
    z = 30 * torch.tanh(z / 30)
    return ce(z[:, :-1].float() / 0.7, y[:, 1:], ignore_index=-100, reduction="sum")


def _parts(m: Any, x: Any, y: Any) -> Any:
    return sum(ce(z, t) for z, t in zip(m.lm_head(x).chunk(2, 1), y.chunk(2, 1), strict=True))


def _entropy(m: Any, x: Any, y: Any) -> Any:
    logp = F.linear(x, m.embed.weight).log_softmax(-1)
    return -(logp.exp() * logp).sum(-1), logp.gather(-1, y[..., None])


def _in_place(m: Any, x: Any, y: Any) -> Any:
    z = m.lm_head(x)
    z.mul_(2)
    return ce(z, y, label_smoothing=0.1)


@torch.library.custom_op("fxfuse_test_chains::store", mutates_args=("out",))
def _store(out: torch.Tensor, z: torch.Tensor) -> None:
    out.copy_(z.amax(-1))


def _edit(edit: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    def read(m: Any, x: Any, y: Any) -> Any:
        z = m.lm_head(x)
        edit(z)
        return ce(z, y)

    return read


def _edited_after(m: Any, x: Any, y: Any) -> Any:
    z = m.lm_head(x)
    v = z.view(-1, 64)
    z.mul_(2)
    return F.cross_entropy(v, y.view(-1))


def _read_twice(m: Any, x: Any, y: Any) -> Any:
    z = m.lm_head(x)
    loss = ce(z, y)
    z.mul_(2)
    return loss + ce(z, y)


def _edit_part(m: Any, x: Any, y: Any) -> Any:
    z = m.lm_head(x)
    z[:, 0] *= 2
    return ce(z, y)


def _edit_apart(m: Any, x: Any, y: Any) -> Any:
    z = m.lm_head(x)
    first, rest = z[:, :3], z[:, 3:]
    first.mul_(2)
    return ce(rest, y[:, 3:]) + ce(z, y)


def _taught(m: Any, x: Any, y: Any) -> Any:
    teacher = F.softmax(x @ m.embed.weight.t(), -1)
    return F.kl_div(F.log_softmax(m.lm_head(x), -1), teacher, reduction="batchmean")


CHAINS: dict[str, tuple[Callable[..., Any], str]] = {
    "arguments": (
        _capped,
        "lm_head → / 30 → tanh → * 30 → [:, :-1] → float → / 0.7 → reshape → "
        'cross_entropy(ignore_index=-100, reduction="sum")',
    ),
    "without_a_module": (
        _entropy,
        "linear(embed.weight) → log_softmax → (exp → * log_softmax → sum) + gather",
    ),
    "several_results": (_parts, "lm_head → chunk(2, dim=1) → reshape → cross_entropy"),
    "in_place": (_in_place, "lm_head → *= 2 → reshape → cross_entropy(label_smoothing=0.1)"),
    "in_place_of_a_view": (_edit(lambda z: z.view(-1, 64).mul_(2)), "lm_head → *= 2 → reshape → cross_entropy"),
    "in_place_after_a_view": (_edited_after, "lm_head → view → *= 2 → cross_entropy"),
    "in_place_transposed": (_edit(lambda z: z.transpose(0, 1).div_(2)), "lm_head → /= 2 → reshape → cross_entropy"),
    "in_place_between": (
        _read_twice,
        "lm_head → (reshape → cross_entropy) + (*= 2 → reshape → cross_entropy)",
    ),
    "assigned": (
        _edit(lambda z: z.__setitem__((slice(None), 0), -1e9)),
        "lm_head → [:, 0] = -1e+09 → reshape → cross_entropy",
    ),
    "in_place_of_a_part": (_edit(lambda z: z[:, 0].zero_()), "lm_head → [:, 0] zero_ → reshape → cross_entropy"),
    "operator_of_a_part": (_edit_part, "lm_head → [:, 0] *= 2 → reshape → cross_entropy"),
    "in_place_of_another_part": (
        _edit_apart,
        "lm_head → ([:, 3:] → reshape → cross_entropy) + ([:, :3] *= 2 → reshape → cross_entropy)",
    ),
    "called_for_what_it_does": (
        _edit(lambda z: torch.ops.fxfuse_test_chains.store(z.new_zeros(2, 6), z)),
        "lm_head → store + (reshape → cross_entropy)",
    ),
    "parameter": (lambda m, x, y: ce(m.lm_head(x) * m.scale, y), "lm_head → * scale → reshape → cross_entropy"),
    "minus": (lambda m, x, y: ce(1 - m.lm_head(x), y), "lm_head → 1 - → reshape → cross_entropy"),
    "two_heads": (
        _taught,
        'lm_head → log_softmax → kl_div(reduction="batchmean") with (matmul(embed.weight) → softmax)',
    ),
    "no_rule": (lambda m, x, y: m.lm_head(x).amax(-1), "lm_head → amax"),
    "beside_no_rule": (
        lambda m, x, y: (m.lm_head(x).sort(-1)[0], x),
        "lm_head → sort(-1) → return",
    ),
    "returned": (lambda m, x, y: m.lm_head(x)[:, -1], "lm_head → [:, -1] → return"),
    "mask": (
        lambda m, x, y: ce(m.lm_head(x).masked_fill(torch.arange(64) > 60, float("-inf")), y),
        "lm_head → masked_fill(-inf) → reshape → cross_entropy",
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_reads_as_the_program_is_written(name: str) -> None:
    read, expected = CHAINS[name]
    assert site_of(read).chain == expected


HEADS = ("linear", "matmul", "mm", "mv", "addmm", "einsum", "inner", "tensordot")
# Programs that read what they made of logits together with something else that they made of them: two ways lead there.
JOINED = (
    *("entropies", "entropy_as_a_metric", "metrics_of_all", "result_as_class_weight", "row_shifts"),
    *("less_logits", "no_grad_entropy"),
    *("less_their_largest", "largest_of_the_certain", "normalised_by_hand", "normalised_in_steps"),
    *("categorical", "categorical_of_a_mask"),
    *("categorical_of_a_mask_after_a_softcap", "entropy_of_least_numbers"),
    *("probabilities_of_a_teacher", "jensen_shannon", "jensen_shannon_by_logaddexp", "jensen_shannon_of_probabilities"),
    *("skewed_divergence", "mixture_by_a_written_number", "weighed_by_another", "divergence_by_hand"),
    *(
        "halves_of_a_batch",
        "its_own_teacher",
        "parts_of_mixtures",
        "distillation_of_finite_logits",
        "finite_logits_of_masked_classes",
        "entropies_and_cross_entropies",
        "normaliser_under_no_grad",
        "shifted_rows_of_frozen_hidden_states",
    ),
)


def _functions(steps: str) -> tuple[str, ...]:
    """What a chain or a pattern calls, one word for each step: ``"/"`` of ``"/ 0.7"``, ``"view"``."""
    return tuple(map(_function, steps.split(" → ")[1:]))


def _function(step: str) -> str:
    if step.startswith(("[", ".")):
        return "[…]" if step.startswith("[") else "getattr"
    name = step.partition(" with (")[0].partition("(")[0].strip()
    symbol = re.search(r"(?<!\S)([-+*/%@]|\*\*|//)=?(?!\S)", name)
    return symbol[0] if symbol else word(name)


@pytest.mark.slow
def test_every_program_is_told(recwarn: pytest.WarningsRecorder) -> None:
    """Whatever is done to logits has a chain from the projection to each reader, and why it is computed as it is."""
    told = {}
    for name, program in (*FUSED.items(), *((name, program) for name, (_, program) in KEPT.items())):
        torch._dynamo.reset()
        since = len(journal)
        torch.compile(program, backend="fxfuse", options=OPTIONS)(World.make())
        told[name] = journal.report(since).sites
    assert not [w for w in recwarn if w.category is FxfuseWarning]
    for name, sites in told.items():
        for site in sites:
            assert site.uses
            for use in site.uses:
                first, *rest = use.chain.split(" → ")
                assert first.partition("(")[0] in HEADS
                assert rest
            if site.status == "fused":  # then the analysis, which proved it, says what was called
                uses = {_functions(use.chain) for use in site.uses}
                proved = {_functions(pattern) for pattern in site.pattern.split(" + ")}
                if name in JOINED:
                    uses, proved = {use[-1:] for use in uses}, {use[-1:] for use in proved}
                    assert uses <= proved
                else:
                    assert uses == proved, name
            assert bool(site.why) == (site.status != "kept")
            assert site.source


def _refined(m: Any, x: Any, y: Any) -> Any:
    z = m.lm_head(x)
    for _ in range(60):
        z = z + z.tanh()
    return ce(z, y)


def _gathered(m: Any, x: Any, y: Any) -> Any:
    z, labels = m.lm_head(x), y
    for _ in range(60):
        z, labels = torch.cat([z, m.lm_head(x)]), torch.cat([labels, y])
    return ce(z, labels)


def _distilled(m: Any, x: Any, y: Any) -> Any:
    z, other = m.lm_head(x), F.linear(x, m.embed.weight)
    for _ in range(60):
        z, other = torch.minimum(z, other), torch.maximum(z, other)
    return ce(z, y)


def _deep(m: Any, x: Any, y: Any) -> Any:
    z = m.lm_head(x)
    for _ in range(1500):
        z = z + 1
    return ce(z, y)


def _deep_and_kept(m: Any, x: Any, y: Any) -> Any:
    z = m.lm_head(x)
    for _ in range(1500):
        z = z.sin()
    return ce(z, y)


@pytest.mark.parametrize(
    ("read", "status", "calls"),
    [
        (_gathered, "fused", 61 + 2),
        (_refined, "kept", 120 + 2),
        (_distilled, "kept", 120 + 2),
        (_deep, "fused", 1500 + 2),
        (_deep_and_kept, "kept", 1500 + 2),
    ],
)
def test_telling_takes_time_and_room_in_proportion(
    read: Callable[..., Any], status: str, calls: int, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """However deep a graph is, and however often it uses a value again."""
    written = []
    monkeypatch.setattr("fxfuse.report.walk.step", lambda *call: written.append(step(*call)) or written[-1])
    sites = report_of(read).sites
    assert not [w for w in recwarn if w.category is FxfuseWarning]
    assert [site.status for site in sites] == [status] * len(sites)
    assert 0 < len(written) <= 2 * calls
    for site in sites:
        assert site.chain.endswith("→ reshape → cross_entropy")
        assert all(len(use.chain) < 4000 for use in site.uses)
        (use,) = site.uses
        assert ("… →" in use.chain) == (calls > 40)


def test_a_failure_of_the_report_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("fxfuse.report.site.uses_of", fail)
    monkeypatch.setattr("fxfuse.report.captured.losses_of_inputs", fail)
    with pytest.warns(FxfuseWarning, match="could not tell its report how logits are used .KeyError: 'lost'"):
        site = site_of(lambda m, x, y: ce(m.lm_head(x), y))
    assert (site.status, site.uses) == ("fused", ())


class _Wrapper(torch.nn.Module):
    """Looks attributes up in what it wraps, as PEFT's models do."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = torch.nn.ModuleDict({"default": model})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.model["default"](ids)


def test_modules_are_named_within_others_that_look_attributes_up() -> None:
    model = Model(lambda m, x, y: sum(ce(head(x), y) for head in (m.lm_head, *m.heads, m.named["a-b"])))
    model.heads = torch.nn.ModuleList([torch.nn.Linear(8, 64), torch.nn.Linear(8, 65)])
    model.named = torch.nn.ModuleDict({"a-b": torch.nn.Linear(8, 66)})
    since = len(journal)
    torch.compile(_Wrapper(_Wrapper(model)), backend="fxfuse", options=OPTIONS)(ids())
    within = "model.default.model.default."
    assert [site.module for site in journal.report(since)] == [
        f"{within}{n}" for n in ("lm_head", "heads.0", "heads.1", "named.a-b")
    ]


@pytest.mark.parametrize("key", ["0", "a b", "it's", 'q"t', "it's \"q", "a[0]", "x]y", "f(x), 'y'", "back\\slash"])
def test_modules_have_their_names_however_these_are_spelled(key: str) -> None:
    model = Model(lambda m, x, y: ce(m.named[key](x), y) + ce(getattr(m, key)(x), y))
    model.named = torch.nn.ModuleDict({key: torch.nn.Linear(8, 64)})
    model.add_module(key, torch.nn.Linear(8, 65))
    since = len(journal)
    torch.compile(model, backend="fxfuse", options=OPTIONS)(ids())
    assert [site.module for site in journal.report(since)] == [f"named.{key}", key]


def test_a_projection_in_a_form_that_is_not_supported_is_kept_with_its_reason() -> None:
    def scaled(m: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ce(torch.addmm(torch.zeros(64), x.flatten(0, 1), m.lm_head.weight.t(), alpha=2), y)

    site = site_of(scaled)
    assert site.status == "kept" and site.reason is not None
    assert site.reason.sentence == "addmm has alpha=2, which fxfuse does not support"


def test_a_place_is_read_from_frames_alone() -> None:
    node = torch.fx.Graph().placeholder("x")
    node.meta["stack_trace"] = '  File "/a"b.py", line 3, in f\n    z = head(x)  # File "other.py", line 4, in g\n'
    assert location(node) == '/a"b.py:3'


class _Sees(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_places_are_those_of_the_program_where_a_mode_is_on() -> None:
    def read(m: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ce(m.lm_head(x), y)

    plain = site_of(read)
    with _Sees():
        site = site_of(read)
    assert site.where == plain.where and site.where.startswith(__file__)
    assert site.chain == plain.chain


@pytest.mark.parametrize("words", ["why", "line_at", "module_path", "eager_bytes", "projection_name"])
@pytest.mark.parametrize("status", ["fused", "deferred", "kept"])
def test_words_that_fail_leave_a_plain_record(words: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("lost")

    read = {
        "fused": lambda m, x, y: ce(m.lm_head(x), y),
        "deferred": lambda m, x, y: (ce(z := m.lm_head(x), y), z),
        "kept": lambda m, x, y: m.lm_head(x).sort(),
    }[status]
    known = site_of(read)
    torch._dynamo.reset()
    monkeypatch.setattr(f"fxfuse.report.site.{words}", fail)
    if (words, status) != ("why", "kept"):
        with pytest.warns(FxfuseWarning, match="could not tell its report"):
            site = site_of(read)
        for field in ("status", "where", "hidden", "vocab", "dtype", "variant"):
            assert getattr(site, field) == getattr(known, field)
        assert (site.reason is None) == (known.reason is None)
        assert site.rows_hint == known.rows_hint
        str(Report((GraphRecord(0, (site,)),)))


def test_a_log_that_fails_stops_no_program() -> None:
    class Strict(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("no logging, please")

    handler, log = Strict(), logging.getLogger("fxfuse")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with pytest.warns(FxfuseWarning, match="no logging, please"):
            z = torch.compile(Model(lambda m, x, y: m.lm_head(x)), backend="fxfuse", options=OPTIONS)(ids())
        with pytest.warns(FxfuseWarning, match="no logging, please"):
            assert z.std() > 0
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


def test_readers_have_their_lines() -> None:
    def read(m: Any, x: Any, y: Any) -> Any:
        z = m.lm_head(x)  # the projection
        best = z.amax(-1)  # what blocks
        return ce(z, y), best  # the loss

    site = site_of(read)
    assert site.source == "z = m.lm_head(x)  # the projection"
    amax, loss = site.uses
    assert amax.source == "best = z.amax(-1)  # what blocks"
    assert loss.chain == "lm_head → reshape → cross_entropy"
    assert loss.source.startswith("return F.cross_entropy(z.reshape")  # where the loss is called, in ce()
    assert site.reason is not None
    assert (site.reason.where, site.reason.source) == (amax.where, amax.source)


@pytest.mark.parametrize("where", [None, "", "<stdin>", "<stdin>:1", "/gone/away.py:3", f"{__file__}:1000000", "x:y"])
def test_a_line_that_cannot_be_read_is_empty(where: str | None) -> None:
    assert line_at(where) == ""


# Variants, shapes and worth


@pytest.mark.parametrize(
    ("read", "options", "variant", "why"),
    [
        (lambda m, x, y: ce(m.lm_head(x), y), {}, "gradients in forward", "cross_entropy is one number"),
        (lambda m, x, y: ce(m.lm_head(x), y), {"memory": 1 << 20}, "recompute in backward", "1,048,576 bytes"),
        (lambda m, x, y: m.lm_head(x).logsumexp(-1), {}, "recompute in backward", "a number for each row"),
        (lambda m, x, y: (ce(z := m.lm_head(x), y), z.logsumexp(-1)), {}, "recompute in backward", "2 readers share"),
        (_taught, {}, "recompute in backward", "kl_div compares two distributions"),
        (
            lambda m, x, y: checkpoint(lambda x: ce(m.lm_head(x), y), x, use_reentrant=False),
            {},
            "recompute in backward",
            "checkpointed function",
        ),
        (lambda m, x, y: m.lm_head(x).argmax(-1), {}, "forward only", "argmax has no gradient"),
        (
            lambda m, x, y: ce(F.linear(x.detach(), m.lm_head.weight.detach()), y),
            {},
            "forward only",
            "neither the hidden states nor the weight requires a gradient",
        ),
        (
            lambda m, x, y: ce(F.linear(x, m.lm_head.weight.detach()), y),
            {},
            "gradients in forward",
            "the weight is frozen",
        ),
        (lambda m, x, y: ce(m.lm_head(x.detach()), y), {}, "gradients in forward", "the hidden states need none"),
        (lambda m, x, y: m.lm_head(x).sum(-1), {}, "without a product", "times the sum of the weight's rows"),
        (lambda m, x, y: m.lm_head(x).softmax(-1), {}, "all entries, normalised in place", "every entry of softmax"),
        (lambda m, x, y: m.lm_head(x), {}, "", "computed when something reads their values"),
    ],
)
def test_a_variant_has_its_reason(read: Callable[..., Any], options: dict[str, Any], variant: str, why: str) -> None:
    site = site_of(read, **options)
    assert site.variant == variant
    assert why in site.why


def test_several_variants_say_which_is_which() -> None:
    site = site_of(lambda m, x, y: (ce(z := m.lm_head(x), y), (z / 2).logsumexp(-1)))
    assert site.variant == "gradients in forward; recompute in backward"
    assert site.why.split("; ") == [
        "gradients in forward: cross_entropy is one number, so its gradients are made beside it",
        "recompute in backward: what is read is a number for each row, the gradient of which only the backward knows",
    ]


def test_worth_is_told_apart() -> None:
    def read(m: Any, x: Any, y: Any) -> Any:
        return ce(F.linear(x.bfloat16(), m.lm_head.weight.bfloat16()).float(), y)

    elements = 2 * 6 * 64
    site = site_of(read)
    assert (site.logits_bytes, site.converted_bytes, site.gradient_bytes) == (2 * elements, 4 * elements, 2 * elements)
    assert site.bytes_saved == 8 * elements

    def both(m: Any, x: Any, y: Any) -> Any:
        z = F.linear(x.bfloat16(), m.lm_head.weight.bfloat16()).float()
        return ce(z, y), z.sin().sum()

    site = site_of(both)
    assert (site.status, site.bytes_saved) == ("kept", 0)
    assert (site.logits_bytes, site.converted_bytes, site.gradient_bytes) == (2 * elements, 4 * elements, 2 * elements)


# Graphs


def test_recompilation_and_dynamic_shapes() -> None:
    since = len(journal)
    f = torch.compile(Model(lambda m, x, y: ce(m.lm_head(x), y)), backend="fxfuse", options=OPTIONS)
    for batch in (2, 3, 4):
        f(ids(batch))
    first, second = journal.report(since).graphs
    assert first.function == second.function == "Model.forward"
    assert line_at(first.where).startswith("def forward(self")
    assert first.recompiled == ""
    assert "size mismatch at index 0. expected 2, actual 3" in second.recompiled
    assert first.compile_id.partition("/")[::2] == (second.compile_id.partition("/")[0], "0")
    assert second.compile_id.endswith("/1")
    (static,), (dynamic,) = first.sites, second.sites
    assert (static.shape, static.rows_hint) == ((2, 6, 64), 12)
    symbol, *fixed = dynamic.shape
    assert isinstance(symbol, str)
    assert symbol in str(dynamic.rows)
    assert (fixed, dynamic.rows_hint) == ([6, 64], 18)


def test_a_weight_that_is_made_of_a_batch_has_no_name() -> None:
    """As in a contrastive loss: not that of the first parameter of what made it. One made of parameters has theirs."""

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.proj = torch.nn.Parameter(torch.randn(1, 8)), torch.nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.proj(torch.cat((self.token, x)))

    tower, low = Tower(), torch.nn.Parameter(torch.randn(8, 2))
    since = len(journal)

    @torch.compile(backend="fxfuse", options=OPTIONS)
    def losses(x: torch.Tensor) -> torch.Tensor:
        merged = tower.proj.weight + low @ low.t()
        among_all, with_merged = x @ tower(x).t(), F.linear(x, merged)
        return F.cross_entropy(among_all, torch.arange(5)) + F.cross_entropy(with_merged, torch.arange(5))

    losses(torch.randn(5, 8))
    assert [site.chain.split(" → ")[0] for site in journal.report(since).sites] == [
        "matmul",
        "linear(proj.weight)",
    ]


def test_a_decorated_forward_is_named_after_its_module() -> None:
    import functools

    def decorated(forward: Any) -> Any:
        @functools.wraps(forward)
        def wrapper(self: Any, *args: Any) -> Any:
            return forward(self, *args)

        return wrapper

    class Decorated(Model):
        forward = decorated(Model.forward)

    since = len(journal)
    torch.compile(Decorated(lambda m, x, y: ce(m.lm_head(x), y)), backend="fxfuse", options=OPTIONS)(ids())
    (graph,) = journal.report(since).graphs
    assert graph.function == "Decorated.forward"
    assert line_at(graph.where).startswith("def forward(self, ids")


def _broken(m: Any, x: Any, y: Any) -> Any:
    z = m.lm_head(x)
    torch._dynamo.graph_break()
    return ce(z, y)


def _reads_of(site: Site) -> list[FusedRead]:
    return [read for read in journal.report().fused_reads if read.head == site.where]


def test_a_break_between_head_and_loss() -> None:
    report = report_of(_broken)
    (graph,) = [graph for graph in report.graphs if graph.sites]
    (site,) = graph.sites
    assert graph.ending is not None
    assert graph.ending.is_break
    assert graph.ending.source == "torch._dynamo.graph_break()"
    assert "graph_break()" in graph.ending.reason
    assert "\n" not in graph.ending.reason + graph.ending.explanation
    assert graph.ending.hints
    (use,) = site.uses
    assert (use.chain, use.leaves, use.where) == ("lm_head → graph break", True, graph.ending.where)
    (read,) = _reads_of(site)
    assert read.chain.startswith("lm_head → reshape → cross_entropy")
    assert (read.count, read.source[:22]) == (1, "return F.cross_entropy")
    assert "nothing was seen to read them" not in str(report)


def test_the_end_of_a_function_is_no_break() -> None:
    (graph,) = report_of(lambda m, x, y: m.lm_head(x)).graphs
    assert graph.ending is not None
    assert not graph.ending.is_break
    assert graph.sites[0].uses[0].chain == "lm_head → return"


def test_the_graph_that_goes_on_names_the_loss_of_its_input() -> None:
    report = report_of(_broken, defer_logits=False)
    rest = next(graph for graph in report.graphs if graph.losses)
    (loss,) = rest.losses
    assert rest.resumed
    assert rest.function.endswith("_broken")
    assert (loss.chain, loss.vocab) == ("z → reshape → cross_entropy", 64)
    assert "_broken has a loss of logits of that size: z → reshape → cross_entropy" in " ".join(str(report).split())


def test_fused_readers_are_counted_where_they_are() -> None:
    since = len(journal)
    f = torch.compile(Model(lambda m, x, y: m.lm_head(x)), backend="fxfuse", options=OPTIONS)
    for _ in range(3):
        z = f(y := ids())
        (z[:, :-1] / 0.7).gather(-1, y[:, 1:, None])
        F.cross_entropy(z.transpose(1, 2), y, reduction="sum", ignore_index=3)
        z.std()  # which has no rule
    (site,) = journal.report(since)
    gathered, loss = _reads_of(site)
    assert (gathered.chain, gathered.count) == ("lm_head → [:, :-1] → / 0.7 → gather", 3)
    assert loss.chain == 'lm_head → transpose(1, 2) → cross_entropy(ignore_index=3, reduction="sum")'
    assert loss.source == 'F.cross_entropy(z.transpose(1, 2), y, reduction="sum", ignore_index=3)'
    (read,) = [read for read in journal.report().reads if read.head == site.where]
    assert (read.count, read.source) == (3, "z.std()  # which has no rule")


def test_readers_at_one_line_are_told_apart() -> None:
    def loss(z: torch.Tensor, y: torch.Tensor, **options: Any) -> None:
        F.cross_entropy(z, y, **options)

    since = len(journal)
    f = torch.compile(
        Model(lambda m, x, y: (m.lm_head(x)[:, :, :60] / 0.5).flatten(0, 1)), backend="fxfuse", options=OPTIONS
    )
    for _ in range(2):
        z, y = f(ids()), torch.randint(30, (12,))
        loss(z, y)
        loss(z[1:] * 2, y[1:], ignore_index=7, reduction="sum")
        loss(z[:, :30], y)
        z.mul_(3)
        loss(z, y)
    (site,) = journal.report(since)
    before = "lm_head → [:, :, :60] → / 0.5 → flatten"
    assert [(read.chain, read.count) for read in _reads_of(site)] == [
        (f"{before} → cross_entropy(ignore_index=-100)", 2),
        (f'{before} → [1:] → * 2 → cross_entropy(ignore_index=7, reduction="sum")', 2),
        (f"{before} → [:, :30] → cross_entropy(ignore_index=-100)", 2),
        (f"{before} → *= 3 → cross_entropy(ignore_index=-100)", 2),
    ]


def test_readers_with_other_numbers_at_every_step_are_few() -> None:
    since = len(journal)
    z = torch.compile(Model(lambda m, x, y: m.lm_head(x)), backend="fxfuse", options=OPTIONS)(ids(8)).flatten(0, 1)
    for rows in range(1, 40):
        z[:rows].logsumexp(-1)
    (site,) = journal.report(since)
    *first, last = _reads_of(site)
    assert [read.chain for read in first[:2]] == [f"lm_head → flatten → [:{rows}] → logsumexp" for rows in (1, 2)]
    assert last.chain == "lm_head → … → logsumexp"
    assert len(first) < 10
    assert sum(read.count for read in (*first, last)) == 39


def test_two_heads_that_are_compared_are_told_apart() -> None:
    def read(m: Any, x: Any, y: Any) -> Any:
        z = m.lm_head(x)
        teacher = x @ m.embed.weight.t()
        return F.kl_div(z.log_softmax(-1), teacher.softmax(-1), reduction="batchmean"), z, teacher

    since = len(journal)
    _, z, teacher = torch.compile(Model(read), backend="fxfuse", options=OPTIONS)(ids())
    (site,) = journal.report(since)
    own, other = site.projections
    assert (own.name, line_at(own.where)) == ("lm_head", "z = m.lm_head(x)")
    assert (other.name, line_at(other.where)) == ("matmul(embed.weight)", "teacher = x @ m.embed.weight.t()")
    assert own.where == site.where
    teacher.logsumexp(-1)
    z.logsumexp(-1)
    teacher.std()
    reads = [(read.chain, read.head) for read in journal.report().fused_reads[-2:]]
    assert reads == [("matmul(embed.weight) → logsumexp", other.where), ("lm_head → logsumexp", own.where)]
    dense = journal.report().reads[-1]
    assert (dense.head, dense.source) == (other.where, "teacher.std()")
    told = str(journal.report(since))
    assert "read later by a fused op, 1 time: matmul(embed.weight) → logsumexp" in told
    assert f":{other.where.rpartition(':')[2]})\n" in told  # the logits of which line were computed


def test_logits_that_leave_a_checkpoint_are_not_returned() -> None:
    def read(m: Any, x: Any, y: Any) -> Any:
        return ce(checkpoint(lambda x: m.lm_head(x) * 2, x, use_reentrant=False), y)

    report = report_of(read)
    (site,) = report
    (use,) = site.uses
    assert (use.chain, use.leaves, use.checkpointed) == ("lm_head → * 2 → end of checkpoint", True, True)
    assert "returned by" not in str(report)


def test_a_loss_of_inputs_is_of_its_input() -> None:
    def loss(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        v = z.view(-1, 64)
        v.mul_(2)
        return F.cross_entropy(target=y, input=z.flatten(0, 1))

    since = len(journal)
    torch.compile(loss, backend="fxfuse", options=OPTIONS)(torch.randn(2, 6, 64), torch.randint(64, (12,)))
    (graph,) = journal.report(since).graphs
    assert [(use.chain, use.vocab) for use in graph.losses] == [("z → *= 2 → flatten → cross_entropy", 64)]


def test_a_failure_of_the_report_stops_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("lost")

    z = torch.compile(Model(lambda m, x, y: m.lm_head(x)), backend="fxfuse", options=OPTIONS)(ids())
    monkeypatch.setattr("fxfuse.report.chain.step", fail)
    with pytest.warns(FxfuseWarning, match="how logits are used"):
        assert z.logsumexp(-1).shape == (2, 6)
    assert journal.report().fused_reads[-1].chain == "lm_head → logsumexp"


def test_a_chain_of_a_read_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr("fxfuse.report.chain.step", lambda *call: written.append(step(*call)) or written[-1])
    z = torch.compile(Model(lambda m, x, y: m.lm_head(x)), backend="fxfuse", options=OPTIONS)(ids())
    written.clear()
    for _ in range(5):
        z.logsumexp(-1)
    assert written == ["logsumexp"]
    assert journal.report().fused_reads[-1].count == 5


def test_nothing_is_asked_under_the_lock_of_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    own, heard = Journal(), []

    def locked() -> bool:
        """Whether another thread would have to wait."""

        def taken() -> bool:
            free = own._lock.acquire(blocking=False)
            if free:
                own._lock.release()
            return not free

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(taken).result()

    monkeypatch.setattr("fxfuse.report.chain.chain_of", lambda *_, **__: f"locked: {locked()}")

    class Listener:
        def graph(self, record: GraphRecord) -> None:
            heard.append((record.id, locked()))

        def read(self, kind: str, head: str, where: str, size: int, again: bool) -> None:
            heard.append((kind, again, locked()))

    own.listeners.append(Listener())
    (site,) = own.add([Site("deferred", "linear", "a.py:1", "", 1, 1, 1, "float32")]).sites
    own.note_fused(site, None, "a.py:1", "b.py:2", "linear", [SimpleNamespace(name="gather", key="gather")])
    own.note("read", site, None, "a.py:1", "b.py:3", 8)
    own.note("read", site, None, "a.py:1", "b.py:3", 8)
    assert own.report().fused_reads[0].chain == "locked: False"
    assert heard == [(0, False), ("read", False, False), ("read", True, False)]
    assert own.report().reads == (Read("read", "b.py:3", "a.py:1", 2, 16),)


# JSON


def test_json_form() -> None:
    own = Journal()
    site = Site("fused", "linear → cross_entropy", "train.py:1", "lm_head", "s0*s1", 8, 64, "float32", shape=("s0", 64))
    own.add([site])
    own.add([])
    made = json.loads(json.dumps(own.report().to_dict()))
    assert {"schema": 2, "fxfuse": fxfuse.__version__, "torch": torch.__version__} == {
        key: made[key] for key in ("schema", "fxfuse", "torch")
    }
    assert [graph["id"] for graph in made["graphs"]] == [0, 1]
    (kept,) = made["graphs"][0]["sites"]
    assert (kept["status"], kept["rows"], kept["shape"], kept["reason"]) == ("fused", "s0*s1", ["s0", 64], None)


def _documented() -> dict[str, set[str]]:
    """The fields in the table of each section of the document."""
    sections = re.split(r"^### ", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]
    return {section.split()[0]: set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)) for section in sections}


RECORDS = (Report, GraphRecord, Site, Projection, Use, Measured, Cost, Reason, Ending, Read, FusedRead)


def test_the_document_names_every_field() -> None:
    documented = _documented()
    assert documented.pop("Example") == set()
    documented["Report"] -= {"schema", "fxfuse", "torch"}
    assert documented == {kind.__name__: {field.name for field in dataclasses.fields(kind)} for kind in RECORDS}
    in_module = {name for name, kind in vars(records).items() if dataclasses.is_dataclass(kind) and name[0] != "_"}
    assert in_module == {kind.__name__ for kind in RECORDS}


def test_the_example_of_the_document_has_every_field() -> None:
    documented = _documented()
    ((example,),) = [re.findall(r"^```json\n(.*?)^```", DOCUMENT.read_text(), flags=re.MULTILINE | re.DOTALL)]

    def check(made: dict[str, Any], kind: str, **inside: str) -> None:
        assert set(made) == documented[kind]
        for field, inner in inside.items():
            for one in made[field] if isinstance(made[field], list) else [made[field]]:
                check(one, inner, **INSIDE.get(inner, {}))

    check(json.loads(example), "Report", **INSIDE["Report"])


INSIDE = {
    "Report": {"graphs": "GraphRecord", "fused_reads": "FusedRead"},
    "GraphRecord": {"sites": "Site", "ending": "Ending"},
    "Site": {"uses": "Use", "projections": "Projection"},
}


# One step


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "text"),
    [
        ("truediv", ("z", 0.7), {}, "/ 0.7"),
        ("__rsub__", ("z", 1), {}, "1 -"),
        ("__radd__", ("z", 1), {}, "+ 1"),
        ("itruediv", ("z", 2), {}, "/= 2"),
        ("div_", ("z", 2), {}, "/= 2"),
        ("mul", (2, "z"), {}, "* 2"),
        ("getitem", ("z", (Ellipsis, slice(None, -1), slice(None))), {}, "[..., :-1, :]"),
        ("getitem", ("z", slice(None, None, 2)), {}, "[::2]"),
        ("getitem", ("z", tuple(range(100, 120))), {}, "[…]"),
        ("getattr", ("z", "mT"), {}, ".mT"),
        ("setitem", ("z", 0, 5.0), {}, "[0] = 5"),
        ("frobnicate", ("z", 3), {"mode": "x" * 99, "dim": -1}, "frobnicate(3, mode=…)"),
        ("frobnicate", ("z",), dict.fromkeys("abcde", "x" * 20), "frobnicate({0}, {1}, …)"),
    ],
)
def test_steps(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], text: str) -> None:
    text = text.format(*(f'{name}="{value}"' for name, value in kwargs.items()))
    z = torch.ones(1)
    given = tuple(z if arg == "z" and isinstance(arg, str) else arg for arg in args)
    assert step(name, name, given, kwargs, lambda _: None, lambda arg: arg is z) == text


# --- who writes while something is written down ---------------------------------------------------------------


def test_a_finaliser_may_read_logits_while_something_is_noted() -> None:
    """The garbage collector may run anywhere, on Python 3.12 between any two steps of what holds a lock."""
    own, site = Journal(), Site("deferred", "linear", "train.py:1", "", 1, 1, 1, "float32")
    own.add([site])

    class Finaliser(int):
        def __radd__(self, other: int) -> int:  # what ``note`` does inside of its lock
            own.note("read", site, None, "train.py:1", "train.py:3", 1)
            return other + int(self)

    worker = threading.Thread(
        target=lambda: own.note("read", site, None, "train.py:1", "train.py:2", Finaliser(5)), daemon=True
    )
    worker.start()
    worker.join(10)
    assert not worker.is_alive()
    assert sorted((read.where, read.count, read.bytes) for read in own.report().reads) == [
        ("train.py:2", 1, 5),
        ("train.py:3", 1, 1),
    ]


def test_a_finaliser_may_read_logits_while_a_report_is_made() -> None:
    own, site = Journal(), Site("deferred", "linear", "train.py:1", "", 1, 1, 1, "float32")
    own.add([site])
    places = itertools.count()

    class Finalised:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            own.note("read", site, None, "train.py:1", f"train.py:{next(places)}", 1)

    before = gc.get_threshold()
    try:
        for _ in range(50):
            Finalised()
            gc.set_threshold(1, 1, 1)
            own.report()
            gc.set_threshold(*before)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert len(own.report().reads) == 50
