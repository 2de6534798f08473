"""A spec of unequal blocks, `P(((2, 1, 1), "tensor"))`, goes through all that a spec goes through."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from functional_parallel.testing import assert_equivalent, check_rule
from functional_parallel.testing.strategies import integers
from sharding_specs import Mesh, P, SpecError, rank_boxes, shard, unshard, validate
from sharding_specs.blocks import between, blocks_of, by_block, by_rank, inside, lengths, nested

MESH = Mesh(data=2, tensor=2)
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


# --- Arithmetic of blocks ---


@given(SIZES, SIZES, st.integers(1, 3))
def test_blocks_of_blocks(outer: list[int], inner: list[int], unit: int) -> None:
    """Against lists of borders."""
    mine, its = blocks_of(outer), blocks_of(inner)
    both = nested(mine, its)
    extent = sum(outer) * sum(inner) * unit
    wanted = [size for length in lengths(mine, extent) for size in lengths(its, length)]
    assert lengths(both, extent) == wanted
    assert inside(both, mine) == its
    start = 0
    for first, length in enumerate(wanted):
        assert between(both, extent, start, length) == 1
        if first + 1 < len(wanted):
            assert between(both, extent, start, length + wanted[first + 1]) == blocks_of(wanted[first : first + 2])
        assert length == 1 or between(both, extent, start, length - 1) is None
        start += length


@given(SIZES, st.integers(1, 3), st.integers(1, 2))
def test_the_order_by_rank(sizes: list[int], ranks: int, unit: int) -> None:
    x = torch.arange(2 * sum(sizes) * ranks * unit).reshape(-1, 2)
    found = by_rank(x, 0, blocks_of(sizes), ranks)
    assert torch.equal(by_block(found, 0, blocks_of(sizes), ranks), x)
    whole = x.split([size * ranks * unit for size in sizes])
    for rank, part in enumerate(found.chunk(ranks)):
        assert torch.equal(part, torch.cat([block.chunk(ranks)[rank] for block in whole]))


# --- Forms, errors ---


def test_forms_of_one_spec() -> None:
    spec = P(None, ((32, 16, 16), "tensor"))
    assert repr(spec) == "P(None, ((2, 1, 1), 'tensor'))" and eval(repr(spec)) == spec
    assert str(spec) == "d0 (2+1+1 d1x1/tensor d1)" and P.parse(str(spec)) == spec
    assert P.parse("embed (4+2+2 heads/tensor dim)") == spec
    assert P(((8, 8, 8), "tensor")) == P((3, "tensor")) and P(((1,), "tensor")) == P("tensor")
    assert P([[2, 1], "tensor"]) == P(((2, 1), "tensor"))  # as JSON has it
    assert P(("tensor", (2, 1))) == P("tensor")  # blocks inside the last axis have no effect
    part = shard(torch.arange(8), P(((2, 1, 1), "tensor")), Mesh(tensor=2), 1)
    assert part.tolist() == [2, 3, 5, 7]
    boxes = rank_boxes((8,), P(((2, 1, 1), "tensor")), Mesh(tensor=2), {"tensor": 1})
    assert [(*box.start, *box.size) for box, _ in boxes] == [(2, 2), (5, 1), (7, 1)]


def test_texts_of_blocks() -> None:
    assert P.parse("(2+1 blocks0/data) (3+1 blocks1/tensor)") == P(((2, 1), "data"), ((3, 1), "tensor"))
    with pytest.raises(SpecError, match=re.escape("write (2+1 name/tensor)")):
        P.parse("2+1/tensor")


@pytest.mark.parametrize("wrong", [((), "t"), ((2, 0), "t"), ((2, "u"), "t"), ((True, 2), "t"), ((2.0, 1), "t")])
def test_sizes_that_are_none(wrong: Any) -> None:
    with pytest.raises(SpecError, match="tuples of sizes of blocks; got"):
        P(wrong)


def test_dims_that_do_not_fit() -> None:
    spec = {"w": P(((2, 1, 1), "tensor"))}
    text = "P(((2, 1, 1), 'tensor')): dim 0 of size 10 does not divide by blocks of sizes 2:1:1, which have 4 units"
    with pytest.raises(SpecError, match=re.escape(text)):
        validate({"w": torch.ones(10, 2)}, spec, Mesh(tensor=2))
    text = "dim 0 of size 4 does not divide by 'tensor' of 2 ranks (with the factors outside it, 8 units); make it 8"
    with pytest.raises(SpecError, match=re.escape(text)):
        validate({"w": torch.ones(4, 2)}, spec, Mesh(tensor=2))
    with pytest.raises(SpecError, match="pads dim 0"):
        P(((2, 1), "tensor"), padded={0: 7})


@pytest.mark.parametrize("blocks", [(2, 1, 1), 3], ids=str)
def test_blocks_that_cut_across_those_of_another_axis(blocks: Any) -> None:
    """The message has the path, both specs, and one with which it works."""
    mesh, params = Mesh(data=2, tensor=2), {"layer": {"w": torch.ones(48, 2, dtype=torch.float64)}}

    def plan(spec: P) -> Any:
        return fp.chain(fp.tensor_parallel("tensor", {"*": P((blocks, "tensor"))}), fp.zero(3, "data", {"*": spec}))

    def trained(plan: Any) -> Any:
        train = fp.train_step(lambda p, x: (p["layer"]["w"] @ x).square().mean(), fp.optim.sgd(0.1), mesh, plan)
        return train(train.init(params), torch.ones(2, 4, dtype=torch.float64))[1].loss

    both = P((blocks, "tensor", "data"))
    text = (
        f"zero(3, 'data'): argument 0/layer/w of shape (48, 2): P('data') cannot be combined with "
        f"{P((blocks, 'tensor'))!r}, its layout inside: axis 'tensor' splits {blocks} blocks of dim 0, which cut "
        f"across other axes\nSplit another dim, or the blocks, as {both!r}"
    )
    with pytest.raises(SpecError, match=re.escape(text)):
        trained(plan(P("data")))
    with pytest.raises(SpecError, match=re.escape(text)):
        trained(fp.from_specs({"*": P(("data", blocks, "tensor"))}, mesh))
    assert trained(plan(both)) == 4


def test_a_constraint_has_no_unequal_blocks() -> None:
    f = fp.tensor_parallel("tensor", {"w": P("tensor")})(lambda p: fp.constrain(p["w"], "(2+1 d/tensor)").sum())
    with pytest.raises(SpecError, match="it has unequal blocks; constrain the slices of the value"):
        fp.compile(f, Mesh(tensor=2))({"w": torch.ones(12)})


# --- Programs ---


def attention(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Grouped queries from one fused weight: 4 heads of queries, 2 of keys, 2 of values."""
    batch, time, _ = x.shape
    fused = torch.nn.functional.linear(x, params["qkv"], params["bias"])
    q, k, v = fused[..., :8], fused[..., 8:12], fused[..., 12:]
    q, k, v = (each.reshape(batch, time, -1, 2).transpose(1, 2) for each in (q, k, v))
    k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
    scores = (q @ k.transpose(-1, -2)).square()
    mixed = (scores @ v).transpose(1, 2).reshape(batch, time, -1)
    return ((fp.stage_boundary(mixed) @ params["out"]) ** 2).mean()


def weights() -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(0)
    sizes = {"qkv": (16, 4), "bias": (16,), "out": (8, 4)}
    return {name: torch.randint(-2, 3, size, generator=make).double() / 4 for name, size in sizes.items()}


X = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(0)).double()
FUSED = {"qkv": P(((2, 1, 1), "tensor")), "bias": P(((2, 1, 1), "tensor")), "out": P("tensor")}
INSIDE = {name: P((*spec.dims[0], "data")) for name, spec in FUSED.items()}
TENSOR = fp.tensor_parallel("tensor", FUSED, strict=True)
PLANS = {
    "tensor": (TENSOR, MESH),
    "data": (fp.chain(TENSOR, fp.data_parallel("data")), MESH),
    "zero": (fp.chain(TENSOR, fp.zero(3, "data")), MESH),
    "zero inside": (fp.chain(TENSOR, fp.zero(3, "data", INSIDE)), MESH),
    "accumulate": (fp.chain(TENSOR, fp.zero(2, "data"), fp.accumulate(2)), MESH),
    "pipe": (fp.chain(TENSOR, fp.pipeline("pipe", microbatches=2)), Mesh(pipe=2, tensor=2)),
    "specs": (fp.from_specs(FUSED, Mesh(tensor=2)), Mesh(tensor=2)),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_fused_weight_of_grouped_queries(name: str) -> None:
    """Loss and gradients of one device, and no gather over the axis."""
    plan, mesh = PLANS[name]
    step = fp.compile(fp.grad_and_value(plan(attention)), mesh)
    grads, value = step(weights(), X)
    wanted, expected = fp.grad_and_value(attention)(weights(), X)
    torch.testing.assert_close((value, grads), (expected, wanted), rtol=1e-12, atol=1e-12)
    program = step.lower(weights(), X)
    over_tensor = [each for each in program.collectives() if "tensor" in each.axes]
    assert {each.kind for each in over_tensor} == {"psum"}
    assert "all_gather" not in {each.kind for each in over_tensor}


def test_equal_blocks_gather_where_unequal_ones_do_not() -> None:
    """The law above can fail: the same weight in one block is gathered."""
    plan = fp.tensor_parallel("tensor", {**FUSED, "qkv": P("tensor"), "bias": P("tensor")}, strict=True)
    step = fp.compile(fp.grad_and_value(plan(attention)), MESH)
    step(weights(), X)
    assert ("all_gather", ("tensor",)) in step.program.counts()


def test_one_tree_declares_both_axes_of_equal_blocks() -> None:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = torch.nn.functional.linear(x, params["qkv"]).chunk(3, -1)
        return ((q * k + v) ** 2).mean()

    specs, params = {"qkv": P((3, "tensor", "data"))}, {"qkv": torch.randn(24, 4).double()}
    step = fp.compile(fp.grad(fp.from_specs(specs, MESH)(loss)), MESH)
    torch.testing.assert_close(step(params, X), fp.grad(loss)(params, X), rtol=1e-12, atol=1e-12)
    assert step.program.counts()["all_gather", ("data",)] == 1


def test_second_derivatives() -> None:
    def curvature(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return fp.jvp(fp.grad(lambda p: attention(p, x)), (params,), (params,))[1]["qkv"].square().sum()

    value = fp.compile(TENSOR(curvature), Mesh(tensor=2))(weights(), X)
    torch.testing.assert_close(value, curvature(weights(), X), rtol=1e-12, atol=1e-12)


OPS: dict[str, Any] = {
    "elementwise with one block": lambda p, x: (p["w"] * p["v"]).square().sum(),
    "partial sums to blocks": lambda p, x: (
        (p["v"].reshape(3, 4).T @ p["v"].reshape(3, 4)).reshape(16)[:12] * p["w"]
    ).sum(),
    "softmax along it": lambda p, x: (p["w"].softmax(0) * x[0, 0, 0]).square().sum(),
    "cumsum along it": lambda p, x: (p["w"].cumsum(0) ** 2).sum(),
    "merged with a dim outside": lambda p, x: ((p["w"] * x[..., :1]).reshape(-1) ** 2).sum(),
    "heads": lambda p, x: (p["w"].reshape(6, 2).sum(1) ** 2).sum(),
    "a slice across blocks": lambda p, x: (p["w"][2:10] ** 2).sum(),
    "every second": lambda p, x: (p["w"][::2] ** 2).sum(),
    "split": lambda p, x: sum((i + 1) * part.sum() for i, part in enumerate(p["w"].split([8, 4]))),
    "chunk": lambda p, x: sum((i + 1) * part.square().sum() for i, part in enumerate(p["w"].chunk(3))),
    "concatenated": lambda p, x: (torch.cat([p["w"], p["w"] * 2]).cumsum(0) ** 2).sum(),
    "lookup": lambda p, x: (torch.nn.functional.embedding(torch.tensor([0, 11, 7, 8]), p["w"][:, None]) ** 2).sum(),
    "classes": lambda p, x: torch.nn.functional.cross_entropy(p["w"] * x[0], torch.tensor([11, 0, 8])),
}


@pytest.mark.parametrize("name", OPS)
def test_ops_on_unequal_blocks(name: str) -> None:
    x = X if name != "classes" else X[..., :1]
    params = {"w": torch.arange(12.0).double() / 8, "v": torch.arange(12.0, 0, -1).double() / 8}
    plan = fp.tensor_parallel("tensor", {"w": P(((2, 1), "tensor")), "v": P("tensor")})
    assert_equivalent(OPS[name], plan, Mesh(tensor=2), params, x, draw=False)


def test_dropout_is_the_same_on_every_mesh() -> None:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (torch.nn.functional.dropout(params["w"] * x[0, 0, 0], 0.5) ** 2).sum()

    params, found = {"w": torch.arange(1.0, 13).double()}, []
    for mesh, spec in ((Mesh(), P()), (Mesh(tensor=2), P(((2, 1), "tensor")))):
        train = fp.train_step(
            loss, fp.optim.sgd(0.1), mesh, fp.tensor_parallel("tensor", {"w": spec}) if mesh.axes else None, seed=3
        )
        found.append(train(train.init(params), X)[1].loss)
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


def test_a_body_of_shard_map() -> None:
    spec = P(((2, 1), "tensor"))
    f = fp.shard_map(lambda x: x * (fp.axis_index("tensor") + 1), Mesh(tensor=2), spec, spec)
    assert f(torch.ones(6)).tolist() == [1, 1, 2, 2, 1, 2]
    inner = fp.shard_map(lambda x: x * 2, Mesh(tensor=2), spec, spec)
    plan = fp.tensor_parallel("tensor", {"w": spec}, strict=True)
    step = fp.compile(plan(lambda p: (inner(p["w"]) ** 2).sum()), Mesh(tensor=2))
    assert step({"w": torch.arange(6.0)}) == 220
    assert step.program.counts() == {("psum", ("tensor",)): 1}


# --- Training ---

MUON = fp.optim.by_path({"bias": fp.optim.sgd(0.01), "*": fp.optim.muon(0.01)})
OPTIMIZERS = {"adamw": fp.optim.adamw(0.01), "muon": MUON, "adafactor": fp.optim.adafactor(0.01)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_saving_and_restoring_on_other_meshes(name: str, tmp_path: Path) -> None:
    optimizer = OPTIMIZERS[name]
    plain = fp.train_step(attention, optimizer, Mesh(), None)
    state, wanted = plain.init(weights()), []
    for _ in range(4):
        state, metrics = plain(state, X)
        wanted.append(metrics.loss)
    train = fp.train_step(attention, optimizer, MESH, PLANS["zero"][0])
    state = train.init(weights())
    for step in range(2):
        state, metrics = train(state, X)
        torch.testing.assert_close(metrics.loss, wanted[step], rtol=1e-9, atol=0)
    train.save(state, tmp_path)
    for plan, mesh in (("zero inside", MESH), ("zero", Mesh(data=4, tensor=1)), ("tensor", Mesh(data=1, tensor=2))):
        other = fp.train_step(attention, optimizer, mesh, PLANS[plan][0])
        again = other.restore(tmp_path)
        for step in (2, 3):
            again, metrics = other(again, X)
            torch.testing.assert_close(metrics.loss, wanted[step], rtol=1e-9, atol=0)


@settings(max_examples=25)
@given(st.data())
def test_products_with_slices_at_borders(data: st.DataObject) -> None:
    """Any blocks, on any dims of a mesh, exact in integers: nothing is gathered."""
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    ranks = data.draw(st.sampled_from([1, 2, 3]))
    mesh = Mesh(data=data.draw(st.sampled_from([1, 2])), tensor=ranks)
    widths = [size * ranks for size in sizes]
    params = {"w": data.draw(integers((sum(widths), 3))), "v": data.draw(integers((sum(widths),)))}
    x = data.draw(integers((2, 2, 3)))

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        parts = torch.nn.functional.linear(x, params["w"], params["v"]).split(widths, -1)
        return sum(((index + 1) * part * part).sum() for index, part in enumerate(parts))  # type: ignore[return-value]

    specs = {"w": P((tuple(sizes), "tensor")), "v": P((tuple(sizes), "tensor"))}
    plan = fp.chain(fp.tensor_parallel("tensor", specs, strict=True), fp.zero(3, "data"))
    step = fp.compile(fp.grad_and_value(plan(loss)), mesh)
    grads, value = step(params, x)
    wanted, expected = fp.grad_and_value(loss)(params, x)
    assert value == expected and all(torch.equal(grads[name], wanted[name]) for name in params)
    assert all("tensor" not in each.axes or each.kind == "psum" for each in step.lower(params, x).collectives())


@given(st.data())
def test_shards_of_nested_blocks_join(data: st.DataObject) -> None:
    mesh, sizes = Mesh(data=2, tensor=3), tuple(data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=3)))
    factors = data.draw(st.permutations([sizes, "tensor", "data"]))
    x = torch.arange(sum(sizes) * 12)
    parts = [shard(x, P(tuple(factors)), mesh, rank) for rank in mesh.ranks]
    assert torch.equal(unshard(parts, P(tuple(factors)), mesh, check=True), x)


def test_rules_are_checked_with_unequal_blocks() -> None:
    """`check_rule` splits a dim of 6 in blocks of 4 and 2: a local function that takes one block for all is found."""
    check_rule(torch.ops.aten.embedding.default, [(torch.randn(6, 2), torch.tensor([0, 5, 3]))])
