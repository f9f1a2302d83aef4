"""How likely is a text? The log-probabilities of texts under a language model, and which of them is the likelier.

    python examples/score_text.py --text "for i in range(9):" --text "for range(9) in i:"
    python examples/score_text.py README.md LICENSE --plot tokens.png
    python examples/score_text.py --model DIR_OR_NAME FILE ...

``token_log_probs`` is ordinary PyTorch: log_softmax over the vocabulary, then the entry of each token that really
came next.  Compiled with fxfuse it never holds the [tokens, vocabulary] log-probabilities.

``--plot`` draws how surprising every token was.

Without ``--model``, a small Llama is first trained on the Python standard library, which takes about a minute.
``python examples/quickstart.py --save DIR`` keeps one for ``--model DIR``.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import shorten
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
MOST_LABELS = 80  # tokens that are drawn as bars, with their text below
RUNNING = 32  # tokens of a longer text whose mean is drawn
# Settings of quickstart.py for a model that is trained on the spot.
SMALL = ["--batch", "4", "--vocab", "8192", "--text", "3"]


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


def all_windows(texts: list[list[int]], length: int) -> list[Window]:
    return [window for number, tokens in enumerate(texts) for window in windows(number, tokens, length)]


@torch.no_grad()
def score(
    log_probs_fn: Callable[..., Tensor], model: nn.Module, texts: list[list[int]], length: int, batch: int
) -> list[list[float]]:
    """The log-probability of each token of each text but the first; ``log_probs_fn`` is ``token_log_probs``."""
    device = next(model.parameters()).device
    todo = all_windows(texts, length)
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
    settings = quickstart.parse(["--device", device, "--seed", str(seed), *SMALL])
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


class Row(NamedTuple):
    name: str
    tokens: int
    total: float  # the log-probability of the text
    mean: float
    perplexity: float
    bits: float  # for each byte of the text


def rows(names: list[str], texts: list[str], scores: list[list[float]]) -> list[Row]:
    """What is known of each text, the likeliest for its size first."""
    found = []
    for name, text, log_probs in zip(names, texts, scores, strict=True):
        total = math.fsum(log_probs)
        mean = total / len(log_probs)
        bits = -total / math.log(2) / len(text.encode())
        found.append(Row(name, len(log_probs), total, mean, math.exp(-mean), bits))
    return sorted(found, key=lambda row: row.bits)


def table(found: list[Row]) -> str:
    headers = ["likeliest first", "tokens", "log-probability", "per token", "perplexity", "bits per byte"]
    return tabulate(found, headers, floatfmt=("", "", ".1f", ".4f", ".2f", ".3f"))


def verdict(found: list[Row]) -> str:
    """Which of ``rows`` is the likelier: as a whole, where each further token makes a text less likely, and by size."""
    first, second, *_ = sorted(found, key=lambda row: row.total, reverse=True)
    best, other, *_ = found
    more = first.total - second.total
    times = f"{math.exp(more):,.1f}" if more < 10 else f"e^{more:.0f}"
    return (
        f"As a whole, {first.name} is the likelier: {times} times as likely as {second.name}.\n"
        f"For its size, {best.name} is: {best.bits:.3f} bits a byte, where {other.name} takes {other.bits:.3f}."
    )


def plot(to: Path, names: list[str], pieces: list[list[str]], scores: list[list[float]]) -> None:
    """How surprising each token was, in bits, one panel a text; ``pieces`` are the tokens as text."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(names), 1, figsize=(10, 0.5 + 2.6 * len(names)), sharey=True, squeeze=False)
    for axis, name, words, log_probs in zip(axes[:, 0], names, pieces, scores, strict=True):
        bits = [-one / math.log(2) for one in log_probs]
        mean = math.fsum(bits) / len(bits)
        axis.axhline(mean, color="#2c3e50", linewidth=1, label=f"mean {mean:.2f}")
        axis.set_title(name.replace("$", r"\$"), fontsize=9)
        axis.set_ylabel("surprise, bits")
        axis.margins(x=0.01)
        if len(words) <= MOST_LABELS:
            axis.bar(range(len(bits)), bits, color="#c0392b")
            shown = [word.replace(" ", "·").replace("\n", "⏎").replace("$", r"\$") for word in words]
            upright = 0 if len(words) <= MOST_LABELS // 4 else 90
            axis.set_xticks(range(len(words)), shown, rotation=upright, fontsize=7, family="monospace")
        else:
            smooth = torch.tensor(bits).unfold(0, RUNNING, 1).mean(1)
            axis.plot(bits, ".", color="#c0392b", markersize=3, alpha=0.35, markeredgewidth=0)
            axis.plot(torch.arange(len(smooth)) + RUNNING // 2, smooth, color="#c0392b", label=f"mean of {RUNNING}")
            axis.set_xlabel("token")
        axis.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    figure.tight_layout()
    figure.savefig(to, dpi=150)
    plt.close(figure)


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description="Log-probabilities of texts under a language model.")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--text", action="append", default=[], help="the text itself; may be given several times")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw how surprising each token was")
    parser.add_argument("--model", metavar="DIR_OR_NAME", help="a causal language model of transformers")
    parser.add_argument(
        "--window", type=quickstart.positive, help=f"tokens at once (default: all, up to {LONGEST_WINDOW})"
    )
    parser.add_argument("--batch", type=quickstart.positive, default=8, help="windows at once (default %(default)s)")
    parser.add_argument("--steps", type=quickstart.positive, default=50, help="of training, without --model")
    parser.add_argument("--backend", choices=quickstart.BACKENDS, default="fxfuse")
    parser.add_argument("--device", type=quickstart.device, default=quickstart.DEVICE)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.files and not args.text:
        parser.error("give the name of a FILE, or a --text")
    if args.plot:
        if not args.plot.parent.is_dir():
            parser.error(f"cannot draw {args.plot}: there is no directory {args.plot.parent}")
        if args.plot.suffix.lower() != ".png":
            parser.error(f"cannot draw {args.plot}: its name does not end in .png")
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--plot needs matplotlib: pip install matplotlib")
    return parser, args


def main() -> None:
    parser, args = parse()
    names = [str(path) for path in args.files] + [repr(shorten(text, 40)) for text in args.text]
    try:
        texts = [read(path) for path in args.files] + args.text
        if "" in texts:
            raise ValueError("a --text is empty")
        if args.model:
            model, tokenizer = load(args.model)
        else:
            model, tokenizer = train(args.device, args.steps, args.seed, args.backend)
        tokens = [tokenise(tokenizer, text) for text in texts]
        for name, ids in zip(names, tokens, strict=True):
            if len(ids) < 2:
                raise ValueError(f"{name} is one token, with none before it to predict it from")
    except ValueError as error:
        parser.error(str(error))
    most = getattr(model.config.get_text_config(), "max_position_embeddings", LONGEST_WINDOW)
    length = min(args.window or LONGEST_WINDOW, most, max(map(len, tokens)) - 1)
    log_probs_fn = torch.compile(token_log_probs, backend=args.backend)
    model = model.eval().to(args.device)
    batch = min(args.batch, len(all_windows(tokens, length)))
    scores = score(log_probs_fn, model, tokens, length, batch)

    found = rows(names, texts, scores)
    print(f"\n{table(found)}")
    if len(found) > 1:
        print(f"\n{verdict(found)}")
    if args.plot:
        pieces = [[tokenizer.decode([token]) for token in ids[1:]] for ids in tokens]
        plot(args.plot, names, pieces, scores)
        print(f"\nDrew the surprise of every token in {args.plot}")
    if args.backend == "fxfuse":
        import fxfuse

        ids = torch.zeros(batch, length + 1, dtype=torch.int64, device=args.device)
        with torch.no_grad():
            print(f"\nWhat fxfuse did\n{fxfuse.explain(log_probs_fn, model, ids)}")


if __name__ == "__main__":
    main()
