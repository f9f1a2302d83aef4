"""Teach a language model by rewards: a policy gradient with log-probabilities, and an entropy bonus.

    python examples/policy_gradient.py
    python examples/policy_gradient.py --prefer "()[]{}"

The task is a small one, so that the reward visibly rises within a minute: tokens that hold a digit (or what
``--prefer`` names) are rewarded. ``policy_loss`` is ordinary PyTorch, as reinforcement learning from feedback writes
it; compiled with fxfuse, log-probabilities and entropies come from one pass, and neither the logits nor their softmax
are ever built. The first step is computed by eager PyTorch too, and compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

import corpus
import quickstart
import torch
import torch.nn.functional as F
from tabulate import tabulate
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

PROMPT = 8  # tokens of real text, after which the model goes on


# --- the program ------------------------------------------------------------------------------------------------


@torch.no_grad()
def roll_out(model: nn.Module, prompts: Tensor, count: int) -> Tensor:
    """``prompts [B, P]`` and after them ``count`` tokens sampled from the model: [B, P + count]."""
    ids, new, cache = prompts, prompts, None
    for _ in range(count):
        out = model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
        new = out.logits[:, -1].float().softmax(-1).multinomial(1)
        ids, cache = torch.cat((ids, new), 1), out.past_key_values
    return ids


def policy_loss(model: nn.Module, ids: Tensor, advantages: Tensor, bonus: float) -> tuple[Tensor, Tensor]:
    """The loss of REINFORCE (Williams 1992) with an entropy bonus, and the mean entropy of the policy.

    Args:
        ids: [B, P + R], of which the last R were sampled.
        advantages: [B, R], how much better than expected each of these turned out.
        bonus: what a nat of entropy is worth.
    """
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, -advantages.shape[1] :].float()
    log_probs = F.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(-1, ids[:, -advantages.shape[1] :, None]).squeeze(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    return -(advantages * chosen).mean() - bonus * entropy, entropy.detach()


def advantages_of(rewards: Tensor) -> Tensor:
    """What was earned from each token on, over the mean of the batch, in its standard deviations: [B, R]."""
    earned = rewards.flip(1).cumsum(1).flip(1)
    return (earned - earned.mean(0)) / (earned.std(0, correction=0) + 1e-6)


def learn(
    loss_fn: Callable[..., tuple[Tensor, Tensor]], model: nn.Module, prompts: Tensor, rewarded: Tensor, args: Settings
) -> tuple[list[float], list[float]]:
    """A step for each batch of ``prompts [steps, B, P]``; returns their rewards and entropies."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    rewards, entropies = [], []
    for batch in (bar := tqdm(prompts, desc="learning", unit="step")):
        ids = roll_out(model, batch, args.tokens)
        reward = rewarded[ids[:, PROMPT:]].float()
        loss, entropy = loss_fn(model, ids, advantages_of(reward), args.bonus)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(reward.mean().item())
        entropies.append(entropy.item())
        bar.set_postfix(reward=f"{rewards[-1]:.2f}", entropy=f"{entropies[-1]:.2f}", refresh=False)
    return rewards, entropies


# --- around it --------------------------------------------------------------------------------------------------


class Settings(NamedTuple):
    tokens: int
    lr: float
    bonus: float


def difference(
    loss_fn: Callable[..., tuple[Tensor, Tensor]], model: nn.Module, prompts: Tensor, args: Settings
) -> tuple[float, float]:
    """By how much loss and gradients differ from eager's on one batch, relative to eager's."""
    ids = roll_out(model, prompts, args.tokens)
    advantages = torch.randn(ids[:, PROMPT:].shape, generator=torch.Generator().manual_seed(0)).to(ids.device)
    losses, gradients = [], []
    for function in (loss_fn, policy_loss):
        loss, _ = function(model, ids, advantages, args.bonus)
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
        losses.append(loss.item())
    gradient = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    return abs(losses[0] - losses[1]) / abs(losses[1]), gradient.item()


def holding(tokenizer: Tokenizer, characters: str) -> Tensor:
    """Which tokens hold one of ``characters``: [V], booleans."""
    return torch.tensor(
        [not set(characters).isdisjoint(tokenizer.decode([i])) for i in range(tokenizer.get_vocab_size())]
    )


def sample(model: nn.Module, prompt: Tensor, tokenizer: Tokenizer, count: int) -> str:
    """How the model goes on after ``prompt [1, P]``, as it would be written in Python."""
    return repr(tokenizer.decode(roll_out(model, prompt, count)[0, PROMPT:].tolist()))


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description="Teach a small language model by rewards.")
    parser.add_argument("--steps", type=quickstart.positive, default=40, help="(default %(default)s)")
    parser.add_argument("--batch", type=quickstart.positive, default=32, help="prompts a step (default %(default)s)")
    parser.add_argument("--tokens", type=quickstart.positive, default=12, help="after each (default %(default)s)")
    parser.add_argument("--vocab", type=quickstart.positive, default=8192, help="tokens of it (default %(default)s)")
    parser.add_argument("--prefer", default="0123456789", metavar="CHARACTERS", help="what earns a reward: digits")
    parser.add_argument("--bonus", type=float, default=0.05, help="for a nat of entropy (default %(default)s)")
    parser.add_argument("--lr", type=float, default=4e-3, help="learning rate (default %(default)s)")
    parser.add_argument("--backend", choices=quickstart.BACKENDS, default="fxfuse")
    parser.add_argument("--device", type=quickstart.device, default=quickstart.DEVICE)
    parser.add_argument("--seed", type=int, default=0)
    return parser, parser.parse_args()


def main() -> None:
    parser, args = parse()
    settings = Settings(args.tokens, args.lr, args.bonus)
    length = PROMPT + args.tokens - 1  # of what is read; the last token is only predicted
    sizes = ["--vocab", str(args.vocab), "--length", str(length), "--hidden", "128", "--layers", "1"]
    text = corpus.build(args.vocab, args.seed, millions=2)
    rewarded = holding(text.tokenizer, args.prefer).to(args.device)
    if not 0 < int(rewarded.sum()) < args.vocab:
        parser.error(f"--prefer {args.prefer!r}: {int(rewarded.sum())} of {args.vocab:,} tokens hold one of these")
    model = quickstart.build_model(quickstart.parse([*sizes, "--device", args.device, "--seed", str(args.seed)]))
    prompts = corpus.batches(text.tokens, args.batch, PROMPT - 1, args.steps, args.seed).to(args.device)
    print(
        f"{int(rewarded.sum())} of {args.vocab:,} tokens are rewarded. A step learns from {args.batch} x {length} "
        f"tokens, whose logits are {args.batch * length * args.vocab * 4 / quickstart.MB:,.0f} MB in float32.",
        flush=True,
    )
    torch.manual_seed(args.seed)
    loss_fn = torch.compile(policy_loss, backend=args.backend)
    loss, gradient = difference(loss_fn, model, prompts[0], settings)
    print(f"Against eager, on one batch: loss differs by {loss:.0e} of it, gradients by {gradient:.0e}.", flush=True)

    before = sample(model, prompts[0, :1], text.tokenizer, args.tokens)
    rewards, entropies = learn(loss_fn, model, prompts, rewarded, settings)
    after = sample(model, prompts[0, :1], text.tokenizer, args.tokens)

    print("\nReward (the share of rewarded tokens) and entropy of the policy in nats, means over the steps")
    print(tabulate(list(quickstart.falling([rewards, entropies])), ["steps", "reward", "entropy"], floatfmt=".3f"))
    last = fmean(rewards[-max(1, args.steps // 8) :])
    print(
        f"\nThe reward went from {rewards[0]:.3f} to {last:.3f}. What the model said\nbefore: {before}\nafter:  {after}"
    )
    if args.backend == "fxfuse":
        import fxfuse

        ids = roll_out(model, prompts[0], args.tokens)
        advantages = torch.zeros(ids[:, PROMPT:].shape, device=ids.device)
        print(f"\nWhat fxfuse did\n{fxfuse.explain(loss_fn, model, ids, advantages, args.bonus)}")


if __name__ == "__main__":
    main()
