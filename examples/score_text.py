"""How likely is a text? The log-probabilities of text files under a language model.

    python examples/score_text.py README.md LICENSE
    python examples/score_text.py --model DIR_OR_NAME FILE ...

``token_log_probs`` is ordinary PyTorch: log_softmax over the vocabulary, then the entry of each token that really
came next.  Compiled with fxfuse it never holds the [tokens, vocabulary] log-probabilities.

Without ``--model``, a small Llama is first trained on the Python standard library, which takes about a minute.
``python examples/quickstart.py --save DIR`` keeps one for ``--model DIR``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import corpus
import quickstart
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

LONGEST_WINDOW = 1024


def token_log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """The log-probability of every token of ``ids [B, T + 1]`` but the first, given those before it: [B, T]."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    log_probs = F.log_softmax(logits.float(), dim=-1)
    return log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)


# --- texts as windows ---------------------------------------------------------------------------------------------


class Window(NamedTuple):
    """Tokens that the model sees at once; those from ``first`` on are scored, the others are context."""

    text: int
    tokens: list[int]
    first: int


def windows(text: int, tokens: list[int], length: int) -> Iterator[Window]:
    """Cover ``tokens`` so that each but the very first is scored once.

    A window predicts ``length`` tokens. All windows but the first repeat half of the one before as context.
    """
    scored = 1
    for start in range(0, len(tokens), length - length // 2):
        yield Window(text, tokens[start : start + length + 1], scored - start)
        scored = start + length + 1
        if scored >= len(tokens):
            return


@torch.no_grad()
def score(model: nn.Module, texts: list[list[int]], length: int, batch: int, backend: str) -> list[list[float]]:
    """The log-probability of each token of each text but the first."""
    log_probs_fn = torch.compile(token_log_probs, backend=backend)
    device = next(model.parameters()).device
    todo = [window for number, tokens in enumerate(texts) for window in windows(number, tokens, length)]
    batch = min(batch, len(todo))
    scores: list[list[float]] = [[] for _ in texts]
    for start in tqdm(range(0, len(todo), batch), desc="scoring", unit="batch"):
        group = todo[start : start + batch]
        # One shape for all, so that one compilation does. What fills it up comes after every token that is scored.
        ids = torch.zeros(batch, length + 1, dtype=torch.int64)
        for row, window in enumerate(group):
            ids[row, : len(window.tokens)] = torch.tensor(window.tokens)
        found = log_probs_fn(model, ids.to(device)).cpu()
        for row, window in enumerate(group):
            scores[window.text] += found[row, window.first - 1 : len(window.tokens) - 1].tolist()
    return scores


# --- models -------------------------------------------------------------------------------------------------------


def load(name: str) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    try:
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        what = name if Path(name).is_dir() else f"{name}, which is no directory here"
        raise ValueError(f"cannot load a model from {what}: {str(error).splitlines()[0]}") from error


def train(device: str, steps: int, seed: int, backend: str) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """The model of quickstart.py, trained for a moment: it knows what Python looks like, and little else."""
    settings = quickstart.parse(["--device", device, "--seed", str(seed)])
    text = corpus.build(settings.vocab, seed, settings.text)
    data = corpus.batches(text.tokens, settings.batch, settings.length, steps, seed)
    model = quickstart.build_model(settings)
    quickstart.train(model, data, backend, settings.lr, quickstart.Meter("training", device))
    return model, quickstart.as_pretrained(text.tokenizer, settings.length)


# --- the command --------------------------------------------------------------------------------------------------


def read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if not text:
        raise ValueError(f"{path} is empty")
    return text


def tokenise(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids, with one before them from which the first is predicted, if the tokenizer has such a token."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids if start is None else [start, *ids]


def table(paths: list[Path], texts: list[str], scores: list[list[float]]) -> str:
    rows = []
    for path, text, log_probs in zip(paths, texts, scores, strict=True):
        total = math.fsum(log_probs)
        mean = total / len(log_probs)
        bits = -total / math.log(2) / len(text.encode())
        rows.append([path, len(log_probs), total, mean, math.exp(-mean), bits])
    rows.sort(key=lambda row: row[3], reverse=True)
    headers = ["likeliest first", "tokens", "log-probability", "per token", "perplexity", "bits per byte"]
    return tabulate(rows, headers, floatfmt=("", "", ".1f", ".4f", ".2f", ".3f"))


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description="Log-probabilities of text files under a language model.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--model", metavar="DIR_OR_NAME", help="a causal language model of transformers")
    parser.add_argument(
        "--window", type=quickstart.positive, help=f"tokens at once (default: all, up to {LONGEST_WINDOW})"
    )
    parser.add_argument("--batch", type=quickstart.positive, default=8, help="windows at once (default %(default)s)")
    parser.add_argument("--steps", type=quickstart.positive, default=60, help="of training, without --model")
    parser.add_argument("--backend", choices=quickstart.BACKENDS, default="fxfuse")
    parser.add_argument("--device", type=quickstart.device, default=quickstart.DEVICE)
    parser.add_argument("--seed", type=int, default=0)
    return parser, parser.parse_args()


def main() -> None:
    parser, args = parse()
    try:
        texts = [read(path) for path in args.files]
        if args.model:
            model, tokenizer = load(args.model)
        else:
            model, tokenizer = train(args.device, args.steps, args.seed, args.backend)
        tokens = [tokenise(tokenizer, text) for text in texts]
        for path, ids in zip(args.files, tokens, strict=True):
            if len(ids) < 2:
                raise ValueError(f"{path} is one token, with none before it to predict it from")
    except ValueError as error:
        parser.error(str(error))
    most = getattr(model.config.get_text_config(), "max_position_embeddings", LONGEST_WINDOW)
    length = min(args.window or LONGEST_WINDOW, most, max(map(len, tokens)) - 1)
    scores = score(model.eval().to(args.device), tokens, length, args.batch, args.backend)
    print(table(args.files, texts, scores))


if __name__ == "__main__":
    main()
