"""Attention whose mask a graph makes of positions alone: what is proved of masks, and what becomes of the attention."""

from __future__ import annotations

import operator
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, AutoModelForCausalLM

from fxfuse import attention
from fxfuse.attention import Held, Where
from fxfuse.report.records import Report, journal
from fxfuse.report.text import table

# --- what is proved ---------------------------------------------------------------------------------------------


def entries(held: Held, shape: torch.Size) -> Tensor:
    """What is claimed of a tensor of this shape, entry by entry."""
    if isinstance(held, Where):
        allowed = [entries(limit, shape) <= 0 for limit in held.limits]
        return torch.stack([torch.ones(shape, dtype=torch.bool), *allowed]).all(0).long()
    found = torch.full(shape, held.const)
    for axis, slope in held.slopes:
        line = slope * torch.arange(shape[axis])
        found = found + line.view(-1, *[1] * (-axis - 1))
    return found


UNARY: list[tuple[Any, Callable[[random.Random], tuple[Any, ...]]]] = [
    ("unsqueeze", lambda r: (r.randint(-3, 2),)),
    ("view", lambda r: (r.choice(((-1, 1), (1, -1), (1, 1, 4, 4), (4, 1, -1), (-1,), (2, -1))),)),
    ("view", lambda r: (r.choice((torch.float64, torch.uint8, torch.int64)),)),
    ("squeeze", lambda r: r.choice(((), (0,), (-1,)))),
    ("flatten", lambda r: ()),
    ("diff", lambda r: (r.choice((1, 1, 1, 2)), r.randint(-2, 1))),
    ("cumsum", lambda r: (r.randint(-2, 1),)),
    ("tril", lambda r: (r.randint(-2, 2),)),
    ("triu", lambda r: (r.randint(-2, 2),)),
    ("to", lambda r: (r.choice((torch.bool, torch.int64, torch.int32, torch.float32, torch.uint8)),)),
    (operator.invert, lambda r: ()),
    ("logical_not", lambda r: ()),
    ("expand", lambda r: (r.choice((2, 3)), *r.choice(((-1,), (-1, -1), (3, -1))))),
    (operator.getitem, lambda r: ((r.choice((slice(None), None, ..., slice(1, None), slice(None, 1), 0)),) * 1,)),
    (operator.getitem, lambda r: (r.choice(((..., None), (None, ..., None), (slice(None), None), (slice(None, 2),))),)),
    (
        operator.getitem,
        lambda r: (
            r.choice(
                ((slice(None, 1), ...), (..., slice(None, None, 2)), (..., slice(0, 2))),
            ),
        ),
    ),
    ("mT", lambda r: ()),
    ("flip", lambda r: (-1,)),
    ("neg", lambda r: ()),
]
BINARY = (
    *(operator.add, operator.sub, operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne),
    *(operator.and_, torch.logical_and, operator.mul, operator.or_, torch.lt, "sub", "ge"),
)


def grow(graph: Graph, r: random.Random, made: list[Node]) -> None:
    """Add one node to ``graph``, of ``made``, with the value that it has."""
    kind, one = r.random(), r.choice(made[-6:])
    if kind < 0.45:
        target, arguments = r.choice(UNARY)
        args: tuple[Any, ...] = (one, *arguments(r))
    elif kind < 0.85:
        target, args = (
            r.choice(BINARY),
            (one, r.choice([r.choice(made), r.randint(-2, 3), r.choice((0, 1, 2**63, -(2**63) - 1))])),
        )
        if r.random() < 0.2 and not isinstance(target, str):
            args = args[::-1]
    elif kind < 0.93:
        target, args = operator.getitem, (one, tuple(r.choices(made, k=max(one.meta["example_value"].dim(), 1))))
    else:
        target, args = torch.diff, (one,)
    kwargs: dict[str, Any] = {"prepend": r.choice(made), "dim": -1} if target is torch.diff else {}
    values: Any = tree_map_only(Node, lambda node: node.meta["example_value"], (args, kwargs))
    try:
        if target == "mT":
            target, args, value = "transpose", (one, -1, -2), values[0][0].transpose(-1, -2)
        elif isinstance(target, str):
            value = getattr(values[0][0], target)(*values[0][1:])
        else:
            value = target(*values[0], **values[1])
    except (RuntimeError, IndexError, TypeError, OverflowError):  # not of these
        return
    if not isinstance(value, Tensor) or value.numel() > 10_000:
        return
    node = graph.call_method(target, args) if isinstance(target, str) else graph.call_function(target, args, kwargs)
    node.meta["example_value"] = value
    made.append(node)


def test_what_is_claimed_of_tensors_of_positions() -> None:
    claimed = lines = seen = 0
    for seed in range(400):
        r, graph = random.Random(seed), Graph()
        made: list[Node] = []
        for size in (r.choice((1, 3, 4)), 4, 3):
            made.append(graph.call_function(torch.arange, (size,)))
            made[-1].meta["example_value"] = torch.arange(size)
        for shape, dtype in (((4, 4), torch.bool), ((), torch.int64)):
            made.append(graph.call_function(torch.ones, (shape,), {"dtype": dtype}))
            made[-1].meta["example_value"] = torch.ones(shape, dtype=dtype)
        for _ in range(30):
            grow(graph, r, made)
        graph.output(made[-1])
        masks = attention._Masks(GraphModule({}, graph), {}, {})
        for node in made:
            held, value = masks.of(node), node.meta["example_value"]
            seen += 1
            if held is not None:
                claimed += 1
                lines += isinstance(held, Where) and any(limit.slopes for limit in held.limits)
                assert torch.equal(value.double(), entries(held, value.shape).double()), f"{seed}: {node} of\n{graph}"
    assert claimed > seen / 3
    assert lines > 150


# --- what becomes of attention ----------------------------------------------------------------------------------

BATCH, HEADS, LENGTH, SIZE = 2, 3, 6, 4
Mask = Callable[[Tensor], Tensor]


def rows(q: Tensor) -> Tensor:
    return torch.arange(q.shape[-2], device=q.device)


def as_transformers(q: Tensor) -> Tensor:
    """As ``create_causal_mask`` of transformers 5 has it where it is compiled, with what finds packed sequences."""
    batch, length = q.shape[0], q.shape[-2]
    position = (torch.arange(length, device=q.device) + 0).unsqueeze(0)
    wide = position.expand(batch, -1)
    packed = (torch.diff(wide, prepend=wide[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    index = torch.arange(batch, device=q.device)[:, None, None, None]
    query, key = rows(q)[None, None, :, None], rows(q)[None, None, None, :]
    allowed = query.new_ones((), dtype=torch.bool) & (packed[index, query] == packed[index, key]).to(q.device)
    return (allowed & (wide[index, key] <= wide[index, query])).expand(batch, -1, length, length)


CAUSAL: dict[str, Mask] = {
    "transformers": as_transformers,
    "tril of ones": lambda q: torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril(),
    "tril of numbers": lambda q: torch.tril(torch.ones(q.shape[-2], q.shape[-2])).bool(),
    "tril of numbers, compared": lambda q: torch.tril(torch.ones(q.shape[-2], q.shape[-2])) == 1,
    "not above the diagonal": lambda q: ~torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1),
    "compared": lambda q: rows(q)[:, None] >= rows(q),
    "compared the other way": lambda q: ~(rows(q)[None, None, :, None] < rows(q)[None, None, None, :]),
    "differences": lambda q: rows(q)[None] - rows(q)[:, None] <= 0,
    "in columns and rows": lambda q: (rows(q).view(-1, 1) >= rows(q).reshape(1, -1)).view(1, 1, *2 * q.shape[-2:-1]),
    "full, and zeros": lambda q: (
        torch.full(2 * q.shape[-2:-1], True).tril() & ~torch.zeros(q.shape[-2:-1], dtype=torch.bool)
    ),
    "behind": lambda q: (rows(q) < rows(q).unsqueeze(-1) + 1)[None, None].contiguous(),
}
WINDOWS: dict[str, Mask] = {  # whose sizes have to be known
    "a window that all fit into": lambda q: (rows(q)[:, None] >= rows(q)) & (rows(q) > rows(q)[:, None] - LENGTH),
}
HIDES_NOTHING: dict[str, Mask] = {
    "ones": lambda q: torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool),
    "no number is below 0": lambda q: (rows(q) >= 0).expand(q.shape[0], 1, q.shape[-2], -1),
}


def written(q: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    mask[0, 1] = True
    return mask


def written_before(q: Tensor) -> Tensor:
    positions = rows(q)
    view = positions[None]
    positions += 1
    return (rows(q)[:, None] >= view) & torch.ones(q.shape[-2], 1, dtype=torch.bool)


KEPT: dict[str, Mask] = {
    "off by one": lambda q: torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril(1),
    "strict": lambda q: (rows(q)[:, None] > rows(q)).index_fill(-1, torch.tensor(0), True),
    "the other triangle": lambda q: rows(q)[:, None] <= rows(q),
    "a window": lambda q: (rows(q)[:, None] >= rows(q)) & (rows(q) > rows(q)[:, None] - LENGTH + 1),
    "of values": lambda q: (rows(q)[:, None] >= rows(q)) & (q.detach()[..., :1] < 9),
    "numbers that are added": lambda q: torch.zeros(q.shape[-2], q.shape[-2], dtype=q.dtype).masked_fill(
        rows(q)[:, None] < rows(q), float("-inf")
    ),
    "written to": written,
    "of what was written to": written_before,
    "every second position": lambda q: 2 * rows(q)[:, None] >= rows(q),
    "from the end": lambda q: rows(q)[-rows(q) - 1] >= rows(q)[-rows(q) - 1][:, None],
    "wraps around": lambda q: (rows(q)[:, None] >= rows(q)) & (rows(q) + (2**63 - 3) > 0),
    "compared with a number that wraps around": lambda q: (rows(q)[:, None] >= rows(q)) & (rows(q) <= 2**63),
    "unequal to a number that wraps around": lambda q: (
        (rows(q)[:, None] >= rows(q)) & (torch.full(q.shape[-2:-1], -1) != 2**64 - 1)
    ),
    "added": lambda q: torch.ones(q.shape[-2], q.shape[-2], dtype=q.dtype).tril(),
    "random": lambda q: torch.rand(q.shape[-2], q.shape[-2]).add(1).bool().tril(),
}


def operands(length: int = LENGTH, keys: int | None = None) -> list[Tensor]:
    g = torch.Generator().manual_seed(length)
    sizes = length, keys or length, keys or length
    shapes = [(BATCH, HEADS, size, SIZE) for size in sizes]
    return [torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]


def attended(mask: Mask, **options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask(q), **options)


def with_gradients(program: Callable[..., Tensor], args: list[Tensor]) -> list[Tensor]:
    out = program(*args)
    return [out, *torch.autograd.grad(out.square().sum(), args)]


def count(program: Callable[..., Tensor], args: list[Tensor], **compile: Any) -> int:
    """How many attentions lost their masks in the graphs that ``program`` became; its values are eager's."""
    torch._dynamo.reset()
    before = len(journal.report().graphs)
    expected = with_gradients(program, args)
    found = with_gradients(compiled(program, **compile), args)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    return sum(len(graph.unmasked) for graph in journal.report().graphs[before:])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", [*CAUSAL, *HIDES_NOTHING])
def test_a_mask_is_left_out(name: str, dynamic: bool) -> None:
    mask = (CAUSAL | HIDES_NOTHING)[name]
    assert count(attended(mask), operands(), dynamic=dynamic) == 1
    # A number of the program is a variable of a dynamic graph: there may be dropout in another call.
    with_options = attended(mask, scale=0.3, dropout_p=0.0, is_causal=False)
    assert count(with_options, operands(9), dynamic=dynamic) == (0 if dynamic else 1)


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_that_is_not_reached(name: str) -> None:
    assert count(attended(WINDOWS[name]), operands(), dynamic=False) == 1
    assert count(attended(WINDOWS[name]), operands(), dynamic=True) == 0
    assert count(attended(WINDOWS[name]), operands(LENGTH + 1), dynamic=False) == 0


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", KEPT)
def test_a_mask_is_kept(name: str, dynamic: bool) -> None:
    assert count(attended(KEPT[name]), operands(), dynamic=dynamic) == 0


def test_lengths_that_differ_keep_their_mask() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.arange(q.shape[-2])[:, None] >= torch.arange(k.shape[-2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    assert count(program, operands(5, keys=7)) == 0
    assert count(program, operands(7, keys=5)) == 0
    assert count(program, operands(7, keys=7)) == 1


def test_an_index_that_is_out_of_range() -> None:
    program = attended(lambda q: rows(q)[:, None] >= rows(q)[None][rows(q) - rows(q), rows(q) + 1] - 1)
    for run in (program, compiled(program)):
        with pytest.raises(IndexError, match="out of bounds"):
            run(*operands())


def test_a_mask_that_is_made_of_many() -> None:
    """More than Python's stack has place for: these are not looked into, which is not a failure."""

    def mask(q: Tensor) -> Tensor:
        mask = CAUSAL["compared"](q)
        for _ in range(sys.getrecursionlimit() // 2):
            mask = mask & CAUSAL["compared"](q)
        return mask

    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*could not analyse")
        assert count(attended(mask), operands()) == 0


def test_transforms_keep_their_masks() -> None:
    """Within one, a tensor has fewer axes than its values have."""

    def made_outside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = CAUSAL["compared"](q)
        return torch.func.vmap(attended(lambda _: mask))(q, k, v)

    assert count(torch.func.vmap(attended(CAUSAL["compared"])), operands()) == 0
    assert count(made_outside, operands()) == 0


@pytest.mark.parametrize("of", ["operands", "mask"])
def test_subclasses_keep_their_masks(of: str) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, like: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, torch.ones_like(like, dtype=torch.bool).tril())

    torch._dynamo.reset()
    before = len(journal.report().graphs)
    args = operands()
    like = torch.ones(LENGTH, LENGTH)
    expected = program(*args, like)
    if of == "mask":
        like = TwoTensor(like, like.clone())
    else:
        args = [TwoTensor(one, one.clone()) for one in args]
    found = compiled(program)(*args, like)
    assert isinstance(found, TwoTensor)
    torch.testing.assert_close(found.a, expected, rtol=1e-12, atol=1e-12)
    (graph,) = journal.report().graphs[before:]
    assert graph.unmasked == ()


def test_what_is_not_known_of_one_mask_leaves_others() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        known = attended(CAUSAL["compared"])(q, k, v)
        single = torch.ones((), dtype=torch.int64).cumsum(0) > 0
        return known + attended(lambda q: CAUSAL["compared"](q) & single)(q, k, v)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*could not analyse")
        assert count(program, operands()) == 1


def test_dropout_keeps_its_mask() -> None:
    torch._dynamo.reset()
    before = len(journal.report().graphs)
    compiled(attended(CAUSAL["compared"], dropout_p=0.5))(*operands())
    (graph,) = journal.report().graphs[before:]
    assert graph.unmasked == ()


def test_the_option() -> None:
    assert count(attended(CAUSAL["compared"]), operands(), causal_attention=False) == 0


def test_a_mask_that_something_else_reads() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = CAUSAL["compared"](q)
        return F.scaled_dot_product_attention(q, k, v, mask) + mask.sum(-1)[:, None]

    assert count(program, operands()) == 1


def test_a_part_that_is_checkpointed() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = CAUSAL["transformers"](q)
        for _ in range(2):
            q = torch.utils.checkpoint.checkpoint(
                lambda q, mask: F.scaled_dot_product_attention(q.sin(), k, v, mask), q, mask, use_reentrant=False
            )
        return q

    assert count(program, operands()) == 2


def test_a_part_that_is_called_with_two_masks() -> None:
    found = []

    def backend(gm: GraphModule, _: Any) -> Any:
        first, second = (node for node in gm.graph.nodes if node.op == "get_attr")
        second.target = first.target
        found.append(attention.leave_masks_out(gm))
        return gm

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for mask in (CAUSAL["compared"](q), KEPT["off by one"](q)):
            q = torch.utils.checkpoint.checkpoint(
                lambda q, mask: F.scaled_dot_product_attention(q, k, v, mask), q, mask, use_reentrant=False
            )
        return q

    torch._dynamo.reset()
    args = operands()
    torch.testing.assert_close(torch.compile(program, backend=backend)(*args), program(*args), rtol=1e-12, atol=1e-12)
    assert found == [()]


def test_a_part_that_writes_to_its_mask() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = CAUSAL["compared"](q)

        def part(q: Tensor, mask: Tensor) -> Tensor:
            mask.logical_or_(mask.mT.clone())
            return F.scaled_dot_product_attention(q, k, v, mask)

        first = F.scaled_dot_product_attention(q, k, v, mask)
        return first + torch.utils.checkpoint.checkpoint(part, q, mask, use_reentrant=False, preserve_rng_state=False)

    args = operands()
    expected = program(*args)
    torch.testing.assert_close(compiled(program)(*args), expected, rtol=1e-12, atol=1e-12)


def test_what_writes_beside_a_mask_is_not_erased() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        made = torch.add(kept, 1, out=kept)
        return F.scaled_dot_product_attention(q, k, v, torch.ones_like(made, dtype=torch.bool).tril())

    torch._dynamo.reset()
    kept = torch.zeros(LENGTH, LENGTH)
    before = len(journal.report().graphs)
    compiled(program)(*operands(), kept)
    assert kept.sum() == LENGTH**2
    assert sum(len(graph.unmasked) for graph in journal.report().graphs[before:]) == 1


def test_what_made_a_mask_is_erased() -> None:
    graphs: list[GraphModule] = []

    def inner(gm: GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    torch._dynamo.register_backend(inner, name="seen_without_masks")
    compiled(attended(as_transformers), inner="seen_without_masks")(*operands())
    (gm,) = graphs
    assert [node.name for node in gm.graph.nodes if node.op.startswith("call")] == ["scaled_dot_product_attention"]


@pytest.mark.parametrize(
    "shape", [(3, 1), (1, 1, 1), (1, 2)], ids=["more batches", "an axis more", "as many heads, of other ones"]
)
def test_a_mask_that_does_not_fit(shape: tuple[int, ...]) -> None:
    """Eager does not take it, or has other kernels for it."""
    program = attended(lambda q: CAUSAL["compared"](q).expand(*shape, -1, -1))
    args = [torch.randn(1, HEADS, LENGTH, SIZE) for _ in range(3)]
    for run in (program, compiled(program)):
        with pytest.raises(Exception, match=r"shape|size|broadcast"):
            run(*args)


def test_a_mask_of_three_axes() -> None:
    """For which eager has no fused kernel on a CPU, and so more derivatives."""
    mask = attended(lambda q: CAUSAL["compared"](q)[None])
    assert count(mask, operands()) == 0
    assert count(mask, [one[0].detach().requires_grad_() for one in operands()]) == 1


def test_values_of_another_length() -> None:
    program, (q, k, v) = attended(CAUSAL["compared"]), operands()
    for run in (program, compiled(program)):
        with pytest.raises(Exception, match=r"shape|size"):
            run(q, k, v[..., 1:, :])


def test_a_failure_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Held:
        raise ZeroDivisionError("made up")

    monkeypatch.setitem(attention._MAKERS, torch.arange, fails)
    with pytest.warns(UserWarning, match="could not analyse this graph .*made up"):
        assert count(attended(CAUSAL["compared"]), operands()) == 0


# --- whole models -----------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 16, "num_key_value_heads": 1, "use_cache": False, "max_position_embeddings": 32},
}
GPT2: dict[str, Any] = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "use_cache": False}
GPT2 |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(
    ("kind", "sizes", "checkpointed"),
    [
        ("llama", SMALL, False),
        ("llama", SMALL, True),
        ("qwen2", SMALL, False),
        ("mistral", SMALL | {"sliding_window": 32}, False),
        ("gpt2", GPT2, False),
    ],
)
def test_language_models(kind: str, sizes: dict[str, Any], checkpointed: bool, padded: bool) -> None:
    """Each layer's attention, unless the program says what is padded."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float32).train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    if padded:
        batch["attention_mask"] = (torch.arange(16) < torch.tensor([[16], [11]])).long()

    def step() -> list[Tensor]:
        loss = model(**batch).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    expected = step()
    before = len(journal.report().graphs)
    model.compile(backend="fxfuse", options={"fxfuse.inner": "aot_eager", "fxfuse.min_logits_bytes": 0})
    torch.testing.assert_close(step(), expected, rtol=1e-4, atol=1e-5)
    graphs = journal.report().graphs[before:]
    assert sum(len(graph.unmasked) for graph in graphs) == (0 if padded else 2)
    said = "is_causal in place of a causal mask, or of one that hides nothing: 2 attentions"
    assert (said in " ".join(table(Report(tuple(graphs))).split())) is not padded
