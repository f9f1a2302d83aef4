"""Classes of the zoo, of every family: the numbers are eager's, and the head is treated as expected."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("transformers")

import zoo

DEFERRED = [
    "AlbertForMaskedLM",
    "BertForMaskedLM",
    "BlipForConditionalGeneration",
    "BloomForCausalLM",
    "CohereForCausalLM",  # multiplies the logits
    "DeepseekV3ForCausalLM",  # latent attention, experts
    "GPT2LMHeadModel",
    "Gemma2ForCausalLM",  # softcap
    "GraniteForCausalLM",  # divides the logits
    "JambaForCausalLM",  # attention, state space and experts
    "LlavaForConditionalGeneration",
    "MambaForCausalLM",
    "MixtralForCausalLM",
    "ModernBertForMaskedLM",
    "ProphetNetForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen3NextForCausalLM",
    "T5ForConditionalGeneration",
    "VisionEncoderDecoderModel",
    "WhisperForConditionalGeneration",
    "XLMWithLMHeadModel",
    "XLNetLMHeadModel",
]
EXPECTED = {
    **dict.fromkeys(DEFERRED, "deferred"),
    "BartForConditionalGeneration": "deferred",  # adds a buffer to the logits
    "ChameleonForConditionalGeneration": "deferred",  # assigns to classes of the logits
    "Qwen2AudioForConditionalGeneration": "deferred",  # selects rows with a mask, which splits the graph
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_class_of_the_zoo(name: str) -> None:
    row = zoo.check(name)
    assert (row.verdict, row.error <= 1) == (EXPECTED[name], True), f"{row}\n{row.more}"


def test_a_wrong_gradient_is_not_right() -> None:
    exact = {"loss": torch.tensor(7.0).double(), "weight": torch.randn(64, 8).double(), "unused": None}
    eager = {key: None if value is None else value.float() for key, value in exact.items()}
    assert zoo.compare(eager, eager, exact)[0] <= 1
    worst, what = zoo.compare({**eager, "weight": eager["weight"] * (1 + 1e-5)}, eager, exact)
    assert worst > 1 and what.startswith("weight")
    worst, what = zoo.compare({**eager, "loss": eager["loss"] * math.nan}, eager, exact)
    assert not worst <= 1 and what.startswith("loss")
    assert zoo.compare({**eager, "weight": None}, eager, exact)[0] == math.inf
    assert zoo.compare({**eager, "unused": torch.zeros(3)}, eager, exact)[0] == math.inf


def test_every_class_is_listed_once() -> None:
    names = zoo.classes()
    assert set(EXPECTED) <= set(names)
    assert len(names) > 300


def test_the_document() -> None:
    rows = [
        zoo.Row("AForCausalLM", "deferred", pattern="linear → cross_entropy"),
        zoo.Row("BForCausalLM", "kept", "mutated: iadd changes the logits in place", "a/b.py:1"),
        zoo.Row("CForCausalLM", "no vocabulary head"),
    ]
    text = zoo.document(rows)
    assert "1 of the 2 classes that run and have a vocabulary head are fused or deferred: 50.0%." in text
    assert all(row.name in text for row in rows)
