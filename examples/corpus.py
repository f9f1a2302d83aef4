"""Real text that every machine has: the Python standard library's own sources, as token ids.

A byte-level BPE tokenizer is trained on them on the spot, in a few seconds.
"""

from __future__ import annotations

import random
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm

END_OF_TEXT = "<|endoftext|>"  # stands before every file, and is what the first token of a file is predicted from
SKIPPED = {"site-packages", "dist-packages", "test", "tests"}


class Corpus(NamedTuple):
    tokenizer: Tokenizer
    tokens: Tensor  # [n] int64, one file after another


def standard_library(limit: int, seed: int) -> list[str]:
    """Sources in an order that depends on ``seed`` alone, about ``limit`` characters of them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p for p in root.rglob("*.py") if SKIPPED.isdisjoint(p.relative_to(root).parts))
    random.Random(seed).shuffle(paths)
    texts, size = [], 0
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        texts.append(text)
        size += len(text)
        if size >= limit:
            break
    if not texts:
        raise SystemExit(f"no Python sources under {root}, where this Python says that its standard library is")
    return texts


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    if tokenizer.get_vocab_size() < vocab:
        raise SystemExit(f"{len(texts)} files of text make only {tokenizer.get_vocab_size()} tokens, not {vocab}")
    return tokenizer


def build(vocab: int, seed: int, millions: int) -> Corpus:
    """A tokenizer with ``vocab`` entries, and the text that it was trained on, ``millions`` of characters, as ids."""
    texts = standard_library(millions * 1_000_000, seed)
    size = sum(map(len, texts)) / 1e6
    print(f"Training a tokenizer on {len(texts)} files of the standard library ({size:.1f} MB)", file=sys.stderr)
    tokenizer = train_tokenizer(texts, vocab)
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids: list[int] = []
    for text in tqdm(texts, desc="tokenising", unit="file", leave=False):
        ids += [end, *tokenizer.encode(text).ids]
    return Corpus(tokenizer, torch.tensor(ids))


def batches(tokens: Tensor, batch: int, length: int, steps: int, seed: int) -> Tensor:
    """Random pieces of the text, [steps, batch, length + 1]: the last token of each is only predicted."""
    if len(tokens) <= length + 1:
        raise SystemExit(f"a sequence length of {length} is more than the {len(tokens)} tokens of text that there are")
    starts = torch.randint(len(tokens) - length - 1, (steps, batch, 1), generator=torch.Generator().manual_seed(seed))
    return tokens[starts + torch.arange(length + 1)]
