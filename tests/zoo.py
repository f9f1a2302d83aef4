"""Every language model of transformers, one tiny training step each, in eager and under fxfuse.

    python tests/zoo.py                        # all of them, into docs/zoo.md
    python tests/zoo.py LlamaForCausalLM …     # these, printed

A class is one that transformers' own auto-classes map for a task of ``TASKS``. It is built from its configuration,
made tiny by rules on the names of its fields, with random weights; the step is what people write:
``out = model(**inputs, labels=labels); out.loss.backward()``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

import fxfuse
from fxfuse.report.records import journal

TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ")
VERDICTS = (
    "fused",
    "deferred",
    "read",
    "kept",
    "not seen",
    "not right",
    "fxfuse fails",
    "does not compile",
    "no vocabulary head",
    "does not run in eager",
    "not buildable",
    "time is up",
)
VOCAB, HIDDEN, HEADS, LAYERS, LENGTH, BATCH = 1031, 64, 4, 2, 16, 2
TIME_LIMIT = 240  # seconds a class


@dataclass
class Row:
    """What became of one class.

    Attributes:
        note: why, in a line.
        where: ``file.py:line`` that the note is about.
        error: the largest error of the loss and the gradients against float64, over what is allowed.
        breaks: graph breaks.
    """

    name: str
    verdict: str = ""
    note: str = ""
    where: str = ""
    pattern: str = ""
    error: float = 0.0
    breaks: int = 0
    seconds: float = 0.0
    more: str = field(default="", repr=False)  # a traceback


def classes() -> dict[str, str]:
    """The names of the classes, each with the model type that is mapped to it."""
    found: dict[str, str] = {}
    for task in TASKS:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, model_type)
    return found


# --- a tiny configuration -------------------------------------------------------------------------------------

# The first pattern that a field's whole name matches says what becomes of its value.
_RULES: tuple[tuple[str, Any], ...] = (
    (r".*(drop|jitter).*", lambda v: 0.0 if isinstance(v, float) else v),
    (r".*vocab(ulary)?_size.*|.*_vocab|codebook_size", lambda v: VOCAB),
    (r"(num_)?(hidden_layers|n_layers?|layers|decoder_layers|encoder_layers)|.*num.*_layers|n_layer|depth|.*_layers", lambda v: min(v, LAYERS)),
    (r".*(kv_heads|key_value_heads|_kv_heads).*|n_head_kv|num_query_groups|multi_query_group_num", lambda v: min(v, 2)),
    (r".*(num|n)_.*heads?|n_heads?|num_heads|.*attention_heads", lambda v: min(v, HEADS)),
    (r"(.*_)?head_dim|head_size|d_kv|attention_head_size", lambda v: HIDDEN // HEADS),
    (r"qk_rope_head_dim|rotary_dim", lambda v: 8),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|n_inner|_inner_dim).*", lambda v: min(v, 2 * HIDDEN)),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|dim|width|n_embed|projection_dim)", lambda v: HIDDEN),
    (r".*lora_rank|.*rank", lambda v: min(v, 16)),
    (r".*num.*experts_per_tok.*|.*top_?k.*", lambda v: min(v, 2)),
    (r".*(num|n)_.*experts|num_experts|n_routed_experts", lambda v: min(v, 4)),
    (r"n_group|topk_group|n_shared_experts|first_k_dense_replace", lambda v: min(v, 1)),
    (r"image_size", lambda v: 32),
    (r"patch_size", lambda v: 8),
)


def shrink(config: PreTrainedConfig, ids: Iterator[int] | None = None) -> PreTrainedConfig:
    """``config`` and the configurations in it, made tiny in place."""
    ids = ids or iter(range(VOCAB - 1, 0, -1))
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            shrink(value, ids)
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            if value >= VOCAB:
                put(config, name, next(ids))
        elif name.endswith("token_id") and isinstance(value, list):
            put(config, name, [v if v < VOCAB else next(ids) for v in value])
        elif isinstance(value, list) and len(value) == layers and layers > LAYERS:
            put(config, name, value[:LAYERS])
        elif name == "rope_parameters" and isinstance(value, dict):
            for part in (value, *(v for v in value.values() if isinstance(v, dict))):
                if "mrope_section" in part:
                    part["mrope_section"] = [2, 3, 3]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            for pattern, rule in _RULES:
                if re.fullmatch(pattern, name):
                    put(config, name, rule(value))
                    break
    return config


def put(config: PreTrainedConfig, name: str, value: Any) -> None:
    with contextlib.suppress(AttributeError, NotImplementedError):
        setattr(config, name, value)


def build(name: str) -> nn.Module:
    """A tiny model of the class ``name`` with random weights."""
    cls = getattr(transformers, name)
    config = shrink(cls.config_class())
    torch.manual_seed(0)
    return cls(config).float().train()


# --- inputs ---------------------------------------------------------------------------------------------------


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """Tokens, a mask, labels, and what else the forward needs."""
    g = torch.Generator().manual_seed(1)
    accepted = inspect.signature(model.forward).parameters
    ids = torch.randint(10, 900, (BATCH, LENGTH), generator=g)
    mask = torch.ones_like(ids)
    labels = ids.clone()
    labels[:, :3] = -100
    mask[1, -2:] = 0
    labels[1, -2:] = -100
    made = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {key: value for key, value in made.items() if key in accepted or "kwargs" in accepted}


# --- one step -------------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Notes the products with a parameter whose last dimension is a vocabulary's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.found: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm") and out.shape[-1] >= 1000:
            if any(isinstance(a, Tensor) and a.untyped_storage().data_ptr() in self.parameters for a in args):
                self.found.append((str(func), caller()))
        return out


def caller() -> str:
    """The innermost line of transformers that is on the stack."""
    frame: Any = sys._getframe()
    while frame is not None:
        if "/transformers/models/" in frame.f_code.co_filename:
            return relative(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return ""


def relative(where: str | None) -> str:
    return re.sub(r"^.*site-packages/", "", where or "")


def step(call: Any, model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """The loss and every parameter's gradient of a training step."""
    torch.manual_seed(2)
    out = call(**inputs)
    out.loss.backward()
    return {"loss": out.loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def doubled(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def compare(ours: dict[str, Any], eager: dict[str, Any], exact: dict[str, Any]) -> tuple[float, str]:
    """The largest error over what is allowed, and what has it.

    Allowed are 1.5 times eager's error, and what rounding makes: 2e-6 of a tensor's own norm, 1e-7 of the norm of
    all gradients together (the gradient of an attention's key bias is zero but for rounding).
    """
    worst, what = 0.0, ""
    whole = math.sqrt(sum(float(x.double().norm()) ** 2 for name, x in exact.items() if x is not None and name != "loss"))
    for name, truth in exact.items():
        a, e = ours[name], eager[name]
        if (a is None) != (e is None):
            return math.inf, f"{name} has {'no' if a is None else 'a'} gradient, unlike eager's"
        if e is None or truth is None:
            continue
        norm = float(truth.double().norm())
        bound = 2e-6 * norm + (1e-7 * whole if name != "loss" else 0.0)
        error, theirs = (float((t.double() - truth.double()).norm()) for t in (a, e))
        if not math.isfinite(theirs):
            if not torch.equal(a.isnan(), e.isnan()):
                return math.inf, f"{name}: other NaNs than eager's"
            continue
        ratio = error / max(1.5 * theirs, bound, 1e-30)
        if not ratio <= worst:
            worst, what = ratio, f"{name}: error {error:.2g}, eager's {theirs:.2g}, norm {norm:.2g}"
    return worst, what


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"[:200]


def origin(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/transformers/models/" in f.filename]
    return relative(f"{frames[-1].filename}:{frames[-1].lineno}") if frames else ""


def check(name: str) -> Row:
    """Build, run and compare one class."""
    row = Row(name)

    def failed(verdict: str, error: BaseException) -> Row:
        row.verdict, row.note, row.where = verdict, first_line(error), origin(error)
        row.more = "".join(traceback.format_exception(error))[-6000:]
        return row

    try:
        model = build(name)
    except Exception as error:
        return failed("not buildable", error)
    models = {key: copy.deepcopy(model) for key in ("eager", "exact", "compiled")}
    try:
        inputs = inputs_of(model)
        spy = Products(models["eager"])
        with spy:
            eager = step(models["eager"], models["eager"], inputs)
    except Exception as error:
        return failed("does not run in eager", error)
    try:
        exact = step(models["exact"].double(), models["exact"], doubled(inputs))
    except Exception:
        exact = {k: v if v is None else v.double() for k, v in eager.items()}
        row.more = "no float64"
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    before = len(journal)
    options = {"fxfuse.inner": "eager", "fxfuse.min_logits_bytes": 0}
    try:
        ours = step(torch.compile(model, backend="fxfuse", options=options), model, inputs)
    except Exception as error:
        torch._dynamo.reset()
        try:
            step(torch.compile(models["compiled"], backend="eager"), models["compiled"], inputs)
        except Exception:
            return failed("does not compile", error)
        return failed("fxfuse fails", error)
    row.breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    report = journal.report(before)
    row.error, what = compare(ours, eager, exact)
    sites = [s for s in report.sites if isinstance(s.vocab, int) and s.vocab >= 1000]
    kept = [s for s in sites if s.reason is not None]
    row.pattern = "; ".join(dict.fromkeys(s.pattern for s in sites))
    if row.error > 1:
        row.verdict, row.note = "not right", what
        torch._dynamo.reset()
        with contextlib.suppress(Exception):
            other = step(torch.compile(models["compiled"], backend="eager"), models["compiled"], inputs)
            error, what = compare(other, eager, exact)
            row.note += f" (backend='eager': {error:.2g}× allowed)"
    elif kept:
        reason = kept[0].reason
        assert reason is not None
        row.verdict, row.note, row.where = "kept", f"{reason.code}: {reason.sentence}", relative(reason.where or kept[0].where)
    elif report.reads:
        row.verdict = "read"
        row.note = "; ".join(f"{r.kind} {r.count}×" for r in report.reads)
        row.where = relative(report.reads[0].where)
    elif sites:
        row.verdict = "deferred" if any(s.status == "deferred" for s in sites) else "fused"
        row.where = relative(sites[0].where)
        if len(spy.found) > len(sites):
            row.note = f"{len(spy.found)} products, {len(sites)} sites: {spy.found}"
    elif spy.found:
        row.verdict, row.note, row.where = "not seen", spy.found[0][0], spy.found[0][1]
    else:
        row.verdict = "no vocabulary head"
    return row


# --- all of them ----------------------------------------------------------------------------------------------


def work(name: str, sink: Any) -> None:
    """``check`` in a process of its own."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    start = time.time()
    row = check(name)
    row.seconds = time.time() - start
    sink.send(row)


def run(names: Iterable[str], workers: int = 2) -> Iterator[Row]:
    """A row for each name, as they come. Every class has a process of its own."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(names)[::-1], {}
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop()
            source, sink = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(name, sink), daemon=True)
            process.start()
            sink.close()
            running[source] = (name, process, time.time())
        for source in multiprocessing.connection.wait(list(running), timeout=1):
            name, process, _ = running.pop(source)
            try:
                yield source.recv()
            except EOFError:
                process.join()
                yield Row(name, "fxfuse fails", f"the process ended with {process.exitcode}")
            process.join()
        for source, (name, process, start) in list(running.items()):
            if time.time() - start > TIME_LIMIT:
                process.kill()
                del running[source]
                yield Row(name, "time is up", f"{TIME_LIMIT} s")


def main() -> None:
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="classes; all by default")
    parser.add_argument("--json", type=Path, help="where rows are added, a line each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = arguments.names or list(classes())
    rows = []
    for row in (bar := tqdm(run(names), total=len(names), smoothing=0)):
        rows.append(row)
        bar.set_postfix_str(row.name)
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        if arguments.names:
            tqdm.write(str(row))
    totals = Counter(row.verdict for row in rows)
    for verdict, count in totals.most_common():
        print(f"{count:4} {verdict}")


if __name__ == "__main__":
    main()
