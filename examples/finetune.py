"""Fine-tune with transformers' Trainer on the completions alone: what stands in the prompt has no loss.

    python examples/finetune.py
    python examples/finetune.py --model DIR_OR_NAME

The task: after the signature of a function of the Python standard library, write its docstring. All that fxfuse needs
is ``model.compile(backend="fxfuse")`` before the Trainer is made; the loss inside of the model is fused, the logits
beside it, which Trainer does not read, are never computed, and neither are those of rows that have no label.

Without ``--model``, a small Llama is first trained on the library's sources, for half a minute.
"""

from __future__ import annotations

import argparse
import ast
import math
import random
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import corpus
import quickstart
import score_text
import torch
from tabulate import tabulate
from torch import nn
from transformers import PreTrainedTokenizerBase, ProgressCallback, Trainer, TrainingArguments

IGNORED = -100  # a label that F.cross_entropy leaves out
HELD_OUT = 64  # examples for the evaluation


class Example(NamedTuple):
    prompt: str
    completion: str


def documented_functions(sources: list[str]) -> Iterator[Example]:
    """The signature of every function that has a docstring, and the first paragraph of that."""
    for source in sources:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (text := ast.get_docstring(node)):
                signature = f'def {node.name}({ast.unparse(node.args)}):\n    """'
                yield Example(signature, text.partition("\n\n")[0] + '"""')


def encode(tokenizer: PreTrainedTokenizerBase, example: Example, length: int) -> dict[str, list[int]] | None:
    """``input_ids`` and ``labels``, both [length], with labels on the completion alone; None if it does not fit."""
    end = tokenizer.eos_token_id
    prompt, completion = (tokenizer(text, add_special_tokens=False, verbose=False).input_ids for text in example)
    prompt, completion = [end, *prompt], [*completion, end]
    padding = length - len(prompt) - len(completion)
    if padding < 0:
        return None
    # What fills it up comes after everything that is read, so that it needs no mask of attention.
    return {
        "input_ids": [*prompt, *completion, *[end] * padding],
        "labels": [*[IGNORED] * len(prompt), *completion, *[IGNORED] * padding],
    }


def ignored(examples: list[dict[str, list[int]]]) -> float:
    """The share of rows without a label; the last token of an example predicts nothing either."""
    labels = torch.tensor([example["labels"] for example in examples])
    return 1 - float((labels[:, 1:] != IGNORED).sum()) / labels.numel()


class Bar(ProgressCallback):
    """Trainer's progress bars without the lines between them: a table follows."""

    def on_log(self, *_: Any, **__: Any) -> None:
        pass


def fine_tune(
    model: nn.Module, train: list[Any], test: list[Any], args: argparse.Namespace, directory: str
) -> tuple[list[float], Trainer]:
    """Train for ``args.steps``; returns the loss on ``test`` before and after."""
    model.compile(backend=args.backend)
    settings = TrainingArguments(
        output_dir=directory,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        learning_rate=args.lr,
        logging_steps=max(1, args.steps // 8),
        prediction_loss_only=True,  # else the evaluation collects the logits, which computes them
        save_strategy="no",
        report_to=[],
        seed=args.seed,
        use_cpu=args.device == "cpu",
        bf16=args.device != "cpu" and torch.cuda.is_bf16_supported(),
    )
    trainer = Trainer(model=model, args=settings, train_dataset=train, eval_dataset=test)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Bar)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return [before, trainer.evaluate()["eval_loss"]], trainer


def report(trainer: Trainer, train: list[Any], test: list[Any], losses: list[float], args: argparse.Namespace) -> None:
    steps = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    print("\nLoss of a token of the completions")
    print(tabulate(steps, ["step", "training"], floatfmt=".3f"))
    print(f"\n{len(test)} held-out functions")
    rows = [[when, loss, math.exp(loss)] for when, loss in zip(("before", "after"), losses, strict=True)]
    print(tabulate(rows, ["", "loss", "perplexity"], floatfmt=("", ".3f", ".1f")))
    share, total = ignored(train), args.steps * args.batch * len(train[0]["labels"])
    print(
        f"\nOf the {total:,} rows of {args.steps} steps {share:.0%} are prompt or padding, with label {IGNORED}. "
        "On a CPU, and in 16\nbits on a GPU of compute capability 9 or 10 (an H100, say), "
        "fxfuse skips them: for these no logit and no gradient\nis computed."
    )
    if args.backend == "fxfuse":
        import fxfuse

        model, device = trainer.model, trainer.args.device
        batch = {key: torch.tensor([one[key] for one in test[: args.batch]], device=device) for key in test[0]}
        print(f"\nWhat fxfuse did\n{fxfuse.explain(model.train(), **batch)}")


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description="Fine-tune a language model with Trainer, on completions alone.")
    parser.add_argument("--model", metavar="DIR_OR_NAME", help="a causal language model of transformers")
    parser.add_argument("--steps", type=quickstart.positive, default=40, help="of fine-tuning (default %(default)s)")
    parser.add_argument("--pretrain", type=quickstart.positive, default=20, help="steps before it, without --model")
    parser.add_argument("--batch", type=quickstart.positive, default=16, help="examples a step (default %(default)s)")
    parser.add_argument("--length", type=quickstart.positive, default=64, help="tokens of one (default %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default %(default)s)")
    parser.add_argument("--backend", choices=quickstart.BACKENDS, default="fxfuse")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=quickstart.DEVICE)
    parser.add_argument("--seed", type=int, default=0)
    return parser, parser.parse_args()


def main() -> None:
    parser, args = parse()
    try:
        if args.model:
            model, tokenizer = score_text.load(args.model)
        else:
            model, tokenizer = score_text.train(args.device, args.pretrain, args.seed, "eager")
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {args.model} has no token for the end of a text")
    except ValueError as error:
        parser.error(str(error))
    found = list(documented_functions(corpus.standard_library(4_000_000, args.seed)))
    random.Random(args.seed).shuffle(found)
    examples = [one for one in (encode(tokenizer, example, args.length) for example in found) if one is not None]
    if len(examples) < 2 * HELD_OUT:
        parser.error(f"only {len(examples)} examples fit into --length {args.length}")
    test, train = examples[:HELD_OUT], examples[HELD_OUT:]
    print(f"\n{len(train)} functions to learn from; one of them:\n{found[0].prompt}{found[0].completion}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="fxfuse-finetune-") as directory:
        losses, trainer = fine_tune(model, train, test, args, directory)
    report(trainer, train, test, losses, args)


if __name__ == "__main__":
    main()
