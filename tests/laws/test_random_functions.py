"""Laws 1 and 2: a partitioned function equals the function it came from, to the bit, with its derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.runtime import SimulatedRuntime
from sharding_specs import Mesh, P

from .random_functions import Program, arguments, layouts, meshes, programs, shapes

SEEDS = st.integers(0, 1000)
Arguments = tuple[dict[str, torch.Tensor], torch.Tensor]


def drawn(data: st.DataObject, seed: int) -> tuple[fp.transforms.Plan, Mesh, Arguments]:
    """Tensors of a drawn shape, split any legal way over one or two axes; the batch or the storage over another."""
    mesh = data.draw(meshes(), label="mesh")
    rows, inner = data.draw(shapes(mesh), label="rows and columns")
    specs, batch = data.draw(layouts(mesh, rows=rows, inner=inner), label="specs")
    samples = mesh.shape.get("data", 1)
    is_split = rows % samples == 0 and "data" in mesh.shape
    chosen = [
        fp.tensor_parallel(axis, specs, batch=None if is_split else batch) for axis in mesh.axis_names if axis != "data"
    ]
    if "data" in mesh.shape:
        chosen.append(fp.zero(data.draw(st.integers(0, 3), label="stage"), "data", batch=None if is_split else P()))
    return fp.chain(*chosen), mesh, arguments(seed, rows=rows, inner=inner)


@settings(max_examples=14)
@given(f=programs(), seed=SEEDS, data=st.data())
def test_values_and_gradients(f: Program, seed: int, data: st.DataObject) -> None:
    plan, mesh, args = drawn(data, seed)
    fp.testing.assert_equivalent(f, plan, mesh, *args, exact=True)


@settings(max_examples=7)
@given(f=programs(3), seed=SEEDS, data=st.data())
def test_second_derivatives(f: Program, seed: int, data: st.DataObject) -> None:
    """A Hessian-vector product, forward over reverse, with any ZeRO stage and the batch split."""
    plan, mesh, (params, x) = drawn(data, seed)
    generator = torch.Generator().manual_seed(seed)
    direction = {name: torch.randint(-2, 3, w.shape, generator=generator).double() for name, w in params.items()}
    local = plan(f)

    def product(gradient):  # type: ignore[no-untyped-def]
        return lambda p, v, x: fp.jvp(lambda q: gradient(q, x), (p,), (v,))[1]

    specs, of_batch = local.resolve((params, x), mesh).arguments
    duals = optree.tree_map(P.dual, specs)
    step = fp.compile(product(fp.grad(local)), mesh, in_specs=(specs, specs, of_batch), out_specs=duals)
    want = product(fp.grad(f))(params, direction, x)
    found = step(params, direction, x)
    assert all(torch.equal(found[name], want[name]) for name in params)


@pytest.mark.parametrize("view", ["padded", "row", "diagonal", "windows"])
def test_second_derivatives_through_views(view: str) -> None:
    """A tangent of a view's gradient is linear in partial sums; ZeRO-3 cuts off what it filled up."""
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "padded": lambda w: w.sum(0),
        "row": lambda w: w[1],
        "diagonal": lambda w: w.diagonal(),
        "windows": lambda w: w.reshape(-1).unfold(0, 3, 2).sum(0),
    }
    local = fp.zero(3, "data")(lambda w, x: (x + views[view](w)).pow(3).sum())
    w, x = torch.arange(9.0).reshape(3, 3).double(), torch.arange(6.0).reshape(2, 3).double()

    def product(f, w, v, x):  # type: ignore[no-untyped-def]
        return fp.jvp(lambda q: fp.grad(f)(q, x), (w,), (v,))[1]

    rows, of_batch = local.resolve((w, x), Mesh(data=2)).arguments
    step = fp.compile(partial(product, local), Mesh(data=2), in_specs=(rows, rows, of_batch), out_specs=rows)
    assert torch.equal(step(w, w, x), product(lambda w, x: (x + views[view](w)).pow(3).sum(), w, w, x))


@pytest.mark.parametrize("ranks", [1, 2])
def test_second_derivatives_that_are_zero(ranks: int) -> None:
    """The gradient of an unused parameter, and what a clamp's gradient is filled with, are zeros: also partial sums."""
    params = {"used": torch.ones(2, 2).double(), "unused": torch.ones(2, 2).double()}
    x = torch.arange(4.0).reshape(2, 2).double()
    local = fp.zero(1, "data")(lambda p, x: (x + p["used"].sum(0)).clamp(-4, 4).square().sum())
    gathered = {name: P(reduced={"data"}) for name in params}
    summed = {name: P(unreduced={"data"}) for name in params}

    def product(p, v, x):  # type: ignore[no-untyped-def]
        return fp.jvp(lambda q: fp.grad(local)(q, x), (p,), (v,))[1]

    step = fp.compile(product, Mesh(data=ranks), in_specs=(gathered, gathered, P("data")), out_specs=summed)
    found = step(params, params, x)
    assert torch.equal(found["used"], torch.tensor([[8.0, 4.0], [8.0, 4.0]]).double())  # one of x is beyond 4
    assert not found["unused"].any()


@settings(max_examples=7)
@given(f=programs(3), seed=SEEDS, data=st.data())
def test_torch_func_applies_to_the_compiled_function(f: Program, seed: int, data: st.DataObject) -> None:
    """Simulated ranks run ordinary torch ops, so derivatives taken from outside prove the transposes a second time."""
    plan, mesh, (params, x) = drawn(data, seed)
    step = fp.compile(plan(f), mesh)
    found = torch.func.grad(lambda p: step(p, x))(params)
    want = torch.func.grad(lambda p: f(p, x))(params)
    assert all(torch.equal(found[name], want[name]) for name in params)


@settings(max_examples=7)
@given(f=programs(3), seed=SEEDS, data=st.data())
def test_computing_what_is_the_same_once_changes_nothing(f: Program, seed: int, data: st.DataObject) -> None:
    """Law 7: values that are the same on several ranks agree on all of them, bit for bit."""
    plan, mesh, (params, x) = drawn(data, seed)
    program = fp.compile(fp.grad_and_value(plan(f)), mesh).lower(params, x)
    tensors = [params[name] for name in sorted(params)] + [x]
    once = SimulatedRuntime(mesh).run_whole(program, tensors)
    runtime = SimulatedRuntime(mesh, deduplicate=False)
    handles = [runtime.shard(tensor, spec) for tensor, spec in zip(tensors, program.in_specs, strict=True)]
    for result, spec, whole in zip(runtime.run(program, handles), program.out_specs, once, strict=True):
        assert torch.equal(runtime.whole(result, spec), whole)
        for group in mesh.groups([axis for axis in mesh.axis_names if axis not in spec.axes | spec.unreduced]):
            assert all(torch.equal(result[group[0]], result[rank]) for rank in group)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_second_derivative_of_zero(stage: int) -> None:
    """A gradient that is constant is held as partial sums by ZeRO 1 and 2, as is its tangent of zeros."""
    w, x = torch.ones(4, dtype=torch.float64), torch.arange(8.0, dtype=torch.float64).reshape(2, 4)
    local = fp.zero(stage, "data")(lambda w, x: (x * w).sum())
    specs, of_batch = local.resolve((w, x), Mesh(data=2)).arguments
    product = lambda p, v, x: fp.jvp(lambda q: fp.grad(local)(q, x), (p,), (v,))[1]  # noqa: E731
    step = fp.compile(product, Mesh(data=2), in_specs=(specs, specs, of_batch), out_specs=specs.dual())
    assert torch.equal(step(w, w, x), torch.zeros_like(w))


def test_every_rank_has_what_a_function_closes_over() -> None:
    w, params, x = torch.arange(4.0).reshape(2, 2), torch.ones(2, 2), torch.arange(8.0).reshape(4, 2)
    mesh = Mesh(data=2)
    plan = fp.zero(3, "data")
    program = fp.compile(fp.grad(plan(lambda p, x: (torch.relu(x @ w) @ p).sum())), mesh).lower(params, x)
    (found,) = SimulatedRuntime(mesh, deduplicate=False).run_whole(program, [params, x])
    assert torch.equal(found, (x @ w).sum(0)[:, None].expand(2, 2))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("keepdim", [True, False])
def test_ties_share_a_maximums_gradient(sign: int, keepdim: bool) -> None:
    """All tied elements share alike, on whichever rank they lie: 3 here, 1 there is a quarter each."""
    x = torch.tensor([[5.0, 5.0, 5.0, 5.0, 1.0, 0.0, 2.0, 3.0]], dtype=torch.float64) * sign

    def f(x: torch.Tensor) -> torch.Tensor:
        return (torch.amax if sign > 0 else torch.amin)(x, 1, keepdim=keepdim).sum() * 8

    found = fp.compile(fp.grad(fp.tensor_parallel("i", P(None, "i"))(f)), Mesh(i=2))(x)
    assert torch.equal(found, torch.func.grad(f)(x))
    step = fp.compile(fp.tensor_parallel("i", P(None, "i"))(lambda x: x.max()), Mesh(i=4))
    assert step(x) == x.max()


def test_a_member_of_a_tuple_is_sliced() -> None:
    """A sort is whole along its dim; the values meet what is split."""
    w, x = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    f = lambda w, x: ((x @ w).sort(0).values * x).sum()  # noqa: E731
    fp.testing.assert_equivalent(f, fp.data_parallel("data"), Mesh(data=2), w, x, rtol=1e-12)
