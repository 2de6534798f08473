"""A `shard_map` function inside a plan that splits the axes of its specs: each transform enters it along its axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import LayoutError, OutSpecError, TypingError, UnboundAxisError
from functional_parallel.ir import info
from functional_parallel.tracing import recorder
from sharding_specs import Mesh, P, SpecError

from ..processes import run_on_processes

MESH = Mesh(data=2, tensor=2, ctx=2)
Params = dict[str, Tensor]
Loss = Callable[..., Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys and values go around the ranks of `ctx`; each rank holds its part of the queries."""
    ranks = fp.axis_size("ctx")
    total, weight = torch.zeros_like(q), torch.zeros_like(q[..., :1])
    largest = torch.full_like(weight, -torch.inf)
    for turn in range(ranks):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        higher = torch.maximum(largest, scores.amax(-1, keepdim=True)).detach()
        scale, shares = (largest - higher).exp(), (scores - higher).exp()
        total, weight, largest = total * scale + shares @ v, weight * scale + shares.sum(-1, keepdim=True), higher
        if turn < ranks - 1:
            k, v = (fp.ppermute(x, "ctx", [(i, (i + 1) % ranks) for i in range(ranks)]) for x in (k, v))
    return total / weight


def ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Parts of the sequence become parts of the heads, and back."""
    q, k, v = (fp.all_to_all(x, "ctx", split_dim=1, concat_dim=2) for x in (q, k, v))
    return fp.all_to_all(attention(q, k, v), "ctx", split_dim=2, concat_dim=1)


def norm(gain: Tensor, x: Tensor) -> Tensor:
    return gain * x / x.square().mean((1, 2), keepdim=True).sqrt()


def norm_of_parts(gain: Tensor, x: Tensor) -> Tensor:
    """A parameter that all ranks hold whole meets parts: its gradient is summed over the ranks."""
    return gain * x / fp.pmean(x.square().mean((1, 2), keepdim=True), "ctx").sqrt()


def model(attend: Callable[..., Tensor], scale: Callable[..., Tensor]) -> Loss:
    def loss(params: dict[str, Params], x: Tensor, y: Tensor) -> Tensor:
        for layer in params.values():
            h = scale(layer["gain"], x)
            q, k, v = ((h @ layer[name]).unflatten(-1, (4, 2)).transpose(1, 2) for name in "qkv")
            x = x + attend(q, k, v).transpose(1, 2).flatten(-2) @ layer["o"]
        return ((x - y) ** 2).mean()

    return loss


def in_regions(attend: Callable[..., Tensor], heads: str | None = None) -> Loss:
    """The heads are split in the specs, or by partitioning the body."""
    parts = P(None, heads, "ctx")
    body = fp.shard_map(attend, MESH, (parts, parts, parts), parts)
    return model(body, fp.shard_map(norm_of_parts, MESH, (P(), P(None, "ctx")), P(None, "ctx")))


PLAIN = model(attention, norm)
REGIONS = {"ring": in_regions(ring), "named heads": in_regions(ring, "tensor"), "ulysses": in_regions(ulysses)}

ROWS = P(None, "ctx")
CTX = fp.data_parallel("ctx", batch=ROWS)
TENSOR = fp.tensor_parallel("tensor", {**{f"*/{w}": P(None, "tensor") for w in "qkv"}, "*/o": P("tensor")})
PLANS = {
    "ctx": CTX,
    "zero 3 beside": fp.chain(CTX, fp.zero(3, "data")),
    "zero 3": fp.zero(3, "ctx", batch=ROWS),
    "zero 1": fp.zero(1, "ctx", batch=ROWS),
    "tensor": fp.chain(TENSOR, CTX, fp.zero(3, "data")),
    "tensor, zero 3": fp.chain(TENSOR, fp.zero(3, "ctx", batch=ROWS)),
    "data inside": fp.chain(fp.data_parallel("data"), CTX),
    "tensor alone": TENSOR,
    "accumulated": fp.chain(CTX, fp.zero(2, "data"), fp.accumulate(2)),
    "again": fp.chain(fp.remat("layers"), CTX, fp.zero(3, "data")),
    "pipeline": fp.chain(CTX, fp.data_parallel("data"), fp.pipeline("tensor", microbatches=2)),
}


def drawn(layers: int = 2) -> tuple[dict[str, Params], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    shapes = {"gain": (8,), **dict.fromkeys("qkvo", (8, 8))}
    params = {str(layer): {name: draw(*shape) for name, shape in shapes.items()} for layer in range(layers)}
    return params, draw(4, 8, 8), draw(4, 8, 8)


def assert_near(found: Any, wanted: Any) -> None:
    """Within 1e-12 of the largest element of each leaf."""
    for a, b in zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * float(b.abs().max()))


@pytest.mark.every(3)
@pytest.mark.parametrize(("region", "name"), list(itertools.product(REGIONS, PLANS)))
def test_in_a_plan(region: str, name: str) -> None:
    args = drawn(2 if name in ("tensor", "again", "pipeline") else 1)
    step = fp.compile(fp.grad_and_value(PLANS[name](REGIONS[region])), MESH)
    assert_near(step(*args), torch.func.grad_and_value(PLAIN)(*args))
    counts = step.program.counts()
    assert ("all_to_all" if region == "ulysses" else "ppermute", ("ctx",)) in counts


def penalty(loss: Loss) -> Loss:
    return lambda p, x, y: loss(p, x, y) + torch.func.grad(loss, argnums=1)(p, x, y).square().sum()


def adapted(loss: Loss) -> Loss:
    def after_a_step(p: Params, x: Tensor, y: Tensor) -> Tensor:
        grads = torch.func.grad(loss)(p, x[:2], y[:2])
        return loss(optree.tree_map(lambda w, g: w - 0.01 * g, p, grads), x[2:], y[2:])

    return after_a_step


def tangent(loss: Loss) -> Loss:
    return lambda p, x, y: torch.func.jvp(lambda x: loss(p, x, y), (x,), (y,))[1]


def of_each(loss: Loss) -> Loss:
    def variance(p: Params, x: Tensor, y: Tensor) -> Tensor:
        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(p, x[:, None], y[:, None])
        return sum(leaf.var(0).sum() for leaf in optree.tree_leaves(each))

    return variance


AROUND = [penalty, adapted, tangent, of_each]
INSIDE = ["zero 3 beside", "tensor, zero 3", "data inside", "accumulated"]


@pytest.mark.every(11)
@pytest.mark.parametrize(("around", "region", "name"), list(itertools.product(AROUND, REGIONS, INSIDE)))
def test_derivatives_inside_the_plan(around: Callable[[Loss], Loss], region: str, name: str) -> None:
    args = drawn(1)
    found = fp.compile(fp.grad_and_value(PLANS[name](around(REGIONS[region]))), MESH)(*args)
    assert_near(found, torch.func.grad_and_value(around(PLAIN))(*args))


def on_a_process(rank: int) -> Any:
    loss = model(fp.shard_map(ring, Mesh(ctx=2), (P(None, None, "ctx"),) * 3, P(None, None, "ctx")), norm)
    return fp.compile(fp.grad(fp.zero(3, "ctx", batch=ROWS)(loss)), Mesh(ctx=2))(*drawn())


def test_on_processes() -> None:
    wanted = torch.func.grad(PLAIN)(*drawn())
    for found in run_on_processes(on_a_process, 2):
        assert_near(found, wanted)


# --- A law: bodies, plans, derivatives. The oracle maps the body over the parts. Integers are exact ---


def halo(w: Tensor, x: Tensor) -> Tensor:
    """Each row is added to the one before it, also across ranks."""
    ranks = fp.axis_size("i")
    before = fp.ppermute(x[-1:], "i", [(rank, (rank + 1) % ranks) for rank in range(ranks)])
    return w * x + torch.cat([before, x[:-1]])


def prefix(w: Tensor, x: Tensor) -> Tensor:
    own = (w * x).cumsum(0)
    totals = fp.all_gather(own[-1:], "i", dim=0)
    before = torch.arange(len(totals)) < fp.axis_index("i")
    return own + (totals * before[:, None]).sum(0)


def centred(w: Tensor, x: Tensor) -> Tensor:
    return w * x * x - fp.psum(x.sum(0), "i")


def exchanged(w: Tensor, x: Tensor) -> Tensor:
    turned = fp.all_to_all(x, "i", split_dim=1, concat_dim=0)
    return fp.all_to_all(turned * turned.sum(0), "i", split_dim=0, concat_dim=1) * w


BODIES = [halo, prefix, centred, exchanged]


def value(f: Loss) -> Loss:
    return f


def gradient(f: Loss) -> Loss:
    return lambda w, x: (torch.func.grad(f, argnums=1)(w, x) * x).sum()


def second(f: Loss) -> Loss:
    inner = lambda w, x: (torch.func.grad(f)(w, x) * w).sum()  # noqa: E731
    return lambda w, x: (torch.func.grad(inner, argnums=1)(w, x) * x).sum()


def direction(f: Loss) -> Loss:
    return lambda w, x: torch.func.jvp(f, (w, x), (w + 1, x - 1))[1]


def each_row(f: Loss) -> Loss:
    """Over a dim beside the parts."""
    return lambda w, x: torch.func.vmap(f, (None, 0))(w, torch.stack([x, x + 1])).sum()


@settings(max_examples=10)
@given(
    st.sampled_from(BODIES),
    st.sampled_from([value, gradient, second, direction, each_row]),
    st.integers(2, 4),
    st.lists(
        st.sampled_from(["i", "i3", "j", "j3", "columns"]), min_size=1, max_size=3, unique_by=lambda name: name[0]
    ),
    st.data(),
)
def test_a_region_is_its_body_on_all_parts(
    body: Callable[..., Tensor], around: Callable[[Loss], Loss], ranks: int, names: list[str], data: st.DataObject
) -> None:
    columns = 2 * ranks
    plans = {
        "i": fp.data_parallel("i"),
        "i3": fp.zero(3, "i"),
        "j": fp.data_parallel("j", batch=P(None, "j")),
        "j3": fp.zero(3, "j", batch=P(None, "j")),
        "columns": fp.tensor_parallel("k", P("k")),
    }
    plan = fp.chain(*(plans[name] for name in sorted(names, key=lambda name: name != "columns")))
    draw = lambda *shape: torch.tensor(data.draw(numbers(*shape)), dtype=torch.float64).reshape(shape)  # noqa: E731
    w, x = draw(columns), draw(3 * ranks, columns)
    mesh = Mesh(i=ranks, j=2, k=2)
    region = fp.shard_map(body, mesh, (P(), P("i")), P("i"))
    mapped = fp.vmap(body, (None, 0), axis_name="i")
    oracle = lambda w, x: mapped(w, x.unflatten(0, (ranks, -1))).flatten(0, 1)  # noqa: E731
    loss, wanted = (around(lambda w, x, f=f: (f(w, x) * x).sum()) for f in (region, oracle))
    found = fp.compile(fp.grad_and_value(plan(loss)), mesh)(w, x)
    assert optree.tree_all(optree.tree_map(torch.equal, found, torch.func.grad_and_value(wanted)(w, x)))


def numbers(*shape: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(-3, 3), min_size=math.prod(shape), max_size=math.prod(shape))


# --- Layouts ---


@pytest.mark.parametrize(
    "spec", [P(("ctx", "data")), P(("data", "ctx")), P((2, "ctx")), P("data", "ctx"), P("ctx")], ids=str
)
@pytest.mark.parametrize("plan", [CTX, fp.chain(fp.data_parallel("data"), CTX), fp.zero(3, "data")], ids=repr)
def test_parts_of_several_axes(spec: P, plan: Any) -> None:
    """Each rank writes its number on its part, whichever of the axes the plan splits, and in which order."""
    x, mesh = torch.arange(8.0 * 4).reshape(8, 4), Mesh(data=2, ctx=2)
    number = lambda x: x * sum(10**place * (1 + fp.axis_index(axis)) for place, axis in enumerate(sorted(spec.axes)))  # noqa: E731
    region = fp.shard_map(number, mesh, spec, spec)
    found = fp.compile(plan(lambda w, x: region(x)), mesh)(x[0], x)
    assert torch.equal(found, region(x)) and found.unique().numel() > 20


def test_a_gathered_parameter_stays_reduced() -> None:
    """Its gradient is then one reduce-scatter, as for the rest of the model. A body that slices it takes it whole."""
    x, w = torch.arange(16.0).reshape(4, 4), torch.arange(4.0)

    def counts(body: Callable[..., Tensor]) -> dict[Any, int]:
        region = fp.shard_map(body, Mesh(data=2), (P(), P("data")), P("data"))
        step = fp.compile(fp.grad(fp.zero(3, "data")(lambda w, x: (region(w, x) * x).sum())), Mesh(data=2))
        assert torch.equal(step(w, x), (x * x).sum(0))
        return {kind: count for (kind, _), count in step.program.counts().items()}

    assert counts(lambda w, x: w * x) == {"psum_scatter": 1}
    sliced = counts(lambda w, x: fp.all_gather(fp.pscatter(w, "data"), "data", to="invariant") * x)
    assert sliced["psum_scatter"] == 1 and sliced["psum"] == 1


def test_constants_and_positions_enter_as_parts() -> None:
    total = fp.shard_map(lambda w, x: fp.psum((w * x).sum(0), "data"), Mesh(data=2), (P(), P("data")), P())

    def loss(w: Tensor, x: Tensor) -> Tensor:
        places = torch.arange(4).reshape(4, 1).expand(4, 3)
        return (total(w, torch.ones(4, 3)) + total(w, places) + total(w, x)).sum()

    x, w = torch.arange(12.0).reshape(4, 3), torch.tensor(2.0)
    for plan in (fp.data_parallel("data"), fp.zero(3, "data")):
        found = fp.compile(fp.grad_and_value(plan(loss)), Mesh(data=2))(w, x)
        assert found == (12 + 18 + 66, 2 * (12 + 18 + 66))


def test_what_a_body_reads_and_returns_besides_parts() -> None:
    """A traced value of the surrounding function, integers, and a number."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        scale = w.square()

        def body(x: Tensor) -> tuple[Tensor, dict[str, Tensor], int]:
            return x * scale, {"index": x.detach().long() + fp.axis_index("data")}, 3

        y, more, number = fp.shard_map(body, Mesh(data=2), P("data"), (P("data"), P("data"), P()))(x)
        return number * (y * more["index"]).sum()

    x, w = torch.arange(4.0), torch.tensor(2.0)
    found = fp.compile(fp.grad_and_value(fp.data_parallel("data")(loss)), Mesh(data=2))(w, x)
    assert found == (12 * (1 + 2 * 3 + 3 * 4), 12 * (1 + 2 * 3 + 3 * 4))


# --- Bodies are traced once ---


def test_equal_layers_share_a_trace() -> None:
    calls = itertools.count()

    def body(w: Tensor, x: Tensor) -> Tensor:
        next(calls)
        return w * x + fp.psum(x.sum(0), "data") * scale

    region = fp.shard_map(body, Mesh(data=2), (P(), P("data")), P("data"))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        for row in w:
            x = region(row, x)
        return x.sum()

    def of_two_scales(w: Tensor, x: Tensor) -> Tensor:
        nonlocal scale
        x, scale = region(w[0], x), 2.0
        return region(w[0], x).sum()

    scale, w, x, plan = 1.0, torch.ones(5, 3), torch.ones(4, 3), fp.data_parallel("data")
    assert fp.compile(plan(loss), Mesh(data=2))(w, x) == 12 * 5**5 and next(calls) == 1
    assert fp.compile(plan(of_two_scales), Mesh(data=2))(w, x) == 12 * 5 * 9 and next(calls) == 4


def test_draws_of_equal_layers_differ() -> None:
    region = fp.shard_map(lambda x: fp.random.dropout(x), Mesh(data=2), P("data"), P("data"))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        with fp.random.using(fp.random.key(0)):
            return torch.stack([region(x), region(x)], 1)

    found = fp.compile(fp.data_parallel("data")(loss), Mesh(data=2))(torch.ones(()), torch.ones(64))
    assert not torch.equal(found[:, 0], found[:, 1])


def test_lines_of_a_shared_body_belong_to_their_layer() -> None:
    """To the stage and the recomputed region of the call."""
    region = fp.shard_map(lambda w, x: w * x.tanh(), Mesh(data=2), (P(), P("data")), P("data"))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        x = fp.recompute(lambda x: region(w[0], x))(x)
        return region(w[1], fp.stage_boundary(x)).square().mean()

    w, x, plan = torch.rand(2, 3).double(), torch.rand(4, 3).double(), fp.data_parallel("data")
    step = fp.compile(plan(loss), Mesh(data=2))
    assert_near(step(w, x), loss(w, x))
    lines = [info(node).source for node in step.program.traced.nodes if "tanh" in str(node.target)]
    assert [(line.stage, line.region is None) for line in lines] == [(0, False), (1, True)]
    parts = fp.chain(plan, fp.pipeline("pipe", microbatches=2))
    found = fp.compile(fp.grad(parts(loss)), Mesh(data=2, pipe=2))(w, x)
    assert_near(found, torch.func.grad(loss)(w, x))


def test_a_region_shows_its_body() -> None:
    shown = []

    def loss(w: Tensor, x: Tensor) -> Tensor:
        y = fp.shard_map(lambda x: fp.psum(x, "data"), Mesh(data=2), P("data"), P())(x)
        shown.extend(repr(node.args[-1]) for node in recorder().traced.nodes if "region" in str(node.target))
        return y.sum()

    fp.compile(fp.data_parallel("data")(loss), Mesh(data=2)).lower(torch.ones(()), torch.ones(4))
    assert "from [P('data')] to [P()]" in shown[0] and "psum(x0, ['data'], 'auto')" in shown[0]


# --- What is refused ---


def refusal(error: type[Exception], body: Callable[..., Any], in_specs: Any, out_specs: Any, *args: Tensor) -> str:
    region = fp.shard_map(body, Mesh(data=2), in_specs, out_specs)
    step = fp.compile(fp.grad(fp.data_parallel("data")(lambda w, *args: (region(*args) * w).sum())), Mesh(data=2))
    with pytest.raises(error) as found:
        step(torch.ones(()), *(args or (torch.ones(4),)))
    assert "test_split_regions.py:" in str(found.value) or error is SpecError
    return str(found.value)


def test_a_wrong_body_is_refused_at_its_call() -> None:
    parts, double = P("data"), lambda x: fp.psum(fp.psum(x, "data"), "data")
    unsummed = lambda x: fp.pcast(x.sum(), "data", to="unreduced")  # noqa: E731
    assert "holds partial sums" in refusal(OutSpecError, unsummed, parts, P())
    assert "a missing psum? write fp.psum(x, 'data')" in refusal(OutSpecError, lambda x: x.sum(), parts, P())
    assert "A doubled psum? Drop one" in refusal(TypingError, double, parts, P())
    index = lambda x: x.sum() * 0 + fp.axis_index("data")  # noqa: E731
    assert "differs by rank along 'data'" in refusal(OutSpecError, index, parts, P())
    assert "is the same on all ranks" in refusal(OutSpecError, lambda x: fp.psum(x, "data"), parts, parts)
    assert "does not divide by 'data'" in refusal(SpecError, lambda x: x, parts, parts, torch.ones(4, 3).T)
    assert "no such axis is bound here" in refusal(UnboundAxisError, lambda x: fp.psum(x, "dta"), parts, P())
    assert "neither partial sums nor padded" in refusal(LayoutError, lambda x: x, parts, P(unreduced={"data"}))


def test_an_axis_that_the_specs_do_not_name_is_the_plans() -> None:
    region = fp.shard_map(lambda x: fp.psum(x, "data"), Mesh(data=2, ctx=2), P("ctx"), P("ctx"))
    step = fp.compile(fp.data_parallel("data")(lambda w, x: region(x)), Mesh(data=2, ctx=2))
    with pytest.raises(
        UnboundAxisError, match="globally with respect to 'data', or name the axis in the specs of <lambda>"
    ):
        step(torch.ones(()), torch.ones(4))


def test_a_region_in_the_body_of_another() -> None:
    inner = fp.shard_map(lambda x: fp.psum(x, "data"), MESH, P("data"), P())
    outer = fp.shard_map(lambda x: inner(x), MESH, P(None, "ctx"), P(None, "ctx"))
    step = fp.compile(fp.chain(fp.data_parallel("data"), CTX)(lambda w, x: outer(x)), MESH)
    with pytest.raises(LayoutError, match="whose specs do not name 'data'"):
        step(torch.ones(()), torch.ones(4, 4))
    named = fp.shard_map(lambda x: fp.psum(x, "data"), MESH, P("data", "ctx"), P(None, "ctx"))
    step = fp.compile(fp.chain(fp.data_parallel("data"), CTX)(lambda w, x: named(x)), MESH)
    assert torch.equal(step(torch.ones(()), torch.ones(4, 4)), torch.full((2, 4), 2.0))
