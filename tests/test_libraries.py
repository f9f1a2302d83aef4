"""Other libraries' own functions, as they are installed: TRL, torchtune, LitGPT, verl, torchtitan, lm-eval and others.

Each runs twice: compiled with the projection in one graph, and in eager code on the logits that a compiled projection
returns. Values and gradients are eager's, and each function has its verdict, so that a rule that is lost, or gained,
shows. A library that is not installed is skipped.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, dense_reads, new_sites
from test_trainers import OPTIONS, assert_trained_alike, batch, make
from torch import Tensor

BATCH, TIME, HIDDEN, VOCAB = 2, 6, 8, 33


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


# --- functions of logits --------------------------------------------------------------------------------------


@dataclass
class World:
    """What the functions take beside logits: labels ``y``, with ignored ones ``masked``, and logits of a teacher.

    The teacher's come from a head of their own, frozen.
    """

    x: Tensor
    w: Tensor
    y: Tensor
    masked: Tensor
    frozen: tuple[Tensor, Tensor]
    head: Callable[[Tensor, Tensor], Tensor] = F.linear

    @property
    def teacher(self) -> Tensor:
        with torch.no_grad():
            return self.head(*self.frozen)

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
            (torch.randn(BATCH, TIME, HIDDEN, generator=g), torch.randn(VOCAB, HIDDEN, generator=g)),
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
    "trl_gkd_jsd_with_masks_captured": (
        "trl.experimental.gkd",
        lambda m, z, s: m.GKDTrainer.generalized_jsd_loss(z, s.teacher, s.masked, num_items_in_batch=7),
    ),
    "trl_gkd_jsd_of_all_rows": (
        "trl.experimental.gkd",
        lambda m, z, s: m.GKDTrainer.generalized_jsd_loss(z, s.teacher, beta=0.1, temperature=0.7),
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
    # OpenRLHF
    "openrlhf_log_probs": ("openrlhf/models/utils.py", lambda m, z, s: m.log_probs_from_logits(z, s.y)),
    "openrlhf_warm_log_probs": ("openrlhf/models/utils.py", lambda m, z, s: m.log_probs_from_logits(z, s.y, 0.7)),
    "openrlhf_log_probs_bf16": (
        "openrlhf/models/utils.py",
        lambda m, z, s: m.log_probs_from_logits(z.bfloat16(), s.y),
    ),
    # Which OpenRLHF compiles itself, by Inductor.
    "openrlhf_entropy": ("openrlhf/models/utils.py", lambda m, z, s: m.compute_entropy(z)),
    # transformers
    "transformers_causal_lm": (
        "transformers.loss.loss_utils",
        lambda m, z, s: m.ForCausalLMLoss(z, s.masked, VOCAB, num_items_in_batch=7),
    ),
    "transformers_masked_lm": (
        "transformers.loss.loss_utils",
        lambda m, z, s: m.ForMaskedLMLoss(z, s.masked, VOCAB),
    ),
    "transformers_label_smoother": (
        "transformers.trainer_pt_utils",
        lambda m, z, s: m.LabelSmoother(0.1)({"logits": z}, s.masked, shift_labels=True),
    ),
    # torchmetrics, which comes with Lightning
    "torchmetrics_perplexity": (
        "torchmetrics.functional.text",
        lambda m, z, s: m.perplexity(z, s.masked, ignore_index=-100),
    ),
    "torchmetrics_accuracy": (
        "torchmetrics.functional",
        lambda m, z, s: m.accuracy(z.mT, s.masked, "multiclass", num_classes=VOCAB, average="micro", ignore_index=-100),
    ),
}

# Where logits are computed nevertheless, in these styles.
DENSE = {
    "torchtune_forward_kl": STYLES,
    "torchtune_reverse_kl": STYLES,
    "torchtune_symmetric_kl": STYLES,
    "torchtune_chunked_forward_kl": STYLES,
    "verl_warm_logprobs_and_entropy": ("eager_on_deferred",),
    "openrlhf_warm_log_probs": STYLES,
}
# Dynamo ends the graph inside of these: logits are deferred there, and read in what it makes of the rest.
GRAPH_BREAKS = ("openrlhf_log_probs", "torchmetrics_perplexity", "torchmetrics_accuracy", "trl_gkd_jsd")


def _library(name: str) -> Any:
    """The module, or the file of a package whose other modules need CUDA."""
    if not name.endswith(".py"):
        return pytest.importorskip(name)
    package, _, path = name.partition("/")
    found = importlib.util.find_spec(package)
    if found is None or not found.origin:
        pytest.skip(f"{package} is not installed")
    spec = importlib.util.spec_from_file_location(name.replace("/", "_")[:-3], Path(found.origin).parent / path)
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where Dynamo looks for it
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        pytest.skip(str(error))
    return module


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


def _captures_the_head(program: Callable[..., Any], world: World) -> bool:
    """Whether Dynamo gives the projection to a backend."""
    captured: list[Any] = []

    def look(module: torch.fx.GraphModule, _: Any) -> Any:
        captured.extend(node.target for node in module.graph.nodes)
        return module.forward

    torch._dynamo.reset()
    _run(torch.compile(program, backend=look), world)
    return F.linear in captured


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_function(name: str, style: str) -> None:
    module, function = PROGRAMS[name]
    library = _library(module)
    world = World.make()

    def eager(x: Tensor, w: Tensor) -> Any:
        return function(library, F.linear(x, w), world)

    expected = _run(eager, world)
    head = compiled(F.linear)
    apart = replace(world, head=head)
    ours = compiled(eager) if style == "one_graph" else lambda x, w: function(library, head(x, w), apart)
    captured = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=name.endswith("masks_captured"))
    with new_sites() as sites, dense_reads() as reads, captured:
        actual = _run(ours, world)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if "bf16" in name else {}
    torch.testing.assert_close(actual, expected, **tolerance)
    if not sites and name in GRAPH_BREAKS and not _captures_the_head(eager, world):
        pytest.skip("this version's Dynamo leaves the projection to eager")
    assert sites
    dense = [*reads, *(site.reason for site in sites if site.reason)]
    assert bool(dense) == (style in DENSE.get(name, ())), dense
    if style == "one_graph" and not dense:
        assert not any("all entries" in site.variant for site in sites), sites
        assert {site.status for site in sites} == {"deferred" if name in GRAPH_BREAKS else "fused"}, sites


# --- models ---------------------------------------------------------------------------------------------------


def _same_gradients(ours: torch.nn.Module, eager: torch.nn.Module, loss: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for (name, mine), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("head_chunk", [0, 5])
def test_litgpt(head_chunk: int, softcap: float | None, style: str) -> None:
    """As LitGPT's pretraining and fine-tuning scripts use them."""
    model = pytest.importorskip("litgpt.model")
    utils = pytest.importorskip("litgpt.utils")
    sizes = {"padded_vocab_size": 999, "block_size": 16, "n_layer": 1, "n_embd": 32, "n_head": 2}
    config = model.Config(**sizes, final_logit_softcapping=softcap)
    eager = model.GPT(config)
    ours = copy.deepcopy(eager)
    inputs = batch(2, 12)

    def loss(gpt: Any) -> Tensor:
        logits = gpt(inputs["input_ids"], lm_head_chunk_size=head_chunk)
        if head_chunk:
            logits[-1] = logits[-1][..., :-1, :]
            return utils.chunked_cross_entropy(logits, inputs["labels"][..., 1:])
        return utils.chunked_cross_entropy(logits[..., :-1, :], inputs["labels"][..., 1:])

    with new_sites() as sites, dense_reads() as reads:
        found = compiled(loss)(ours) if style == "one_graph" else loss(compiled(ours))
        _same_gradients(ours, eager, found, loss(eager))
    assert not reads
    assert {site.status for site in sites} == {"fused" if style == "one_graph" else "deferred"}, sites
    assert len(sites) == (3 if head_chunk else 1)


def test_lightning_demo() -> None:
    """The model returns log-probabilities."""
    demos = pytest.importorskip("lightning.pytorch.demos.transformer")
    eager = demos.LightningTransformer(vocab_size=999)
    eager.model = demos.Transformer(vocab_size=999, ninp=32, nhid=32, nlayers=1, dropout=0.0)
    ours = copy.deepcopy(eager)
    ids = batch(2, 12)["input_ids"]
    pair = (ids[:, :-1], ids[:, 1:].contiguous())
    ours.model.compile(backend="fxfuse", options=OPTIONS)
    with new_sites() as sites, dense_reads() as reads:
        _same_gradients(ours, eager, ours.training_step(pair, 0), eager.training_step(pair, 0))
    assert not reads
    assert [(site.status, site.variant) for site in sites] == [("fused", "all entries, normalised in place")]


def test_x_transformers() -> None:
    """Kept: its cross entropy is a softplus of the log-sum-exp of all classes but the target."""
    library = pytest.importorskip("x_transformers")
    layers = library.Decoder(dim=32, depth=1, heads=2)
    eager = library.AutoregressiveWrapper(
        library.TransformerWrapper(num_tokens=999, max_seq_len=16, attn_layers=layers)
    )
    ours = copy.deepcopy(eager)
    ids = batch(2, 12)["input_ids"]
    with new_sites() as sites, dense_reads() as reads:
        _same_gradients(ours, eager, compiled(ours)(ids), eager(ids))
    assert not reads
    assert [site.reason.code for site in sites if site.reason] == ["unknown_reader"]


# --- lm-evaluation-harness ------------------------------------------------------------------------------------


def _tokenizer() -> Any:
    """One of words, without a download."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, 999))])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, **special)


def _text(seed: int, words: int) -> str:
    g = torch.Generator().manual_seed(seed)
    return " ".join(f"w{i}" for i in torch.randint(3, 999, (words,), generator=g).tolist())


@pytest.mark.slow
def test_lm_eval() -> None:
    """Multiple choice, with contexts of several lengths, continuations of one token and more, and rolling windows."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    instance = pytest.importorskip("lm_eval.api.instance").Instance

    def scores(compile: bool) -> tuple[Any, Any]:
        model = make("llama")
        if compile:
            model.compile(backend="fxfuse", options=OPTIONS, dynamic=True)
        harness = huggingface.HFLM(pretrained=model, tokenizer=_tokenizer(), batch_size=2, max_length=16, device="cpu")
        asked = [(_text(i // 3, 3 + i // 3), " " + _text(50 + i, 1 + i % 3)) for i in range(9)]
        pairs = [instance("loglikelihood", {}, arguments, i) for i, arguments in enumerate(asked)]
        long = [instance("loglikelihood_rolling", {}, (_text(90 + i, 20 + i),), i) for i in range(2)]
        return (
            harness.loglikelihood(pairs, disable_tqdm=True),
            harness.loglikelihood_rolling(long, disable_tqdm=True),
        )

    with new_sites() as sites, dense_reads() as reads:
        pairs, long = scores(True)
    expected_pairs, expected_long = scores(False)
    assert [greedy for _, greedy in pairs] == [greedy for _, greedy in expected_pairs]
    assert [p for p, _ in pairs] == pytest.approx([p for p, _ in expected_pairs], rel=1e-5)
    assert long == pytest.approx(expected_long, rel=1e-5)
    assert not reads
    assert {site.status for site in sites} == {"deferred"}, sites


# --- TRL's trainers -------------------------------------------------------------------------------------------

TRAINING: dict[str, Any] = {
    **{"per_device_train_batch_size": 2, "num_train_epochs": 1, "learning_rate": 1e-2, "report_to": []},
    **{"save_strategy": "no", "use_cpu": True, "bf16": False, "logging_steps": 1, "disable_tqdm": True, "seed": 3},
    **{"gradient_checkpointing": False},
}


def _completions(datasets: Any) -> Any:
    return datasets.Dataset.from_list([{"prompt": _text(i, 3), "completion": " " + _text(20 + i, 6)} for i in range(8)])


def _preferences(datasets: Any, *more: str) -> Any:
    rows = [
        {"prompt": _text(i, 3), "chosen": " " + _text(20 + i, 6), "rejected": " " + _text(40 + i, 5)} for i in range(8)
    ]
    return datasets.Dataset.from_list([{**row, **{name: " " + _text(60, 4) for name in more}} for row in rows])


def _sum_over_tokens(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    flat = outputs.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(flat, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def _sft(trl: Any, datasets: Any, model: Any, where: str, **options: Any) -> Any:
    loss = {"compute_loss_func": options.pop("compute_loss_func")} if "compute_loss_func" in options else {}
    config = trl.SFTConfig(where, **TRAINING, **{"loss_type": "nll", **options})
    return trl.SFTTrainer(model, config, train_dataset=_completions(datasets), processing_class=_tokenizer(), **loss)


def _dpo(trl: Any, datasets: Any, model: Any, where: str) -> Any:
    config = trl.DPOConfig(where, **TRAINING)
    data = _preferences(datasets)
    return trl.DPOTrainer(model, make("llama"), config, train_dataset=data, processing_class=_tokenizer())


def _kto(trl: Any, datasets: Any, model: Any, where: str) -> Any:
    config = trl.KTOConfig(where, **TRAINING)
    rows = [{**row, "label": i % 2 == 0} for i, row in enumerate(_completions(datasets))]
    data = datasets.Dataset.from_list(rows)
    return trl.KTOTrainer(model, make("llama"), config, train_dataset=data, processing_class=_tokenizer())


def _preferring(name: str, *more: str) -> Callable[..., Any]:
    def build(trl: Any, datasets: Any, model: Any, where: str) -> Any:
        module = pytest.importorskip(f"trl.experimental.{name.lower()}")
        config = getattr(module, f"{name}Config")(where, max_length=16, **TRAINING)
        data = _preferences(datasets, *more)
        make_trainer = getattr(module, f"{name}Trainer")
        return make_trainer(model, args=config, train_dataset=data, processing_class=_tokenizer())

    return build


def _gkd(trl: Any, datasets: Any, model: Any, where: str) -> Any:
    module = pytest.importorskip("trl.experimental.gkd")
    config = module.GKDConfig(where, lmbda=0.0, **TRAINING)
    turns = [[{"role": r, "content": _text(i + j, 4)} for j, r in ((0, "user"), (50, "assistant"))] for i in range(8)]
    data = datasets.Dataset.from_list([{"messages": turn} for turn in turns])
    return module.GKDTrainer(model, make("gpt2"), config, train_dataset=data, processing_class=_tokenizer())


# What is built, and whether anything reads logits densely.
TRAINERS: dict[str, tuple[Callable[..., Any], bool]] = {
    "sft": (_sft, False),
    "sft_chunked": (lambda *a: _sft(*a, loss_type="chunked_nll"), False),
    "sft_smoothed": (lambda *a: _sft(*a, label_smoothing_factor=0.1), False),
    "sft_own_loss": (lambda *a: _sft(*a, compute_loss_func=_sum_over_tokens), False),
    "dpo": (_dpo, False),
    "kto": (_kto, False),
    "tpo": (_preferring("TPO", "reference"), False),
    "orpo": (_preferring("ORPO"), False),
    "cpo": (_preferring("CPO"), False),
    "gkd": (_gkd, True),
}
# From 1.15 on TRL gives these a fused head of its own, in an autograd function.
OWN_HEAD = ("sft", "sft_chunked", "dpo", "kto", "grpo", "rloo")


def _sees_heads(trl: Any, name: str) -> bool:
    utils = pytest.importorskip("trl.trainer.utils")
    return name not in OWN_HEAD or not hasattr(utils, "add_fused_lm_head")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRAINERS)
def test_trl(name: str, tmp_path: Path) -> None:
    """A few steps: parameters and all that is logged."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    build, dense = TRAINERS[name]

    def train(compile: bool) -> tuple[Any, Any, list[str]]:
        model = make("llama")
        if compile:
            model.compile(backend="fxfuse", options=OPTIONS)
        trainer = build(trl, datasets, model, str(tmp_path / str(compile)))
        with dense_reads() as reads:
            trainer.train()
        return model, trainer.state.log_history, reads

    with new_sites() as sites:
        ours, log, reads = train(True)
    eager, expected, _ = train(False)
    assert_trained_alike(ours, eager, 1e-3)
    for mine, theirs in zip(log, expected, strict=True):
        same = {key: value for key, value in theirs.items() if "runtime" not in key and "per_second" not in key}
        assert {key: mine[key] for key in same} == pytest.approx(same, rel=1e-2, abs=1e-4)
    assert bool(reads) == dense, reads
    assert bool(sites) == _sees_heads(trl, name)
    assert {site.status for site in sites} <= {"deferred", "fused"}, sites


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_trl_log_probs(name: str, tmp_path: Path) -> None:
    """What GRPO and RLOO score completions with: log-probabilities, and entropies without gradients."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    config = getattr(trl, f"{name}Config")(str(tmp_path), **TRAINING, num_generations=2, beta=0.0)
    data, rewards = _completions(datasets), {"reward_funcs": lambda completions, **_: [0.0 for _ in completions]}
    ids = batch(2, 12)["input_ids"]

    def run(compile: bool) -> list[Tensor]:
        model = make("llama")
        if compile:
            model.compile(backend="fxfuse", options=OPTIONS)
        build = getattr(trl, f"{name}Trainer")
        trainer = build(model, args=config, train_dataset=data, processing_class=_tokenizer(), **rewards)
        scores = trainer._get_per_token_logps_and_entropies
        logps, entropies, *_ = scores(model, ids, torch.ones_like(ids), 7, compute_entropy=True)
        (logps * torch.linspace(0.5, 1.5, 7)).sum().backward()
        return [logps, entropies, *(p.grad for p in model.parameters())]

    with new_sites() as sites, dense_reads() as reads:
        found = run(True)
    torch.testing.assert_close(found, run(False))
    assert not reads
    assert bool(sites) == _sees_heads(trl, name.lower())
    assert {site.status for site in sites} <= {"deferred"}, sites
