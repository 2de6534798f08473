"""ZeRO's stages: what differs is where things lie, never what is computed."""

from __future__ import annotations

from itertools import product
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from sharding_specs import Mesh, P

SIZES = st.lists(st.integers(1, 9), min_size=3, max_size=3)


def network(sizes: list[int], dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """A layer of any size, a bias, a scalar."""
    generator = torch.Generator().manual_seed(sum(sizes))
    inner, hidden, outer = sizes
    shapes = {"a": (inner, hidden), "b": (hidden,), "c": (hidden, outer), "s": ()}
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found = torch.tanh(x @ params["a"] + params["b"]) @ params["c"] * params["s"]
    return ((found - y) ** 2).mean()


def data(sizes: list[int], count: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(count, size, generator=generator, dtype=dtype) for size in (sizes[0], sizes[2]))  # type: ignore[return-value]


def trained(plan: Any, mesh: Mesh, sizes: list[int], steps: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Everything a run leaves behind: parameters, optimizer state, losses."""
    train = fp.train_step(loss, fp.optim.adamw(1e-2), mesh, plan, clip=0.5)
    state, losses = train.init(network(sizes, dtype)), []
    for _ in range(steps):
        state, metrics = train(state, *data(sizes, 8, dtype))
        losses.append(metrics.loss)
    return optree.tree_leaves((train.whole(state), losses))


@settings(max_examples=7)
@given(sizes=SIZES, stage=st.integers(0, 3), ranks=st.sampled_from([2, 4, 8]), whole_below=st.sampled_from([0, 10]))
def test_shapes_of_any_size(sizes: list[int], stage: int, ranks: int, whole_below: int) -> None:
    """Dims that the ranks do not divide are padded at rest, which no result shows."""
    plan = fp.zero(stage, "data", whole_below=whole_below)
    fp.testing.assert_equivalent(loss, plan, Mesh(data=ranks), network(sizes), *data(sizes, 8))
    for a, b in zip(trained(plan, Mesh(data=ranks), sizes, 2), trained(None, Mesh(), sizes, 2), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


MANY = product([[8, 16, 4], [7, 33, 5], [17, 129, 3]], [2, 4], [torch.float32, torch.float64])


@pytest.mark.parametrize(
    (
        "sizes",
        "ranks",
        "dtype",
    ),  # one case in four always: all sizes, all numbers of ranks and both types are among them
    [pytest.param(*case, marks=() if i % 4 == i // 4 else pytest.mark.slow) for i, case in enumerate(MANY)],
)
def test_all_stages_give_the_same_bits(sizes: list[int], ranks: int, dtype: torch.dtype) -> None:
    """Law 3: one reduction tree, in rank order; 20 steps of AdamW, odd sizes included."""
    mesh = Mesh(data=ranks)
    reference = trained(fp.data_parallel("data"), mesh, sizes, 20, dtype)
    for stage in (1, 2, 3):
        found = trained(fp.zero(stage, "data"), mesh, sizes, 20, dtype)
        differing = [index for index, (a, b) in enumerate(zip(reference, found, strict=True)) if not torch.equal(a, b)]
        assert not differing, f"stage {stage}"


PLACES = torch.tensor([0, 2, 1, 1])

#: a parameter of shape (6, 4) → (4, 4): ops whose derivatives write gradients into zeros
PICKED = {
    "index": lambda w: w[PLACES],
    "index of columns": lambda w: w[:4, PLACES],
    "index of pairs": lambda w: w[PLACES, PLACES].expand(4, 4),
    "gather": lambda w: w.gather(0, PLACES[:, None].expand(4, 4)),
    "take_along_dim": lambda w: w.take_along_dim(PLACES[:, None], 0),
    "index_select": lambda w: w.index_select(0, PLACES),
    "maximum": lambda w: w.max(0).values.expand(4, 4),
    "sort": lambda w: w.sort(0).values[1:5],
    "topk": lambda w: w.topk(4, 0).values,
    "some of all": lambda w: torch.stack(w.unbind(0)[1:5]),
    "scatter": lambda w: w.scatter(0, PLACES[None], w[3:4] * 2)[:4],
    "scatter_add": lambda w: w.scatter_add(0, PLACES[:, None].expand(4, 4), w[:4])[:4],
    "index_put": lambda w: w.index_put((PLACES,), w[:4], accumulate=True)[:4],
}


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", PICKED)
def test_what_is_picked_from_a_parameter(name: str, stage: int) -> None:
    """By places that all ranks know: the gradient is a partial sum, laid among zeros."""
    w, x = (torch.randperm(rows * 4, generator=torch.Generator().manual_seed(rows)) for rows in (6, 8))
    f = lambda w, x: (x @ PICKED[name](w)).square().sum()  # noqa: E731
    args = (w.double().reshape(6, 4), x.double().reshape(8, 4))
    step = fp.testing.assert_equivalent(f, fp.zero(stage, "data"), Mesh(data=2), *args, exact=True)
    assert step.program.counts().get(("psum_scatter", ("data",)), 0) == (stage == 3)


def test_rows_of_a_parameter_by_their_numbers() -> None:
    """Each rank needs the rows of its samples, so it takes a part of the numbers, which no operand determines."""
    w, x = torch.arange(24.0).double().reshape(6, 4), torch.arange(16.0).double().reshape(4, 4)
    f = lambda w, x: (x * w[torch.arange(1, 5)]).square().sum()  # noqa: E731
    fp.testing.assert_equivalent(f, fp.data_parallel("data"), Mesh(data=2), w, x, exact=True)


#: results of the parameters alone, or of their shapes, that have no gradient
WITHOUT_GRADIENT = {
    "count": lambda p: (p["w"] > 0).sum(),
    "maximum and where": lambda p: p["w"].max(0),
    "an integer of them": lambda p: p["steps"],
    "integers back": lambda p: p["w"].long().double(),
    "chosen": lambda p: torch.where(p["w"] > 0, p["w"], 0) * p["steps"],
    "draws": lambda p: fp.random.normal(fp.random.key(0), p["w"]),
    "draws, mapped": lambda p: torch.vmap(lambda key: fp.random.uniform(key, p["w"]))(torch.arange(3)),
    "new": lambda p: p["w"].new_full((2,), 3.0),
}


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_what_has_no_gradient_is_no_partial_sum(name: str, stage: int) -> None:
    f, params = WITHOUT_GRADIENT[name], {"w": torch.arange(-5.0, 7.0).reshape(4, 3), "steps": torch.arange(3)}
    plan, mesh = fp.zero(stage, "data"), Mesh(data=2)
    found = fp.compile(plan(lambda p, x: f(p)), mesh)(params, torch.zeros(2))
    torch.testing.assert_close(tuple(optree.tree_leaves(found)), tuple(optree.tree_leaves(f(params))), rtol=0, atol=0)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return sum(leaf.double().sum() for leaf in optree.tree_leaves(f(p))) + (p["w"] * x.sum()).sum()

    x = torch.arange(2.0)
    found, wanted = fp.compile(fp.grad(plan(loss)), mesh)(params, x), fp.grad(loss)(params, x)
    assert torch.equal(found["w"], wanted["w"]) and found["steps"] is None


def test_shard_over_one_axis_and_replicate_over_another() -> None:
    """HSDP in two words; the same bits as its own two-level sum with nothing sharded."""
    mesh = Mesh(replica=2, shard=2)
    hybrid = fp.chain(fp.zero(3, "shard"), fp.data_parallel("replica"))
    plain = fp.chain(fp.data_parallel("shard"), fp.data_parallel("replica"))
    for a, b in zip(trained(hybrid, mesh, [7, 9, 5], 20), trained(plain, mesh, [7, 9, 5], 20), strict=True):
        assert torch.equal(a, b)
    train = fp.train_step(loss, fp.optim.sgd(0.1), mesh, hybrid)
    program = train.lower(train.init(network([7, 9, 5])), *data([7, 9, 5], 8))
    assert {axes for (kind, axes) in program.counts() if kind in ("all_gather", "psum_scatter")} == {("shard",)}


def test_a_rank_holds_its_part_filled_up() -> None:
    train = fp.train_step(loss, fp.optim.sgd(0.1, momentum=0.9), Mesh(data=4), fp.zero(3, "data", whole_below=6))
    state = train.init(network([7, 9, 5]))
    program = train.lower(state, *data([7, 9, 5], 8))
    assert [handle[0].shape for handle in state.handles[:4]] == [(7, 3), (3,), (3, 5), ()]
    assert program.in_specs[:4] == [
        P(None, "data", padded={1: 9}),
        P("data", padded={0: 9}),
        P("data", padded={0: 9}),
        P(),
    ]
    assert train.params(state)["a"].shape == (7, 9)


def test_specs_say_which_dim() -> None:
    plan = fp.zero(3, "data", {"a": P("data"), "*": P()})
    step = fp.testing.assert_equivalent(loss, plan, Mesh(data=2), network([7, 9, 5]), *data([7, 9, 5], 8))
    assert step.program.in_specs[0] == P("data", padded={0: 7})
    assert step.program.counts()[("psum_scatter", ("data",))] == 1


def test_padding_is_for_what_lies_at_rest() -> None:
    plan = fp.tensor_parallel("tensor", {"c": P("tensor", padded={0: 9}), "*": P()})
    with pytest.raises(fp.PartitionError, match=r"0/c: P\('tensor', padded=\{0: 9\}\) is padded, which only what lies"):
        fp.compile(plan(loss), Mesh(tensor=2))(network([7, 9, 5]), *data([7, 9, 5], 8))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: fp.zero(4, "data"), r"zero\(stage=4\): the stages are 0 \(data parallel\), 1, 2 and 3"),
    (lambda: fp.chain(fp.zero(1, "data"), fp.zero(3, "data")), r"both take the axis 'data'"),
    (lambda: fp.compile(fp.zero(3, "dta")(loss), Mesh(data=2))(network([2, 2, 2]), *data([2, 2, 2], 4)), "'dta'"),
])  # fmt: skip
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
