"""A function on shards takes shards: what does not lie as its layout declares is refused, never taken as it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, P

DATA = Mesh(data=2)
BOTH = Mesh(data=2, tensor=2)
SPLIT = fp.tensor_parallel("tensor", {"a": P(None, "tensor"), "b": P("tensor")})
PLAN = fp.data_parallel("data")

Params = dict[str, torch.Tensor]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


def params() -> Params:
    return {"a": numbers(3, 4), "b": numbers(4, 2, seed=1)}


def squares(params: Params, x: torch.Tensor) -> torch.Tensor:
    return ((x @ params["a"]).relu() @ params["b"]).square().sum()


def peaks(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Not linear in what the ranks hold, so a whole batch taken for a shard shows."""
    return (x @ w).sum().square()


def said(call: Callable[[], Any], error: type[Exception] = fp.ArgumentSpecError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# Refused
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("derivative", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd, fp.grad, lambda f: f])
def test_a_whole_batch_is_no_shard(derivative: Any) -> None:
    """What torch.func drops is the layout: in_specs that say "whole" were believed, and every rank took all of it."""
    f = derivative(PLAN(peaks))
    compiled = fp.compile(lambda w, x: f(w, x), DATA, in_specs=(P(), P()), out_specs=P())
    found = said(lambda: compiled(numbers(3), numbers(4, 3)))
    assert re.match(r"test_declared.py:\d+: peaks → data_parallel\('data'\)", found)
    assert "  1: P('data') is declared, but along 'data' it is invariant (every rank" in found
    assert "in_specs that match, or fp.pscatter(x, 'data')" in found
    assert "fp.grad, fp.grad_and_value, fp.vmap and fp.hessian keep the layout" in found
    assert "  0: " not in found


def test_every_argument_at_fault_is_listed() -> None:
    step = fp.compile(torch.func.grad(SPLIT(squares)), Mesh(tensor=2), in_specs=(P(), P("tensor")), out_specs=P())
    found = said(lambda: step(params(), numbers(4, 3)))
    assert "  0/a: P(None, 'tensor') is declared, but along 'tensor' it is invariant (every rank" in found
    assert "  0/b: P('tensor') is declared, but along 'tensor' it is invariant (every rank" in found
    assert "  1: P() is declared, but along 'tensor' it is varying (every rank may" in found


def test_partial_sums_are_no_parameters() -> None:
    def body(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return PLAN(peaks)(fp.pcast(w, "data", to="unreduced"), x)

    f = fp.shard_map(body, DATA, in_specs=(P("data"), P("data")), out_specs=P())
    found = said(lambda: f(numbers(6), numbers(4, 3)))
    assert "0: P() is declared, but along 'data' it is unreduced (the ranks hold partial sums)" in found
    assert "write fp.psum(x, 'data') first" in found


def test_zero_wants_parameters_reduced() -> None:
    step = fp.compile(torch.func.grad(fp.zero(2, "data")(peaks)), DATA, in_specs=(P(), P("data")), out_specs=P())
    assert "write fp.pcast(x, 'data', to='reduced'), or say so in in_specs: P(…, reduced={'data'})" in said(
        lambda: step(numbers(3), numbers(4, 3))
    )


def test_another_dim_is_another_shard() -> None:
    """Types agree here; what contradicts is the spec that the argument came in with."""
    f = fp.data_parallel("data")(lambda w, x: (x * w).sum().square())
    step = fp.compile(torch.func.grad(f), DATA, in_specs=(P(), P(None, "data")), out_specs=P())
    assert "1: P('data') is declared, but it came in as P(None, 'data')" in said(lambda: step(numbers(), numbers(4, 4)))


def test_a_dim_at_rest_is_the_one_that_was_chosen() -> None:
    f = fp.zero(3, "data", P(None, "data"))(lambda w, x: (x @ w).sum())
    step = fp.compile(torch.func.grad(f), DATA, in_specs=(P("data"), P("data")), out_specs=P("data"))
    assert "0: P(None, 'data') is declared, but it came in as P('data')" in said(
        lambda: step(numbers(4, 4), numbers(4, 2))
    )


def test_padding_of_a_dim_that_is_not_mapped_stays() -> None:
    f = fp.zero(3, "data", P("data"))(lambda w, x: (x * w).sum())
    fp.compile(f, DATA)(numbers(3), numbers(2, 3))  # from whole shapes it knows how they are padded
    in_specs = (P(None, "data", padded={1: 3}), P("data"))
    step = fp.compile(torch.func.vmap(f, (0, None)), DATA, in_specs=in_specs, out_specs=P())
    samples, x = numbers(2, 3), numbers(2, 3)
    assert torch.equal(step(samples, x), (x.sum(0) * samples).sum(1))


def test_a_mapped_dim_that_is_split_is_no_batch() -> None:
    f = torch.func.vmap(PLAN(peaks), (None, 0))
    step = fp.compile(f, DATA, in_specs=(P(), P("data")), out_specs=P("data"))
    assert "1: the dim that vmap maps is split over 'data'" in said(lambda: step(numbers(3), numbers(6, 4, 3)))


@pytest.mark.parametrize("outer", [fp.data_parallel("data"), fp.zero(3, "data")], ids=str)
@pytest.mark.parametrize("derivative", [lambda f: f, fp.grad], ids=["value", "gradient"])
def test_a_plan_inside_a_function_of_another_plan(outer: Any, derivative: Any) -> None:
    """The outer trace is typed only when it runs: a mark goes with each argument until then."""

    def loss(params: Params, x: torch.Tensor) -> torch.Tensor:
        return SPLIT(squares)(params, x)

    found = said(lambda: fp.compile(derivative(outer(loss)), BOTH)(params(), numbers(4, 3)))
    assert "0/a: P(None, 'tensor') is declared, but along 'tensor' it is invariant (every rank" in found
    assert "fp.chain" in found
    assert re.match(r"test_declared.py:\d+: squares → tensor_parallel\('tensor'\)", found)


def test_a_plan_inside_a_function_of_another_plan_on_what_it_wants() -> None:
    """The same, with the slices taken by hand: the mark is silent, and leaves no op behind."""

    def loss(params: Params, x: torch.Tensor) -> torch.Tensor:
        own = {"a": fp.pscatter(params["a"], "tensor", 1), "b": fp.pscatter(params["b"], "tensor", 0)}
        return SPLIT(squares)(own, x)

    step = fp.compile(fp.grad_and_value(PLAN(loss)), BOTH)
    grads, value = step(params(), numbers(4, 3))
    wanted, reference = torch.func.grad_and_value(squares)(params(), numbers(4, 3))
    assert torch.equal(value, reference)
    assert all(torch.equal(grads[name], wanted[name]) for name in wanted)
    assert not any("declared" in str(node.target) for node in step.program.traced.nodes)


def test_the_vmap_oracle() -> None:
    call = fp.vmap(PLAN(peaks), (None, None), out_dims=None, axis_name="data", axis_size=2)
    assert "1: P('data') is declared, but along 'data' it is invariant (every rank" in said(
        lambda: call(numbers(3), numbers(2, 3))
    )
    x = numbers(4, 3)
    right = fp.vmap(PLAN(peaks), (None, 0), out_dims=None, axis_name="data")
    assert torch.equal(right(numbers(3), x.view(2, 2, 3)), peaks(numbers(3), x))


def test_a_compiled_function_is_no_local_one() -> None:
    step = fp.compile(PLAN(peaks), DATA)
    for specs in ((P(), P("data")), (P(), P())):
        outer = fp.compile(lambda w, x: step(w, x) * 2, DATA, in_specs=specs, out_specs=P())
        found = said(lambda outer=outer: outer(numbers(3), numbers(4, 3)), fp.LayoutError)
        assert "is called inside a function that is being traced" in found
    with pytest.raises(fp.LayoutError, match="call there what it was compiled from"):
        fp.compile(PLAN(lambda w, x: step(w, x)), DATA)(numbers(3), numbers(4, 3))


# ---------------------------------------------------------------------------------------------------------------------
# Right, and silent
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("derivative", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_in_specs_that_match(derivative: Any) -> None:
    w, x = numbers(3), numbers(4, 3)
    step = fp.compile(derivative(PLAN(peaks)), DATA, in_specs=(P(), P("data")), out_specs=P())
    assert torch.equal(step(w, x), derivative(peaks)(w, x))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_specs_that_match_zero(stage: int) -> None:
    w, x = numbers(4), numbers(4, 4)
    specs = {"reduced": {"data"}} if stage < 3 else {}
    own = P(*(["data"] if stage == 3 else []), **specs)
    step = fp.compile(
        torch.func.grad(fp.zero(stage, "data")(peaks)), DATA, in_specs=(own, P("data")), out_specs=own.dual()
    )
    assert torch.equal(step(w, x), torch.func.grad(peaks)(w, x))


@pytest.mark.parametrize("inner", [[], [SPLIT]], ids=["alone", "with tensor"])
@pytest.mark.parametrize("outer", [[], [fp.accumulate(2)], [fp.pipeline("data", microbatches=2)]], ids=str)
def test_chains(inner: list[Any], outer: list[Any]) -> None:
    plan = fp.chain(*inner, *([] if outer and "pipeline" in str(outer[0]) else [PLAN]), *outer)
    mesh = BOTH
    grads = fp.compile(fp.grad(plan(squares)), mesh)(params(), numbers(4, 3))
    wanted = torch.func.grad(squares)(params(), numbers(4, 3))
    assert all(torch.equal(grads[name], wanted[name]) for name in wanted)


def test_a_body_that_calls_two_local_functions() -> None:
    """A teacher and a student on one shard of the batch."""

    def body(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        local, teacher = PLAN(peaks), PLAN(lambda w, x: (x @ w).square().sum())
        return local(w, x) + teacher(w * 2, x + 1)

    f = fp.shard_map(body, DATA, in_specs=(P(), P("data")), out_specs=P())
    w, x = numbers(3), numbers(4, 3)
    assert torch.equal(f(w, x), peaks(w, x) + ((x + 1) @ (w * 2)).square().sum())


def test_a_body_that_scatters_by_hand() -> None:
    f = fp.shard_map(
        lambda w, x: fp.grad(PLAN(peaks))(w, fp.pscatter(x, "data")), DATA, in_specs=(P(), P()), out_specs=P()
    )
    w, x = numbers(3), numbers(4, 3)
    assert torch.equal(f(w, x), torch.func.grad(peaks)(w, x))


def test_per_sample_gradients() -> None:
    w, x = numbers(3), numbers(6, 5, 3)
    per_sample = fp.vmap(fp.grad(peaks), (None, 0), spmd_axis="data")
    assert torch.equal(fp.compile(per_sample, DATA)(w, x), torch.func.vmap(torch.func.grad(peaks), (None, 0))(w, x))


# ---------------------------------------------------------------------------------------------------------------------
# vmap keeps the layout
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [PLAN, fp.zero(3, "data"), fp.zero(2, "data")], ids=str)
@pytest.mark.parametrize(("dims", "w", "x"), [
    ((None, 0), (3,), (5, 4, 3)),
    ((0, None), (5, 3), (4, 3)),
    ((-1, 1), (3, 5), (4, 5, 3)),
], ids=["batches", "models", "both"])  # fmt: skip
def test_vmap(plan: Any, dims: Any, w: tuple[int, ...], x: tuple[int, ...]) -> None:
    """Each sample is what the plan splits; the dim that is mapped lies whole."""
    for f in (peaks, torch.func.grad(peaks)):
        local = plan(peaks) if f is peaks else fp.grad(plan(peaks))
        args = numbers(*w), numbers(*x, seed=1)
        found = fp.compile(fp.vmap(local, dims), DATA)(*args)
        assert torch.equal(found, torch.func.vmap(f, dims)(*args))


def test_vmap_of_trees() -> None:
    """An ensemble: each leaf has its own mapped dim, and each result."""
    many = {"a": numbers(3, 5, 4), "b": numbers(5, 4, 2, seed=1)}
    plan = fp.chain(SPLIT, PLAN)
    dims = ({"a": 1, "b": 0}, None)
    found = fp.compile(fp.vmap(fp.grad(plan(squares)), dims, {"a": 2, "b": 0}), BOTH)(many, numbers(4, 3))
    wanted = torch.func.vmap(torch.func.grad(squares), dims, {"a": 2, "b": 0})(many, numbers(4, 3))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_vmap_of_results_that_stay_split() -> None:
    f = fp.vmap(PLAN(lambda w, x: x @ w), (None, 1), 1)
    w, x = numbers(3), numbers(4, 5, 3)
    assert torch.equal(fp.compile(f, DATA)(w, x), x @ w)


def test_vmap_carries_its_layout() -> None:
    with pytest.raises(fp.LayoutError, match=r"data_parallel\('data'\) → vmap carries its layout"):
        fp.compile(fp.vmap(PLAN(peaks), (None, 0)), DATA, in_specs=(P(), P("data")), out_specs=P())
