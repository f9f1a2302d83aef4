"""Random programs that read logits, as Python text: one that fails can be pasted into ``programs.py``.

A program is made line by line, and each line is run in eager as soon as it is made: the generator looks at the tensors
that there are to see what can be done next, and a line that raises is dropped. So nearly every program runs.

Only some kinds of steps are drawn for one program (swarm testing): one step without a rule keeps a head, so a program
with a few of every kind would never be fused.
"""

from __future__ import annotations

import linecache
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import programs
import torch
from programs import World

Pick = Callable[[Sequence[Any]], Any]
_FILE = "generated_program.py"
_MOST_ELEMENTS = 4096  # of logits: `repeat` and `cat` would otherwise grow them


@dataclass(frozen=True, repr=False)
class Program:
    """What is between ``def`` and the end."""

    lines: tuple[str, ...]

    def __repr__(self) -> str:
        body = textwrap.indent("\n".join(self.lines), "    ")
        return f"def _generated(s: World) -> Any:\n{body}\n"

    def function(self) -> Callable[[World], Any]:
        source, namespace = repr(self), dict(vars(programs))
        exec(compile(source, _FILE, "exec", dont_inherit=True), namespace)
        linecache.cache[_FILE] = (len(source), None, source.splitlines(keepends=True), _FILE)
        return namespace["_generated"]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Value:
    """A variable with a class axis, and the variable with labels of the shape of its rows."""

    name: str
    labels: str
    axis: int
    normalised: bool = False  # log-probabilities


# --- what steps are made of -----------------------------------------------------------------------------------
# In all templates: {z} a value, {y} its labels, {c} its class axis, {n} its classes, {k} = {n} - 3, {v} what makes
# a vector [n] lie along the class axis, {index} the labels as an index into {z}.

LABELS = ["s.y", "s.masked", "s.y.clone()", "torch.where(s.y % 4 == 0, -100, s.y)", "torch.full_like(s.y, -100)"]
HIDDEN_STATES = [  # with the labels of their rows
    ("s.x", "{y}"),
    ("s.x * 2", "{y}"),
    ("s.x[:, 1:]", "{y}[:, 1:]"),
    ("s.x[:, :-1, :]", "{y}[:, 1:]"),
    ("s.x[:, :BATCH]", "{y}[:, :BATCH]"),  # as many along either axis
    ("s.x.reshape(-1, HIDDEN)", "{y}.reshape(-1)"),
    ("s.x.view(-1, HIDDEN)", "{y}.view(-1)"),
    ("F.layer_norm(s.x, (HIDDEN,))", "{y}"),
    ("F.normalize(s.x, dim=-1)", "{y}"),
    ("s.x / s.x.norm(dim=-1, keepdim=True)", "{y}"),
    ("s.x.tanh()", "{y}"),
    ("F.dropout(s.x, 0.0)", "{y}"),
    ("s.x.detach()", "{y}"),
    ("s.x.clone()", "{y}"),
    ("s.x.float().to(s.x.dtype)", "{y}"),
    ("s.x.transpose(0, 1)", "{y}.t()"),
    ("s.x[:, -1]", "{y}[:, -1]"),
    ("s.x[0]", "{y}[0]"),
    ("s.x[0, 0]", "{y}[0, 0]"),
    ("s.x.unsqueeze(1)", "{y}.unsqueeze(1)"),
    ("s.x[{y} >= 0]", "{y}[{y} >= 0]"),
    ("torch.cat([s.x, s.x * 2])", "torch.cat([{y}, {y}])"),
    ("s.x.expand(2, -1, -1, -1)", "{y}.expand(2, -1, -1)"),
    ("F.embedding(s.y, s.w)", "{y}"),
    ("s.x.mT.contiguous().mT", "{y}"),
    ("s.x + s.w[0]", "{y}"),
    ("s.x.detach().clone()", "{y}"),
]
WEIGHTS = [
    "s.w",
    "s.w * 2",
    "s.w[:14]",
    "s.w[3:]",
    "F.normalize(s.w, dim=-1)",
    "s.w / s.w.norm(dim=1, keepdim=True)",
    "s.w + s.w[:, :2] @ s.w[:2]",
    "s.w.detach()",
    "s.w.detach().clone()",
    "s.w.double()",
    "s.w.float().to(s.w.dtype)",
    "s.w.flip(0)",
    "s.w * s.b[:, None]",
    "s.w.t().contiguous().t()",
    "torch.cat([s.w, s.w * 2])",
    "s.w.roll(1, 0)",
]
BIASES = ["s.b", "s.b.detach()", "s.c", "s.b * 2", "s.b[:14]", "s.b[3:]", "s.b.detach().clone()"]
HEADS = [  # with the class axis, counted from the end
    ("F.linear({x}, {w})", -1),
    ("F.linear({x}, {w}, {b})", -1),
    ("{x} @ {w}.t()", -1),
    ("{x} @ {w}.T", -1),
    ("{x}.matmul({w}.mT)", -1),
    ("torch.matmul({x}, {w}.transpose(0, 1))", -1),
    ("torch.mm({x}, {w}.t())", -1),
    ("torch.addmm({b}, {x}, {w}.t())", -1),
    ("torch.addmm({b}, {x}, {w}.t(), beta=0.5, alpha=2)", -1),
    ("F.linear({x}, {w}) + {b}", -1),
    ('torch.einsum("...d,vd->...v", {x}, {w})', -1),
    ('torch.einsum("btd,vd->btv", {x}, {w})', -1),
    ('torch.einsum("vd,btd->btv", {w}, {x})', -1),
    ('torch.einsum("nd,vd->nv", {x}, {w})', -1),
    ('torch.einsum("btd,vd->bvt", {x}, {w})', -2),
    ('torch.einsum("...d,vd", {x}, {w})', -1),
    ("torch.inner({x}, {w})", -1),
    ("torch.tensordot({x}, {w}, ([-1], [1]))", -1),
    ("torch.inner({x}, {w})", -1),
    ("torch.tensordot({x}, {w}, ([-1], [1]))", -1),
    ("torch.bmm({x}, {w}.t().expand({x}.shape[0], -1, -1))", -1),
    ("torch.baddbmm({b}, {x}, {w}.t().expand({x}.shape[0], -1, -1))", -1),
    ("torch.matmul({x}, {w}.t()[None])", -1),
    ("({x}.unsqueeze(-2) * {w}).sum(-1)", -1),
    ("{w} @ {x}.mT", -2),
    ("{w} @ {x}", -1),  # one row
    ("torch.mv({w}, {x})", -1),
    ("F.conv1d({x}.mT, {w}.unsqueeze(-1))", -2),
]

TRANSFORMS = [
    "{z} / 2",
    "{z} * 0.5",
    "3 * {z}",
    "-{z}",
    "{z} + 1",
    "0.5 + {z}",
    "{z} - 0.5",
    "1 - {z}",
    "torch.div({z}, 2.5)",
    "{z}.mul(0.5)",
    "torch.add({z}, 1)",
    "torch.sub({z}, 1, alpha=2)",
    "torch.tanh({z} / 3) * 3",
    "3 * torch.tanh({z} / 3) / 0.7",
    "2.3 * torch.sigmoid(({z} + 0.5) / 0.75)",
    "{z}.to(s.x.dtype)",
    "{z}.double()",
    "{z}.contiguous()",
    "{z}.clone()",
    "{z}.detach()",
]
ODD_TRANSFORMS = [
    "{z} / s.b[0].exp()",  # a temperature that is learnt
    "{z} * s.c[0]",
    "{z} / torch.tensor(2.0)",
    "{z} * s.x.new_tensor([0.5])",
    "s.b[1] * {z} + s.b[2]",
    "{z} / ({y}.clamp(min=0) + 1).unsqueeze({c})",  # one a row
    "{z} * s.x[..., :1].exp()",
    "{z} + s.x[..., :1]",
    "{z} - {y}.unsqueeze({c}).to({z}.dtype)",
    "{z} + s.b[:{n}]{v}",
    "{z} - s.c[:{n}]{v}.log()",
    "{z} * s.c[:{n}]{v}",
    "{z} / s.b[:{n}]{v}.exp()",
    "{z} - {z}.max({c}, keepdim=True).values",
    "{z} - {z}.detach().amax({c}, keepdim=True)",
    "{z} - {z}.mean({c}, keepdim=True)",
    "{z} - {z}.logsumexp({c}, keepdim=True)",
    "2.0 - {z}",
    "s.b[:{n}]{v} - {z}",
    "{z}.logsumexp({c}, keepdim=True) - {z}",
    "{z} / {z}.norm(dim={c}, keepdim=True)",
    "{z} - 0.3 * F.one_hot({y}.clamp(min=0), {n}).movedim(-1, {c})",
    "torch.where({y}.unsqueeze({c}) >= 0, {z}, 0.0)",
    "{z} * ({y}.unsqueeze({c}) >= 0)",
    "{z}.masked_fill({z} < {z}.topk(5, {c}).values.amin({c}, keepdim=True), -1e4)",
    "{z}.scatter({c}, {index}, 0.25)",
    "torch.lerp({z}, {z} * 2, 0.3)",
    "torch.addcmul({z}, {z}, {z}, value=0.1)",
    "{z}.clamp(-2, 2)",
    "{z}.clamp(max=1.0)",
    "{z}.clamp_min(0)",
    "F.relu({z})",
    "{z}.nan_to_num()",
    "{z} * {z}",
    "{z} + {z}",
    "{z} * 1e-200 * 1e-200",
    "{z} * 0",
    "{z} / -1.5",
    "{z}.pow(2)",
    "{z}.abs()",
    "{z}.sort({c}).values",
    "{z}.cumsum({c})",
    "{z}.softmax({c})",
    "{z}.log_softmax({c})",
    "{z}.float()",
    "{z}.float().to(s.x.dtype)",
    "{z}.to(torch.float32)",
    "{z}.type_as(s.x)",
    "{z}.flip({c})",
    "{z}.roll(1, {c})",
    "F.dropout({z}, 0.0)",
    "torch.utils.checkpoint.checkpoint(torch.tanh, {z}, use_reentrant=False)",
    "{z}.requires_grad_({z}.requires_grad)",
]
_LAST = "(torch.arange({n}, device={z}.device) >= {k}){v}"  # the last three classes
MASKS = [  # labels are kept off what is masked
    "{z}.masked_fill({last}, -inf)",
    "{z}.masked_fill({last}, -1e4)",
    "{z}.masked_fill({last}, torch.finfo(torch.float32).min)",
    "{z}.masked_fill({last}, torch.finfo({z}.dtype).min)",
    "torch.masked_fill({z}, {last}, -inf)",
    "torch.where({last}, -inf, {z})",
    "torch.where(~{last}, {z}, {z}.new_tensor(-1e4))",
    "{z} + torch.where({last}, -inf, 0.0)",
    "{z} + {last} * -1e4",
    "{z}.index_fill({c}, torch.arange({k}, {n}, device={z}.device), -inf)",
]
SLICES = [  # of classes
    "{z}{at}:{k}]",
    "{z}.narrow({c}, 0, {k})",
    "torch.narrow({z}, {c}, 0, {k})",
    "{z}{at}3:]",
    "{z}{at}::2]",
    "{z}.split([{k}, 3], {c})[0]",
    "{z}.index_select({c}, torch.arange({k}, device={z}.device))",
    "{z}{at}torch.arange({k}, device={z}.device)]",
    "{z}{at}[3, 0, 3, 1]]",
    "{z}.chunk(2, {c})[0]",
    "torch.cat([{z}{at}:{k}], {z}{at}{k}:] * 2], {c})",
    "torch.cat([{z}, {z}.new_zeros({z}.shape).narrow({c}, 0, 1)], {c})",
    "torch.cat([{z}, {z}], {c})",
]
WRITES_TO_LOGITS = [
    "{z} /= 2",
    "{z} *= 0.5",
    "{z} *= s.x[..., :1].exp()[:, :BATCH]",
    "{z}.sub_(other={z}.detach().amax({c}, keepdim=True))",
    "{z}.add_(other=s.b[:{n}]{v})",
    "{z}.index_fill_(dim={c}, index=torch.arange(2, device={z}.device), value=-3.0)",
    "{z} += 1",
    "{z} -= 0.5",
    "{z}.div_(2)",
    "{z}.mul_(0.5)",
    "{z}.add_(1)",
    "{z}.neg_()",
    "{z}.tanh_()",
    "{z}.div_(s.b[0].exp())",
    "{z} += s.b[:{n}]{v}",
    "{z}.clamp_(-2, 2)",
    "{z}.masked_fill_({last}, -inf)",
    "{z}.masked_fill_(s.c[:{n}]{v} < 0.2, -1e4)",
    "{z}{at}{k}:] = -1e4",
    "{z}{at}{k}:] = -inf",
    "{z}{at}1] = -1e4",
    "{z}{at}s.c[:{n}] < 0.2] = -1e4",
    "{z}{at}0].fill_(-3)",
    "{z}.select({c}, 1).mul_(2)",
    "{z}.detach().select({c}, 1).add_(1)",
    "{z}.index_fill_({c}, torch.arange({k}, {n}, device={z}.device), -inf)",
    "{z}.scatter_({c}, {index}, 0.25)",
    "{z}[0] = 0",
    "{z}[0].zero_()",
    "{z}[:, 1] *= 2",
    "{z}[..., -1] += 1",
    "{z}.view(-1)[0] = 3",
    "{z}.flatten()[1] = 3",
    "{z}.copy_({z} * 2)",
    "{z}.zero_()",
    "{z}.detach().mul_(2)",
    "{z}.data.mul_(2)",
    "{z}.sub_({z}.max({c}, keepdim=True).values)",
    "F.relu({z}, inplace=True)",
    "{z}[{y} == -100] = 0",
    "{z}.unsqueeze(0).mul_(2)",
    "torch.tanh_({z})",
    "{z}.transpose(0, -1).mul_(2)",
    "torch._foreach_mul_([{z}], 2.0)",
]
WRITES_TO_LABELS = [
    "{y}[0] = 1",
    "{y}[..., -1] = -100",
    "{y}.fill_(2)",
    "{y}.clamp_(min=0)",
    "{y}[{y} < 0] = 0",
    "{y}.masked_fill_({y} == 3, -100)",
    "{y}.view(-1)[0] = 2",
    "s.y.add_(1).remainder_(7)",
    "s.y.zero_()",
]
# {o} is a variable with hidden states, a weight or a bias. Nothing writes to .data of what eager saves for its
# backward: its gradients are then of a mixture of numbers, which is not to be imitated.
WRITES_TO_OPERANDS = [
    "{o}.mul_(2)",
    "{o} *= 2",
    "{o}[0] = 0",
    "{o}[..., 0] += 1",
    "{o}.detach().mul_(2)",
    "{o}.copy_({o} * 3)",
    "s.c.mul_(2)",
    "s.c[0] = 0.5",
    "s.b.detach().add_(1)",
    "s.w.detach().mul_(0.5)",
    "s.x.detach()[0].zero_()",
    "s.w.data = s.w.data * 2",
    "with torch.no_grad():\n    s.w.mul_(2)",
    "with torch.no_grad():\n    s.b -= 0.5",
    "with torch.no_grad():\n    s.x[0] = 1",
]

LOSSES = [  # {input} and {target} as a loss wants them, {d} the class axis of {input}
    "F.cross_entropy({input}, {target}{options})",
    "F.nll_loss(F.log_softmax({input}, {d}), {target}{nll_options})",
    "F.nll_loss({input}.log_softmax(dim={d}), {target}{nll_options})",
    "torch.nn.CrossEntropyLoss()({input}, {target})",
    'torch.nn.CrossEntropyLoss(ignore_index=3, reduction="none")({input}, {target})',
    "torch.utils.checkpoint.checkpoint(F.cross_entropy, {input}, {target}, use_reentrant=False)",
]
READERS = [
    "F.log_softmax({z}, dim={c}).gather({c}, {index}).squeeze({c})",
    "{z}.log_softmax({c}).gather({c}, {index})",
    "torch.take_along_dim({z}.log_softmax({c}), {index}, {c})",
    "{z}.gather({c}, {index}).squeeze({c}) - {z}.logsumexp({c})",
    "torch.logsumexp({z}, {c})",
    "{z}.logsumexp(dim=({c},), keepdim=True)",
    "{z}.logsumexp({c}).pow(2).mean()",
    "{z}.gather({c}, torch.cat([{index}, {index} * 0], {c}))",
    "{z}.log_softmax({c}).gather({c}, torch.cat([{index}, {index} // 2, {index}], {c}))",
    "{z}.sum({c})",
    "{z}.mean({c}, keepdim=True)",
    "torch.log_softmax({z}, {c}).sum({c})",
    "-{z}.log_softmax({c}).mean({c})",
]
ODD_READERS = [
    # entropy
    "-({z}.softmax({c}) * {z}.log_softmax({c})).sum({c})",
    "{z}.logsumexp({c}) - ({z}.softmax({c}) * {z}).sum({c})",
    "torch.special.entr({z}.softmax({c})).sum({c})",
    "-({z}.log_softmax({c}).exp() * {z}.log_softmax({c})).sum({c})",
    "torch.distributions.Categorical(logits={z}, validate_args=False).entropy()",
    "torch.distributions.Categorical(logits={z}, validate_args=False).log_prob({y}.clamp(min=0))",
    # one class, spelt otherwise
    "{z}.log_softmax(-1)[torch.arange({z}.shape[0], device={z}.device), {y}.clamp(min=0)]",
    "{z}.log_softmax({c}){at}2]",
    "(lambda i: {z}[i, i])(s.y[0] % 2)",
    "(lambda i: {z}[..., i, i])(s.y[0] % 2)",
    "{z}[[0, 1], ..., None].sum(-1)",
    "{z}{at}1]",
    "torch.stack([{z}.select({c}, 2), {z}{at}-1]], 0).log_softmax(0)[1]",
    "{z}.softmax({c}).select({c}, 3) ** 2",
    "{z}[{y}[0] % 2].mul(2)[..., 1]",
    "{z}{at}2] - {z}.logsumexp({c})",
    "-(F.one_hot({y}.clamp(min=0), {n}).movedim(-1, {c}) * {z}.log_softmax({c})).sum({c})",
    "({z} * F.one_hot({y}.clamp(min=0), {n}).movedim(-1, {c}).to({z}.dtype)).sum({c})",
    "{z}.softmax({c}).gather({c}, {index}).squeeze({c}).log()",
    "F.softmax({z}, dim={c}).gather({c}, {index})",
    "(1 - {z}.softmax({c}).gather({c}, {index})) ** 2 * {z}.log_softmax({c}).gather({c}, {index})",
    "{z}.exp().sum({c}).log()",
    "({z}.exp() / {z}.exp().sum({c}, keepdim=True)).gather({c}, {index})",
    "({z} - {z}.exp().sum({c}, keepdim=True).log()).gather({c}, {index})",
    "torch.log_softmax({z}, {c}, dtype=torch.float64).gather({c}, {index})",
    "F.softmax({z}, dim={c}, dtype=torch.float32).amax({c})",
    # the largest
    "{z}.argmax({c})",
    "torch.argmax({z}, dim={c}, keepdim=True)",
    "({z}.argmax({c}) == {y}).float().mean()",
    "{z}.max({c}).values",
    "{z}.max({c})[1]",
    "torch.max({z}, {c})[0]",
    "{z}.amax({c}, keepdim=True)",
    "{z}.min({c}).values",
    "{z}.topk(3, {c}).values",
    "{z}.topk(3, dim={c})[1]",
    "({z}.topk(2, {c}).indices == {y}.unsqueeze({c})).any({c})",
    "{z}.softmax({c}).topk(2, {c}, largest=False).values",
    "{z}.log_softmax({c}).topk(3, {c})[0]",
    "{z}.softmax({c}).max({c}).values",
    # The rank.
    "({z} > {z}.gather({c}, {index})).sum({c})",
    # all of it
    "{z}.softmax({c})",
    "F.log_softmax({z}, {c})",
    "{z}.log_softmax({c}).exp()",
    "({z}.softmax({c}) * s.c[:{n}]{v}).sum({c})",
    "{z}.var({c})",
    "{z}.norm(dim={c})",
    "{z}.pow(2).sum({c})",
    "{z}.abs().mean()",
    "{z}.sum()",
    "{z}.mean()",
    "{z}.detach().max()",
    "{z}.amax()",
    "{z}.sort({c}).values.cumsum({c})",
    "{z}.softmax({c}).cumsum({c})",
    "{z}.isnan().any()",
    "{z}.sum(0)",
    "{z}.logsumexp(0)",
    "{z} @ s.w",
    "torch.full_like({z}, 2.0).sum({c})",
    "{z}.new_zeros(2) + {z}.shape[0]",
    # itself, with other rows, another temperature or no gradient
    'F.kl_div(({z} / 2).log_softmax({c}), {z}.detach().softmax({c}), reduction="batchmean")',
    "F.kl_div({z}.log_softmax({c}), {z}.roll(1, 0).log_softmax({c}), log_target=True)",
    "-({z}.detach().softmax({c}) * {z}.log_softmax({c})).sum({c})",
    "({z}.softmax({c}) * ({z}.log_softmax({c}) - {z}.flip(0).log_softmax({c}))).sum({c})",
    'F.kl_div((({z}.softmax({c}) + ({z} / 3).softmax({c})) / 2).log(), {z}.softmax({c}), reduction="sum")',
    "({z}.detach().softmax({c}) * {z}.log_softmax({c})).masked_fill({z}.isinf(), 0).sum({c})",
    "({z}.softmax({c}) * {z}.flip(0).log_softmax({c}) - {z}.softmax({c}) * {z}.log_softmax({c})).sum({c})",
    "(lambda z, o: ((z.softmax({c}) * o.log_softmax({c})).masked_fill(z.isinf() | o.isinf(), 0)"
    " - (z.softmax({c}) * z.log_softmax({c})).masked_fill(o.isinf() | z.isinf(), 0)).mean({c}))({z}, {z}.flip(0))",
    # losses
    "F.cross_entropy({input}, F.one_hot({target}.clamp(min=0), {n}).movedim(-1, {d}).to({z}.dtype))",
    "F.cross_entropy({input}, {input}.detach().flip({d}).softmax({d}), label_smoothing=0.1)",
    "F.multi_margin_loss({input}, {target}.clamp(min=0))",
    "F.binary_cross_entropy_with_logits({z}, F.one_hot({y}.clamp(min=0), {n}).movedim(-1, {c}).to({z}.dtype))",
    "sum(F.cross_entropy(a, b) for a, b in zip({input}.split(2), {target}.split(2)))",
    "sum(F.cross_entropy(a, b) for a, b in zip({input}.unbind(0), {target}.unbind(0)))",
    "F.cross_entropy({input}.float(), {target})",
]
OF_LOG_PROBS = [
    "{z}.gather({c}, {index}).squeeze({c})",
    "torch.gather({z}, {c}, {index})",
    "F.nll_loss({input}, {target}{nll_options})",
    "torch.take_along_dim({z}, {index}, {c})",
    "{z}.sum({c})",
    "{z}.mean({c}, keepdim=True)",
]
ODD_OF_LOG_PROBS = [
    "-({z}.exp() * {z}).sum({c})",
    "{z}.exp().gather({c}, {index})",
    "{z}{at}0]",
    "{z}.select({c}, 1).exp()",
    "-(F.one_hot({y}.clamp(min=0), {n}).movedim(-1, {c}) * {z}).sum({c})",
    "{z}[torch.arange({z}.shape[0], device={z}.device), {y}.clamp(min=0)]",
    "{z}.argmax({c})",
    "{z}.amax({c})",
    "{z}.logsumexp({c})",
    "{z}.exp()",
    "{z}.sum()",
    "F.kl_div({z}, {z}.detach().flip({c}), log_target=True)",
]
TARGETS = [  # with an entry for each of {z}
    "torch.zeros_like({z}).scatter({c}, {index}, 0.9)",
    "torch.zeros_like({z}).fill_(0.1 / {n}).scatter_({c}, {index}, 0.8)",
    "torch.full_like({z}, 0.1 / {n}, dtype=torch.float32).scatter_({c}, {index}, 0.8)",
    "F.one_hot({y}.clamp(min=0), {n}).movedim(-1, {c}).to({z}.dtype)",
    "torch.zeros({z}.shape, dtype={z}.dtype, device={z}.device).scatter_({c}, {index}, torch.ones_like({index}) * 1.0)",
    "torch.empty_like({z}.detach()).fill_(0.5)",
    "{z}.detach().clone().fill_(0.5)",
    "torch.zeros_like({z}).scatter({c}, {index}[:1], 1.0)",
]
EDITS_OF_TARGETS = [
    "{q} = {q} * 0.9 + 0.1 / {n}",
    "{q} = {q} * 0.8 + (1 - {q}) * 0.2 / ({n} - 1)",
    "{q} *= 2",
    "{q}.sub_(0.25)",
    "{q}[0] = 0",
    "{q}.detach().mul_(2)",
    "{q} = {q}.float()",
    "{q}.zero_()",
    "{q}.scatter_({c}, {index} * 0, 0.5)",
    "{q}.masked_fill_({y}.unsqueeze({c}) == -100, 0.0)",
]
OF_TARGETS = [
    "-({q} * {z}).sum({c})",
    "({z} * {q}).mean({c}, keepdim=True)",
    "({z}.softmax({c}) * {q}).sum({c})",
    "-torch.mean(torch.sum({z}.log_softmax({c}) * {q}, dim={c}))",
    "({z}.log_softmax({c}) * -{q}).sum()",
    'F.kl_div({z}.log_softmax({c}), {q}, reduction="sum")',
    'F.kl_div({z}.log_softmax({c}), {q}, reduction="batchmean")',
    "F.kl_div({z}.log_softmax({c}), {q})",
    "F.cross_entropy({z}, {q})",
    'F.cross_entropy({z}, {q}, label_smoothing=0.1, reduction="none")',
    "{q}",
]
PAIRS = [  # {z} and {q} of one shape
    'F.kl_div({z}.log_softmax({c}), {q}.log_softmax({c}), log_target=True, reduction="batchmean")',
    'F.kl_div({z}.log_softmax({c}), {q}.softmax({c}), reduction="none").sum({c})',
    "F.kl_div((0.3 * {z}.softmax({c}) + {q}.softmax({c}) * 0.7).log(), {z}.softmax({c}), log_target=False)",
    "F.kl_div((({z}.softmax({c}) + {q}.softmax({c})) / 2).log(), {q}.log_softmax({c}), log_target=True)",
    *(
        f"F.kl_div({mixture}, {{{of}}}.log_softmax({{c}}), reduction={reduction!r}, log_target=True)"
        for mixture in (
            "torch.logaddexp({z}.log_softmax({c}) + math.log(0.4), {q}.log_softmax({c}) + math.log(0.6))",
            "torch.logsumexp(torch.stack([{q}.log_softmax({c}), {z}.log_softmax({c})]) - math.log(2), 0)",
            "torch.stack([{q}.log_softmax({c}) - math.log(2), {z}.log_softmax({c}) - math.log(2)]).logsumexp(0)",
        )
        for of, reduction in (("z", "sum"), ("q", "none"))
    ),
    "({q}.softmax({c}) * ({q}.log_softmax({c}) - {z}.log_softmax({c}))).sum({c})",
    "({q}.softmax({c}) * ({q}.log_softmax({c}) - (0.3 * {z}.softmax({c}) + {q}.softmax({c}) * 0.7).log())).sum({c})",
    "-({z}.softmax({c}) * (0.3 * {z}.softmax({c}) + {q}.softmax({c}) * 0.7).log()).sum({c})",
    "-({q}.softmax({c}) * {z}.log_softmax({c})).sum({c}).mean()",
    "F.cross_entropy({z}.movedim({c}, 0).flatten(1).t(), {q}.movedim({c}, 0).flatten(1).t().softmax(-1))",
    "F.mse_loss({z}, {q})",
    "({z}.argmax({c}) == {q}.argmax({c})).sum()",
    "({z} * {q}).sum({c})",
    "torch.stack([{z}, {q}]).logsumexp({c} - 1 if {c} < 0 else {c} + 1)",
    "{z}.logsumexp({c}) - {q}.logsumexp({c})",
    "F.cosine_similarity({z}, {q}, dim={c})",
]
MIXTURES = ["{z} + {q}", "1.5 * {z} - 0.5 * {q}", "torch.maximum({z}, {q})", "torch.where({z} > 0, {z}, {q})",
            "torch.stack([{z}, {q}])[0]"]  # fmt: skip

POSTS = [  # of a result {r}; {t} is another
    "{r} = {r} * 2",
    "{r} = -{r}.mean()",
    "{r} = {r}.sum()",
    "{r} = {r}.mean() + 0.1 * {t}.mean()",
    "{r} = {r}.detach()",
    "{r} = {r} / {r}.detach()",
    "{r} = ({r} * ({y} != -100)).sum() / ({y} != -100).sum()",
    "{r} = {r} * s.c[0]",
    "{r} = {r} * s.b[0]",
    "{r} = {r}.exp()",
    "{r} = F.logsigmoid({r} - {t})",
    "{r} = torch.stack([{r}, {t}])",
    "{r} += 1",
    "{r} += {t}",
    "{r}.mul_(0.5)",
    "{r}.masked_fill_({y} == -100, 0.0)",
    "{r}[0] = 0",
    "{r} = {r}.view(-1)",
    "{r} = {r}[..., 1:]",
    "{r} = torch.where({r} > 0, {r}, {t})",
    "s.c[0] = {r}.detach().sum()",
    "s.c.add_({r}.detach().mean())",
    "{y}[0] = {r}.detach().sum().long().clamp(0, 5)",
    "{r} = {r} + s.w.sum()",
]
BLOCKS = ["with torch.no_grad():", "with torch.enable_grad():", "with torch.autocast({device}, dtype=torch.bfloat16):",
          "with torch.no_grad():", "with torch.set_grad_enabled(True):", "if s.x.shape[0] > 1:"]  # fmt: skip
BREAKS = ["torch._dynamo.graph_break()", "torch._dynamo.graph_break()", "if bool(({y} >= -100).all()):\n    pass",
          "{y}.sum().item()", "{z}.register_hook(lambda g: g * 2)", "{z}.retain_grad()"]  # fmt: skip
SHOWN = ["{z}", "{z}", "{z}.detach()", "{z}[0]", "{z}.transpose(0, -1)", "{z}.view(-1)", "{z}[..., -1:]", "{z}[:, -1]",
         "{y}", "s.y", "s.x * 2", "{z}.clone()", "{z}.unsqueeze(0)", "{z}.contiguous()"]  # fmt: skip


class Builder:
    """A program in the making."""

    def __init__(self, pick: Pick) -> None:
        self.pick = pick
        self.lines: list[str] = []
        self.names: dict[str, Any] = {**vars(programs), "s": World.make(), "inf": float("inf")}
        self.values: list[Value] = []
        self.results: list[str] = []
        self.operands: list[str] = []
        self._made = Counter[str]()
        self._blocks = False

    def chance(self, one_in: int) -> bool:
        return self.pick(range(one_in)) == one_in - 1  # shrinks to False

    def fresh(self, stem: str) -> str:
        self._made[stem] += 1
        number = self._made[stem]
        return stem if number == 1 else f"{stem}{number}"

    def emit(self, *lines: str, accept: Callable[[], bool] = lambda: True) -> bool:
        """Add lines if they run in eager, and leave what is acceptable."""
        text = "\n".join(lines)
        if self._blocks and self.chance(5):
            head = self.pick(BLOCKS).format(device="s.x.device.type")
            text = f"{head}\n{textwrap.indent(text, '    ')}"
        before = dict(self.names)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(text, self.names)
            accepted = accept()
        except Exception:
            accepted = False
        if not accepted:
            self.names = before
            return False
        self.lines.append(text)
        return True

    def fill(self, template: str, v: Value, **more: Any) -> str:
        z = self.names[v.name]
        dims, n = z.dim(), z.shape[v.axis]
        c = v.axis - dims if self.chance(2) else v.axis
        k = max(n - 3, 1)
        suffix = "[:" + ", None" * (dims - 1 - v.axis) + "]" if v.axis < dims - 1 else ""
        at = "[..., " if v.axis == dims - 1 and self.chance(2) else "[" + ":, " * v.axis
        fields = {
            "z": v.name, "y": v.labels, "c": c, "n": n, "k": k, "v": suffix, "at": at,
            "index": f"{v.labels}.clamp(min=0).unsqueeze({c})",
            "last": _LAST.format(z=v.name, n=n, k=k, v=suffix),
        }  # fmt: skip
        if "{input}" in template:
            fields["input"], fields["target"] = self.as_a_loss_wants(v)
            fields["d"] = 1 if dims > 1 or "reshape" in fields["input"] else 0
        if "options}" in template:
            fields["options"], fields["nll_options"] = self.options(n)
        return template.format(**{**fields, **more})

    def as_a_loss_wants(self, v: Value) -> tuple[str, str]:
        z, y = v.name, v.labels
        t = self.names[z]
        n, dims = t.shape[v.axis], t.dim()
        if v.axis == dims - 1 and dims != 2:
            forms = [(f"{z}.reshape(-1, {n})", f"{y}.reshape(-1)")] * 2
            if dims > 2:
                forms += [
                    (f"{z}.view(-1, {z}.size(-1))", f"{y}.view(-1)"),
                    (f"{z}.flatten(0, -2)", f"{y}.flatten()"),
                    (f"{z}.movedim(-1, 1)", y),
                ]
            return self.pick(forms if dims > 1 else [*forms, (z, y)])
        return (z, y) if v.axis == min(1, dims - 1) else (f"{z}.movedim({v.axis}, 1)", y)

    def options(self, n: int) -> tuple[str, str]:
        nll = self.pick(["", "", ', reduction="sum"', ', reduction="none"'])
        nll += self.pick(["", "", "", f", weight=s.c[:{n}]"])
        nll += self.pick(["", "", "", ", ignore_index=3", ", ignore_index=0"])
        return nll + self.pick(["", "", "", ", label_smoothing=0.1"]), nll

    def value(self) -> Value:
        return self.pick([self.values[-1], self.values[-1], *self.values])

    def derive(self, v: Value, z: str, y: str | None = None, axis: int | None = None, normalised: bool = False) -> bool:
        """``v`` becomes ``z``, or ``z`` is another value beside it."""
        beside = self.chance(4) or (normalised and not v.normalised)
        name = self.fresh("lp" if normalised and not v.normalised else "z") if beside else v.name
        labels, lines = v.labels, [f"{name} = {z}"]
        if y is not None and y != v.labels:
            shared = beside or any(o is not v and o.labels == v.labels for o in self.values)
            labels = self.fresh("y") if shared else v.labels
            lines.append(f"{labels} = {y}")
        made = replace(v, name=name, labels=labels, axis=v.axis if axis is None else axis, normalised=normalised)
        if not self.emit(*lines, accept=lambda: self.fits(made)):
            return False
        if not beside:
            self.values.remove(v)
        self.values.append(made)
        return True

    def fits(self, v: Value) -> bool:
        z, y = self.names[v.name], self.names[v.labels]
        if not (isinstance(z, torch.Tensor) and z.is_floating_point() and 0 < z.numel() <= _MOST_ELEMENTS):
            return False
        shape = list(z.shape)
        return 0 <= v.axis < len(shape) and shape.pop(v.axis) > 3 and shape == list(y.shape)


# --- steps ----------------------------------------------------------------------------------------------------
# Each adds lines to a program and says whether it did.


def head(b: Builder) -> bool:
    x, rows = b.pick(HIDDEN_STATES) if b.chance(2) else HIDDEN_STATES[0]
    w = b.pick(WEIGHTS) if b.chance(2) else WEIGHTS[0]
    bias = b.pick(BIASES) if w != "s.w" or b.chance(2) else "s.b"
    y, lines = b.fresh("y"), []
    lines.append(f"{y} = {b.pick(LABELS)}")
    if rows != "{y}":
        lines.append(f"{y} = {rows.format(y=y)}")
    if w.startswith("s.w["):
        lines.append(f"{y} = {y}.clamp(max=13)")
    z = b.fresh("z")
    if x == "s.x" and w == "s.w" and b.chance(2):
        form, axis = b.pick(["s.z", "s.zb"]), -1  # which are deferred at run time
    else:
        form, axis = b.pick(HEADS) if b.chance(2) else b.pick(HEADS[:2])
    named = []
    for stem, template in (("h", x), ("w", w), ("b", bias)):
        if f"{{{'x' if stem == 'h' else stem}}}" in form and (template.count(".") > 1 or b.chance(4)):
            name = b.fresh(stem)
            lines.append(f"{name} = {template.format(y=y)}")
            named.append(name)
            x, w, bias = (name if stem == s else t for s, t in (("h", x), ("w", w), ("b", bias)))
    x = x.format(y=y)
    fields = {"x": _closed(x), "w": _closed(w), "b": _closed(bias)}
    lines.append(f"{z} = {form.format(**fields)}")

    def made() -> Value:
        return Value(z, y, b.names[z].dim() + axis)

    if not b.emit(*lines, accept=lambda: b.fits(made())):
        return False
    b.values.append(made())
    b.operands += named
    return True


def _closed(expression: str) -> str:
    return f"({expression})" if any(f" {sign} " in expression for sign in "+*/@-") else expression


def _template(templates: list[str]) -> Callable[[Builder], bool]:
    """A step that replaces a value by what a template makes of it."""

    def step(b: Builder) -> bool:
        v = b.value()
        return b.derive(v, b.fill(b.pick(templates), v), normalised=v.normalised)

    return step


def log_softmax(b: Builder) -> bool:
    v = b.value()
    forms = ["{z}.log_softmax({c})", "F.log_softmax({z}, dim={c})", "torch.log_softmax({z}, {c})"]
    return not v.normalised and b.derive(v, b.fill(b.pick(forms), v), normalised=True)


def mask(b: Builder) -> bool:
    v = b.value()
    k = max(b.names[v.name].shape[v.axis] - 3, 1)
    # Sometimes labels name what is masked: their loss is infinite.
    labels = None if b.chance(6) else f"{v.labels}.clamp(max={k - 1})"
    return b.derive(v, b.fill(b.pick(MASKS), v), labels, normalised=v.normalised)


def class_slice(b: Builder) -> bool:
    v = b.value()
    form = b.pick(SLICES)
    n = b.names[v.name].shape[v.axis]
    fewest = min(n - 3, (n + 1) // 2)
    labels = v.labels if form.startswith("torch.cat") else f"{v.labels}.clamp(max={fewest - 1})"
    return b.derive(v, b.fill(form, v), labels, normalised=v.normalised)


def rows(b: Builder) -> bool:
    v = b.value()
    return b.derive(v, *b.pick(_row_operations(b, v, odd=False)), normalised=v.normalised)


def odd_rows(b: Builder) -> bool:
    v = b.value()
    found = _row_operations(b, v, odd=True)  # none of a single row
    return bool(found) and b.derive(v, *b.pick(found), normalised=v.normalised)


def _row_operations(b: Builder, v: Value, odd: bool) -> list[tuple[str, str, int]]:
    """What can be done to the rows: the value, its labels, and its class axis then."""
    z, y, c = v.name, v.labels, v.axis
    shape = b.names[z].shape
    dims, n = len(shape), shape[c]
    axes = [axis for axis in range(dims) if axis != c]
    found = [
        (f"{z}[None]", f"{y}[None]", c + 1),
        (f"{z}.unsqueeze({c})", f"{y}.unsqueeze({c})", c + 1),
        (f"{z}.unsqueeze(-1)", f"{y}.unsqueeze(-1)", c),
    ]
    if c == dims - 1 and dims > 1:
        last = [
            (f"{z}.reshape(-1, {n})", f"{y}.reshape(-1)", 1),
            (f"{z}.view(-1, {z}.shape[-1])", f"{y}.view(-1)", 1),
            (f"{z}.flatten(0, -2)", f"{y}.flatten()", 1),
            (f"torch.flatten({z}, end_dim=-2)", f"{y}.flatten()", 1),
            (f"{z}.transpose(-1, 0)", f"{y}.movedim(0, -1)" if dims > 2 else y, 0),
            (f"{z}.mT", y, c - 1),
        ]
        where = [
            (f"{z}[{y} != -100]", f"{y}[{y} != -100]", 1),
            (f"{z}[{y} > 3]", f"{y}[{y} > 3]", 1),
            (f"{z}.view(-1, {n})[({y}.view(-1) >= 0).nonzero().squeeze(1)]", f"{y}.view(-1)[{y}.view(-1) >= 0]", 1),
            (f"torch.cat({z}.unbind(0))", f"torch.cat({y}.unbind(0))", c - 1),
            (f"{z}.repeat(2, *[1] * {dims - 1})", f"{y}.repeat(2, *[1] * {dims - 2})", c),
        ]
        found += where if odd else last * 2
    if odd:
        found = found[3:]
    for a in axes:
        e, size = a - (a > c), shape[a]
        zi, yi = f"{z}[{':, ' * a}", f"{y}[{':, ' * e}"
        left = c - (a < c)
        if odd:
            half = max(size // 2, 1)
            found += [
                (f"{zi}[0, -1, 0]]", f"{yi}[0, -1, 0]]", c),
                (f"{zi}s.y[0] % {size}]", f"{yi}s.y[0] % {size}]", c),
                (f"{zi}s.y[0, 0] % {size}]", f"{yi}s.y[0, 0] % {size}]", left),
                (f"{zi}s.y % {size}]", f"{yi}s.y % {size}]", c + (a < c)),
                (f"{z}.split({half}, {a})[0]", f"{y}.split({half}, {e})[0]", c),
                (f"torch.split({z}, {half}, dim={a})[-1]", f"torch.split({y}, {half}, dim={e})[-1]", c),
                (f"{z}.chunk(2, {a})[-1]", f"{y}.chunk(2, {e})[-1]", c),
                (f"{z}.unbind({a})[0]", f"{y}.unbind({e})[0]", left),
                (f"torch.unbind({z}, {a})[-1]", f"torch.unbind({y}, {e})[-1]", left),
                (f"{z}.tensor_split(2, {a})[0]", f"{y}.tensor_split(2, {e})[0]", c),
                (f"torch.cat([{zi}1:], {zi}:1]], {a})", f"torch.cat([{yi}1:], {yi}:1]], {e})", c),
                (f"torch.cat([{z}, {z} / 2], {a})", f"torch.cat([{y}, {y}], {e})", c),
                (f"torch.cat({z}.split({half}, {a}), {a})", y, c),
                (f"torch.stack({z}.unbind({a}), {a})", y, c),
                (f"torch.stack([{zi}0], {zi}-1]])", f"torch.stack([{yi}0], {yi}-1]])", left + 1),
                (f"{z}.index_select({a}, {y}.new_tensor([0]))", f"{y}.index_select({e}, {y}.new_tensor([0]))", c),
                (f"{z}.gather({a}, ({y}.clamp(min=0) % {size}).unsqueeze({c}).expand_as({z}))",
                 f"{y}.gather({e}, {y}.clamp(min=0) % {size})", c),
                (f"{z}.take_along_dim(({y} % {size} - {size}).unsqueeze({c}), {a})",
                 f"{y}.gather({e}, {y} % {size})", c),
                (f"{z}.flip({a})", f"{y}.flip({e})", c),
                (f"{z}.roll(1, {a})", f"{y}.roll(1, {e})", c),
                (f"{z}.repeat_interleave(2, {a})", f"{y}.repeat_interleave(2, {e})", c),
                (f"{z}.select({a}, {y}.new_tensor(0))", f"{y}.select({e}, 0)", left),
                (f"{z}.unsqueeze({a}).expand({', '.join(['-1'] * a + ['2'] + ['-1'] * (dims - a))})",
                 f"{y}.unsqueeze({e}).expand({', '.join(['-1'] * e + ['2'] + ['-1'] * (dims - 1 - e))})",
                 c + (a <= c)),
                (f"{z}.unflatten({a}, (1, -1))", f"{y}.unflatten({e}, (1, -1))", c + (a < c)),
                (f"torch.hstack([{z}, {z}])", f"torch.hstack([{y}, {y}])", c),
            ]  # fmt: skip
            continue
        found += [
            (f"{zi}:-1]", f"{yi}1:]", c),
            (f"{zi}:-1].contiguous()", f"{yi}1:].contiguous()", c),
            (f"{zi}1:]", f"{yi}1:]", c),
            (f"{zi}-2:]", f"{yi}-2:]", c),
            (f"{zi}::2]", f"{yi}::2]", c),
            (f"{zi}:{size}]", y, c),
            (f"{zi}-1]", f"{yi}-1]", left),
            (f"{zi}0]", f"{yi}0]", left),
            (f"{z}.select({a}, 0)", f"{y}.select({e}, 0)", left),
            (f"{z}.narrow({a}, 0, {max(size - 1, 1)})", f"{y}.narrow({e}, 0, {max(size - 1, 1)})", c),
            (f"torch.narrow({z}, {a}, {size - 1}, 1)", f"torch.narrow({y}, {e}, {size - 1}, 1)", c),
        ]
        if size == 1:
            found += [(f"{z}.squeeze({a})", f"{y}.squeeze({e})", left)] * 3
        if a == dims - 2 and c == dims - 1:
            found += [(f"{z}[..., :-1, :]", f"{y}[..., 1:]", c)] * 2
            found += [(f"{z}[..., :-1, :].contiguous().view(-1, {n})", f"{y}[..., 1:].contiguous().view(-1)", 1)] * 2
        # The class axis and another change places.
        low, high = min(a, c), max(a, c)
        found.append((f"{z}.transpose({a}, {c})", f"{y}.movedim({e}, {c - (c > a)})" if high - low > 1 else y, a))
        for other in axes:
            if other > a:
                found.append((f"{z}.transpose({a}, {other})", f"{y}.transpose({e}, {other - (other > c)})", c))
    if dims > 1 and not odd:
        found.append((f"{z}.movedim({c}, -1)", y, dims - 1))
        order = [*axes[::-1], c]
        flipped = ", ".join(str(dims - 2 - i) for i in range(dims - 1))
        found.append((f"{z}.permute({', '.join(map(str, order))})", f"{y}.permute({flipped})", dims - 1))
        found.append((f"torch.movedim({z}, {c}, 0)", y, 0))
    return found


def _write(templates: list[str]) -> Callable[[Builder], bool]:
    def step(b: Builder) -> bool:
        template = b.pick(templates)
        operand = b.pick(b.operands) if b.operands else "s.c"
        return b.emit(b.fill(template, b.value(), o=operand))

    return step


def _result(b: Builder, expression: str) -> bool:
    name = b.fresh("r")
    done = b.emit(f"{name} = {expression}", accept=lambda: b.names[name].numel() > 0)
    if done:
        b.results.append(name)
    return done


def loss(b: Builder) -> bool:
    v = b.value()
    if v.normalised:
        return _result(b, b.fill(b.pick(OF_LOG_PROBS), v))
    return _result(b, b.fill(b.pick([LOSSES[0], LOSSES[0], *LOSSES]), v))


def reader(b: Builder) -> bool:
    v = b.value()
    return _result(b, b.fill(b.pick(OF_LOG_PROBS if v.normalised else READERS), v))


def odd_reader(b: Builder) -> bool:
    v = b.value()
    return _result(b, b.fill(b.pick(ODD_OF_LOG_PROBS if v.normalised else ODD_READERS), v))


def pair(b: Builder) -> bool:
    v = b.value()
    shape = b.names[v.name].shape
    others = [o for o in b.values if o is not v and b.names[o.name].shape == shape and o.axis == v.axis]
    if not others:
        return head(b)
    q = b.pick(others).name
    if b.chance(4):
        return b.derive(v, b.fill(b.pick(MIXTURES), v, q=q), normalised=v.normalised)
    return _result(b, b.fill(b.pick(PAIRS), v, q=q))


def targets(b: Builder) -> bool:
    v, q = b.value(), b.fresh("q")
    if not b.emit(f"{q} = {b.fill(b.pick(TARGETS), v)}"):
        return False
    for _ in range(b.pick((0, 0, 1, 2))):
        if b.chance(3):  # eager's backward wants what is written to next
            read = b.fresh("r")
            if b.emit(f"with torch.no_grad():\n    {read} = {b.fill(b.pick(OF_TARGETS), v, q=q)}"):
                b.results.append(read)
        b.emit(b.fill(b.pick(EDITS_OF_TARGETS), v, q=q))
    return _result(b, b.fill(b.pick(OF_TARGETS), v, q=q))


def post(b: Builder) -> bool:
    if not b.results:
        return False
    r, t = b.pick(b.results[::-1]), b.pick(b.results)
    return b.emit(b.fill(b.pick(POSTS), b.value(), r=r, t=t), accept=lambda: b.names[r].numel() > 0)


def graph_break(b: Builder) -> bool:
    return b.emit(b.fill(b.pick(BREAKS), b.value()))


def shown(b: Builder) -> bool:
    """Logits, or something else that is no result, are returned as they are at the end."""
    v = b.value()
    return _result(b, b.fill(b.pick(SHOWN), v))


PLAIN: list[Callable[[Builder], bool]] = [loss, reader, rows, _template(TRANSFORMS), log_softmax, post]
ODD: list[Callable[[Builder], bool]] = [
    odd_reader,
    odd_rows,
    _template(ODD_TRANSFORMS),
    class_slice,
    mask,
    _write(WRITES_TO_LOGITS),
    _write(WRITES_TO_LABELS),
    _write(WRITES_TO_OPERANDS),
    pair,
    targets,
    shown,
    graph_break,
    head,
]


def generate(pick: Pick) -> Program:
    """A program, drawn with ``pick``, which returns one of a sequence."""
    b = Builder(pick)
    b.lines.append("inf = float('inf')")
    steps = PLAIN * 2
    for _ in range(pick((0, 1, 1, 2, 3))):
        steps = [*steps, *[pick(ODD)] * 4]
    b._blocks = b.chance(8)
    while not head(b):
        pass
    for _ in range(pick(range(1, 9))):
        pick(steps)(b)
    while not b.results:
        loss(b) or reader(b)
    if b.chance(5):
        shown(b)
    returned = list(dict.fromkeys(b.results))
    if not any("inf" in line for line in b.lines[1:]):
        b.lines.pop(0)
    return Program((*b.lines, f"return {returned[0]}" if len(returned) == 1 else f"return {', '.join(returned)}"))
