"""Distil a language model: a small student learns the distributions of its teacher, not only the tokens of the text.

    python examples/distillation.py
    python examples/distillation.py --teacher DIR_OR_NAME

``distillation_loss`` is ordinary PyTorch, the divergence of two softened softmaxes (Hinton, Vinyals & Dean 2015,
arXiv:1503.02531). Compiled with fxfuse, the logits of neither model are ever built. Perplexities are taken without any
compiler, by ``fxfuse.linear_cross_entropy``.

Without ``--teacher``, one is first trained on the Python standard library, for half a minute.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import corpus
import quickstart
import score_text
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

import fxfuse

HELD_OUT = 16  # sequences whose perplexity is taken


# --- the program ------------------------------------------------------------------------------------------------


def distillation_loss(student: nn.Module, teacher: nn.Module, ids: Tensor, temperature: float) -> Tensor:
    """KL(teacher ‖ student) for a token of ``ids [B, T]``, both softened, in nats.

    The temperature's square keeps the size of the gradients, which are divided by it twice.
    """
    with torch.no_grad():
        wanted = teacher(input_ids=ids, use_cache=False).logits.float().flatten(0, 1)
    found = student(input_ids=ids, use_cache=False).logits.float().flatten(0, 1)
    divergence = F.kl_div(
        F.log_softmax(found / temperature, dim=-1),
        F.log_softmax(wanted / temperature, dim=-1),
        reduction="batchmean",
        log_target=True,
    )
    return divergence * temperature**2


def distil(
    loss_fn: Callable[..., Tensor],
    student: nn.Module,
    teacher: nn.Module,
    batches: Tensor,
    temperature: float,
    lr: float,
) -> list[float]:
    """A step for each of ``batches [steps, B, T]``; returns their losses."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=lr)
    losses = []
    for ids in (bar := tqdm(batches, desc="distilling", unit="step")):
        loss = loss_fn(student, teacher, ids, temperature)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return losses


@torch.no_grad()
def perplexity(model: nn.Module, ids: Tensor) -> float:
    """Of the tokens of ``ids [B, T + 1]`` but the first of each."""
    hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return math.exp(fxfuse.linear_cross_entropy(hidden, model.get_output_embeddings().weight, ids[:, 1:]).item())


# --- around it --------------------------------------------------------------------------------------------------


def make_student(vocab: int, hidden: int, length: int, seed: int) -> LlamaForCausalLM:
    """A Llama of one layer for the teacher's vocabulary."""
    torch.manual_seed(seed)
    heads = hidden // quickstart.HEAD
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 5 // 2,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=length,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def tokens_of(tokenizer: PreTrainedTokenizerBase, millions: int, seed: int) -> Tensor:
    """About ``millions`` of characters of the standard library as token ids, [n]."""
    texts = corpus.standard_library(millions * 1_000_000, seed)
    found = [tokenizer(one, add_special_tokens=False, verbose=False).input_ids for one in tqdm(texts, "tokenising")]
    return torch.tensor([token for ids in found for token in ids])


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description="Distil a language model into a smaller one.")
    parser.add_argument("--teacher", metavar="DIR_OR_NAME", help="a causal language model of transformers")
    parser.add_argument("--steps", type=quickstart.positive, default=40, help="of distillation (default %(default)s)")
    parser.add_argument("--pretrain", type=quickstart.positive, default=40, help="of a teacher, without --teacher")
    parser.add_argument("--temperature", type=float, default=2.0, help="of both softmaxes (default %(default)s)")
    parser.add_argument("--batch", type=quickstart.positive, default=8, help="sequences a step (default %(default)s)")
    parser.add_argument("--length", type=quickstart.positive, default=128, help="tokens of one (default %(default)s)")
    parser.add_argument("--hidden", type=quickstart.positive, default=128, help="student's size (default %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default %(default)s)")
    parser.add_argument("--backend", choices=quickstart.BACKENDS, default="fxfuse")
    parser.add_argument("--device", type=quickstart.device, default=quickstart.DEVICE)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.hidden % quickstart.HEAD:
        parser.error(f"--hidden must be a multiple of {quickstart.HEAD}, the size of an attention head")
    if not args.temperature > 0:
        parser.error("--temperature must be more than 0")
    return parser, args


def main() -> None:
    parser, args = parse()
    try:
        if args.teacher:
            teacher, tokenizer = score_text.load(args.teacher)
        else:
            teacher, tokenizer = score_text.train(args.device, args.pretrain, args.seed, "eager")
    except ValueError as error:
        parser.error(str(error))
    teacher = teacher.to(args.device).eval()
    vocab = teacher.get_output_embeddings().weight.shape[0]
    student = make_student(vocab, args.hidden, args.length, args.seed).to(args.device)
    tokens = tokens_of(tokenizer, 2, args.seed)
    split = len(tokens) * 9 // 10
    data = corpus.batches(tokens[:split], args.batch, args.length - 1, args.steps, args.seed).to(args.device)
    (held_out,) = corpus.batches(tokens[split:], HELD_OUT, args.length, 1, args.seed).to(args.device)
    size = [sum(p.numel() for p in model.parameters()) / 1e6 for model in (teacher, student)]
    print(
        f"\nA teacher of {size[0]:.1f} M parameters and a student of {size[1]:.1f} M. A step reads "
        f"{args.batch} x {args.length} tokens, whose two sets of logits are "
        f"{2 * args.batch * args.length * vocab * 4 / quickstart.MB:,.0f} MB in float32.",
        flush=True,
    )

    before = perplexity(student, held_out)
    loss_fn = torch.compile(distillation_loss, backend=args.backend)
    losses = distil(loss_fn, student, teacher, data, args.temperature, args.lr)
    print(f"\nDivergence from the teacher at temperature {args.temperature:g}, in nats a token")
    print(tabulate(list(quickstart.falling([losses])), ["steps", "divergence"], floatfmt=".4f"))
    print(f"\nPerplexity of {held_out[:, 1:].numel():,} other tokens")
    rows = [["student, before", before], ["student, after", perplexity(student, held_out)]]
    print(tabulate([*rows, ["teacher", perplexity(teacher, held_out)]], tablefmt="plain", floatfmt=",.1f"))
    if args.backend == "fxfuse":
        print(f"\nWhat fxfuse did\n{fxfuse.explain(loss_fn, student, teacher, data[0], args.temperature)}")


if __name__ == "__main__":
    main()
