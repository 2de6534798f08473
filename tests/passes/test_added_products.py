"""Products are written into sums that no other op needs: exactly, with less memory, and only there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

import functional_parallel as fp
from functional_parallel.collectives.types import Type
from functional_parallel.ir import NodeInfo, Traced, aval_of, info, set_info
from functional_parallel.passes import added_products
from functional_parallel.passes.added_products import fuse_matmul_accumulate
from functional_parallel.program.work import flops
from sharding_specs import Mesh

aten = torch.ops.aten
WIDTH = 4
FUSES = added_products.fuses
PLANS: dict[str, tuple[Any, Mesh]] = {
    "nothing": (None, Mesh()),
    "data": (fp.data_parallel("data"), Mesh(data=2)),
    "zero 3": (fp.zero(3, "data"), Mesh(data=2)),
    "microbatches": (fp.accumulate(2), Mesh()),
    "tensor": (fp.tensor_parallel("tensor", {"a": "rows columns/tensor", "b": "rows/tensor columns"}), Mesh(tensor=2)),
    "pipeline": (fp.pipeline("pipe", schedule="1f1b", microbatches=4), Mesh(pipe=2)),
    "pipeline of halves": (fp.pipeline("pipe", schedule="zb-h1", microbatches=4), Mesh(pipe=2)),
}


@pytest.fixture(autouse=True, scope="module")
def fused_in_every_dtype() -> Iterator[None]:
    """In float64 too, in which sums of products of small integers are exact."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(added_products, "fuses", lambda like: True)
        yield


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


def parameters() -> dict[str, Tensor]:
    return {name: draw(WIDTH, WIDTH, seed=ord(name)) for name in "abcd"}


def step(f: Any, plan: str, x: Tensor, **options: Any) -> tuple[Any, dict[str, Tensor], Tensor]:
    """The program of a training step, and the parameters and the loss after it."""
    transform, mesh = PLANS[plan]
    train = fp.train_step(f, fp.optim.sgd(1.0), mesh, transform, **options)
    state, metrics = train(train.init(parameters()), x)
    return train.program, train.params(state), metrics.loss


def ops(program: Any) -> Counter[str]:
    """How often each op is called, over all programs of a pipeline."""
    graphs = [program.traced] if hasattr(program, "traced") else [part.traced for part in program.every_program()]
    return Counter(str(node.target) for graph in graphs for node in graph.nodes)


TERMS = {
    "product": lambda x, v, w: x @ v,
    "transposed": lambda x, v, w: x @ v.T,
    "two": lambda x, v, w: (x @ v) @ w,
    "of parameters": lambda x, v, w: x @ (v @ w + v @ v),
    "itself": lambda x, v, w: x,
    "of squares": lambda x, v, w: (x * x) @ v,
}
LAYER = st.lists(
    st.tuples(st.sampled_from(sorted(TERMS)), st.sampled_from("abcd"), st.sampled_from("abcd")), min_size=1, max_size=4
)


@pytest.mark.filterwarnings("ignore::functional_parallel.NotTrainedWarning")  # few terms leave parameters unused
@given(layers=st.lists(LAYER, min_size=2, max_size=3), plan=st.sampled_from(sorted(PLANS)), seed=st.integers(0, 100))
def test_a_step_is_the_same_as_without(layers: list[list[tuple[str, str, str]]], plan: str, seed: int) -> None:
    def f(params: dict[str, Tensor], x: Tensor) -> Tensor:
        for terms in layers:
            added = (TERMS[kind](x, params[v], params[w]) for kind, v, w in terms)
            x = sum(added, x @ params["d"]).clamp(-3, 3)
        return (x * x).sum()

    x = draw(8, WIDTH, seed=seed)
    _, params, loss = step(f, plan, x)
    program, wanted, wanted_loss = step(f, plan, x, without=("in place",))
    assert ops(program)["aten.addmm_.default"] == 0
    assert torch.equal(loss, wanted_loss)
    assert all(torch.equal(params[name], wanted[name]) for name in wanted)


def of_three(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """An input of three products, as of attention's: its gradient is a sum of three."""
    h = (x @ params["d"]).clamp(-3, 3)
    q, k, v = (h @ params[name] for name in "abc")
    return (q * k * v).sum()


@pytest.mark.parametrize("plan", PLANS)
def test_sums_are_written_where_they_lie(plan: str) -> None:
    x = draw(16, WIDTH, seed=0)
    program, _, _ = step(of_three, plan, x)
    apart, _, _ = step(of_three, plan, x, without=("in place",))
    into, added = ops(program)["aten.addmm_.default"], ops(apart)["aten.add.Tensor"] - ops(program)["aten.add.Tensor"]
    alone = ops(program)["aten.add_.Tensor"]  # in a pipeline, programs that only add, for parts before their turn
    assert into >= 1 and bool(alone) is plan.startswith("pipeline")
    assert ops(program)["aten.mm.default"] == ops(apart)["aten.mm.default"] - into
    assert added == into + alone
    assert program.memory().peak <= apart.memory().peak


def test_what_is_multiplied_into_a_sum_counts_as_work() -> None:
    x = draw(16, WIDTH, seed=0)
    traced = [step(of_three, "nothing", x, without=without)[0].traced for without in ((), ("in place",))]
    assert any(node.target is aten.addmm_.default for node in traced[0].nodes)
    assert len({sum(map(flops, each.nodes)) for each in traced}) == 1


@pytest.mark.parametrize("first", [Type(), Type(data="varying")], ids=["shared", "of each rank"])
def test_a_value_that_ranks_share_is_not_written_by_each(first: Type) -> None:
    """A product that is the same on all ranks is simulated once for all of them; the sum is not."""
    traced = Traced(fx.Graph())
    for name, each in (("a", first), ("b", Type()), ("x", Type(data="varying")), ("c", Type())):
        traced.inputs.append(traced.graph.placeholder(name))
        set_info(traced.inputs[-1], NodeInfo(aval_of(torch.ones(WIDTH, WIDTH)), type=each))
    a, b, x, c = traced.inputs
    two = [traced.graph.call_function(aten.mm.default, pair) for pair in ((a, b), (x, c))]
    traced.outputs = [traced.graph.call_function(aten.add.Tensor, tuple(two))]
    for node in (*two, *traced.outputs):
        set_info(node, info(x))
    traced.seal()
    assert fuse_matmul_accumulate(traced) is bool(first)


def written(f: Any, *args: Tensor) -> list[fx.Node]:
    train = fp.train_step(lambda params, *rest: f(params["w"], *rest).sum(), fp.optim.sgd(1.0), Mesh(), None)
    program = train.lower(train.init({"w": args[0]}), *args[1:])
    return [node for node in program.traced.nodes if node.target is aten.addmm_.default]


def test_what_somebody_needs_is_left_alone() -> None:
    w, x, row = draw(WIDTH, WIDTH, seed=2), draw(WIDTH, WIDTH, seed=3), draw(WIDTH, seed=4)
    assert len(written(lambda w, x: (x @ x.T + x.T @ x) @ w, w, x)) == 1
    assert not written(lambda w, x: (x @ x.T + x) @ w, w, x), "an input is no value of the step's own"
    assert not written(lambda w, x, row: (row + x @ x.T) @ w, w, x, row), "of another shape"
    assert not written(lambda w, x: torch.add(x @ x.T, x.T @ x, alpha=2) @ w, w, x), "scaled"

    def twice(w: Tensor, x: Tensor) -> Tensor:
        first, second = x @ x.T, x.T @ x
        return (first + second) @ w + first * second

    assert not written(twice, w, x), "both are needed once more"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_whether_products_are_fused_depends_on_dtype_and_device_alone(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(added_products, "fuses", FUSES)
    w, x = torch.ones(8, 8, dtype=dtype), torch.ones(8, 8, dtype=dtype)
    wide = dtype in (torch.float32, torch.float64)
    assert bool(written(lambda w, x: (x @ x.T + x.T @ x) @ w, w, x)) is not wide
    assert FUSES(aval_of(w.to("meta"))), "devices other than the CPU add after they multiply"
