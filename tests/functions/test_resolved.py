"""Layouts are resolved once at each door, as a value that prints."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.functions import LocalFunction
from sharding_specs import Mesh, P, SpecError

MESH = Mesh(data=2, shard=2, tensor=2)
SPECS = [P(None, "tensor") if i % 2 == 0 else P("tensor") for i in range(2)]
PLAN = fp.chain(
    fp.mixed_precision("bf16"),
    fp.remat(),
    fp.tensor_parallel("tensor", SPECS),
    fp.zero(3, "shard"),
    fp.data_parallel("data"),
    fp.accumulate(2),
)


def loss(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for w in params:
        x = torch.tanh(x @ w)
    return x.square().mean()


def calls(run: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """Return the result of a call, and how often it resolves layouts and broadcasts specs."""
    found: Counter[str] = Counter()
    resolve: Any = LocalFunction.resolve

    def watch(frame: Any, event: str, _: Any) -> None:
        if event == "call" and (frame.f_code is resolve.__code__ or frame.f_code.co_name == "broadcast_specs"):
            found[frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        return run(), found
    finally:
        sys.setprofile(before)


def test_each_door_resolves_once() -> None:
    params, x = [torch.ones(8, 8) for _ in SPECS], torch.ones(16, 8)
    train = fp.train_step(loss, fp.optim.adamw(0.1), MESH, PLAN)
    state, found = calls(lambda: train.init(params))
    assert found["resolve"] == 1
    (state, _), found = calls(lambda: train(state, x))
    assert found["resolve"] == 1 and found["broadcast_specs"] <= 20
    (state, _), found = calls(lambda: train(state, x))
    assert found["resolve"] == 0
    evaluate = train.compile(PLAN(loss))
    _, found = calls(lambda: evaluate(state, x))
    assert found["resolve"] == 1
    step = fp.compile(fp.grad_and_value(PLAN(loss)), MESH)
    assert calls(lambda: step.lower(params, x))[1]["resolve"] == 1
    assert calls(lambda: step(params, x))[1]["resolve"] == 0


def test_what_is_known_without_shapes_is_printed() -> None:
    plan = fp.chain(fp.tensor_parallel("tensor", {"w": P(None, "tensor")}), fp.zero(3, "data"), fp.accumulate(2))
    assert repr(plan(loss)).splitlines() == [
        "loss → tensor_parallel('tensor') → zero(3, 'data') → accumulate(2)",
        "  params: {'w': P(None, 'tensor')} over 'tensor'; at rest a dim of each over 'data'",
        "  x: dim 0 over 'data'; the dims that data axes split, or dim 0, over 'microbatch'",
    ]
    assert str(plan(loss)) == repr(plan(loss)).splitlines()[0]


def test_the_resolved_layouts_print_by_leaf() -> None:
    plan = fp.chain(fp.tensor_parallel("tensor", {"w": P(None, "tensor")}), fp.zero(1, "data"))
    params, x = {"w": torch.ones(4, 6), "b": torch.ones(3)}, torch.ones(4, 4)
    found = plan(loss).resolve((params, x), Mesh(data=2, tensor=2))
    assert repr(found).splitlines() == [
        "zero(1, 'data') on Mesh(data=2, tensor=2)",
        "  0/b: P(reduced={'data'}), at rest P(), in the update P('data', padded={0: 3})",
        "  0/w: P(None, 'tensor', reduced={'data'}), at rest P(None, 'tensor'), in the update P('data', 'tensor')",
        "  1: P('data')",
    ]
    assert found == plan(loss).resolve((params, x), Mesh(data=2, tensor=2))
    assert hash(found) == hash(plan(loss).resolve((params, x), Mesh(data=2, tensor=2)))


def test_a_call_in_a_trace_knows_the_full_shapes() -> None:
    """ZeRO-3 shards dim 0 of 8 rows over 4 ranks. A shard has 2 rows, which they do not divide."""
    local = fp.zero(3, "data")(lambda w, x: (x @ w).pow(2).sum())
    w, x = torch.arange(32.0).view(8, 4).double(), torch.ones(4, 8).double()

    def twice(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        w = w - fp.grad(local)(w, x)
        return w - fp.grad(local)(w, x)

    step = fp.compile(twice, Mesh(data=4), in_specs=(P("data"), P("data")), out_specs=P("data"))

    def plain(w: torch.Tensor) -> torch.Tensor:
        return w - torch.func.grad(lambda w: (x @ w).pow(2).sum())(w)

    assert torch.equal(step(w, x), plain(plain(w)))


# ---------------------------------------------------------------------------------------------------------------------
# A dim that two transforms shard
# ---------------------------------------------------------------------------------------------------------------------

SEEDS = st.integers(0, 9)


def product(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return ((x @ params["w"]) @ params["v"]).square().sum()


@settings(max_examples=6, deadline=None)
@given(
    block=st.integers(1, 5),
    tensor=st.integers(2, 3),
    data=st.integers(2, 4),
    stage=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_a_dim_of_tensor_parallel_is_padded_at_rest(block: int, tensor: int, data: int, stage: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(-2, 3, shape, generator=generator).double()  # noqa: E731
    params, x = {"w": draw(3, block * tensor), "v": draw(block * tensor, 2)}, draw(data, 3)
    split = fp.tensor_parallel("tensor", {"w": P(None, "tensor"), "v": P("tensor")})
    plan = fp.chain(split, fp.zero(stage, "data", {"w": P(None, "data"), "v": P("data")}))
    mesh = Mesh(data=data, tensor=tensor)
    fp.testing.assert_equivalent(product, plan, mesh, params, x, exact=True)
    after = []
    for train in (fp.train_step(product, fp.optim.sgd(1.0, momentum=0.5), *each) for each in ((mesh, plan), (Mesh(),))):
        state = train.init(params)
        for _ in range(2):
            state, _ = train(state, x)
        after.append(train.params(state))
    assert all(torch.equal(after[0][key], after[1][key]) for key in params)


def test_such_a_dim_is_saved_and_restored(tmp_path: Any) -> None:
    split = fp.tensor_parallel("tensor", {"w": P(None, "tensor"), "v": P("tensor")})
    plan = fp.chain(split, fp.zero(3, "data", {"w": P(None, "data"), "v": P("data")}))
    params, x = {"w": torch.arange(18.0).view(3, 6).double(), "v": torch.ones(6, 2).double()}, torch.ones(4, 3).double()
    steps = [
        fp.train_step(product, fp.optim.adamw(0.1), Mesh(data=4, tensor=2), plan),
        fp.train_step(product, fp.optim.adamw(0.1), Mesh(data=3), fp.zero(3, "data")),
    ]
    state, _ = steps[0](steps[0].init(params), x)
    wanted = steps[0].whole(state)
    for number, (saves, restores) in enumerate((steps, steps[::-1])):
        saves.save(state, tmp_path / f"{number}")
        state = restores.restore(tmp_path / f"{number}")
        found = restores.whole(state)
        assert all(torch.equal(found[0][key], wanted[0][key]) for key in params)
        assert all(torch.equal(a, b) for a, b in zip(*map(leaves, (found[1], wanted[1])), strict=True))


def leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def test_a_dim_that_tensor_parallel_itself_does_not_divide_is_refused() -> None:
    split = fp.tensor_parallel("tensor", {"w": P(None, "tensor"), "v": P("tensor")})
    plan = fp.chain(split, fp.zero(3, "data", {"w": P(None, "data")}))
    params, x = {"w": torch.ones(3, 5), "v": torch.ones(5, 2)}, torch.ones(2, 3)
    with pytest.raises(SpecError, match="dim 1 of size 5 does not divide by 'tensor' of 2 ranks"):
        fp.compile(fp.grad(plan(product)), Mesh(data=2, tensor=2))(params, x)
