"""The systematic suite of shard_map: function × mesh × shapes × legal specs against a loop over ranks, and every
single-edit mutation of a legal out spec refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.collectives import reference
from functional_parallel.testing import strategies
from sharding_specs import Mesh, P, SpecError, shard_leaf, unshard_leaf

MESHES = [Mesh(i=2), Mesh(i=4), Mesh(i=2, j=2), Mesh(j=3, i=2), Mesh(i=2, j=2, k=2), Mesh(j=2, i=1)]
SPECS = [P(), P("i"), P(None, "i"), P("j"), P("i", "j"), P(("i", "j")), P(("j", "i")), P(None, ("i", "j")), P("j", "i")]


@dataclass(frozen=True)
class Body:
    """A body on shards, and the same for all ranks at once: lists of parts in, lists of parts out, by rank."""

    name: str
    run: Callable[[torch.Tensor], torch.Tensor]
    loop: Callable[[Mesh, list[torch.Tensor]], list[torch.Tensor]]
    out: Callable[[P], P | None]  # the legal out spec for an in spec; None where the body does not type


def over(axis: str, perform: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    def loop(mesh: Mesh, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        results: list[Any] = list(parts)
        for members in mesh.groups(axis):
            for rank, value in zip(members, perform([parts[m] for m in members]), strict=True):
                results[rank] = value
        return results

    return loop


def each(f: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    return lambda mesh, parts: [f(part) for part in parts]


def if_varying(axis: str, out: Callable[[P], P]) -> Callable[[P], P | None]:
    return lambda spec: out(spec) if axis in spec.axes else None


def gathered(spec: P) -> P:
    """all_gather over i along dim 0 of what i splits on dim 0, as its innermost axis."""
    return spec.without({"i"})


BODIES = [
    Body("square", lambda x: x * x, each(lambda x: x * x), lambda spec: spec),
    Body(
        "psum", lambda x: fp.psum(x, "i"), over("i", reference.psum), if_varying("i", lambda spec: spec.without({"i"}))
    ),
    Body(
        "psum of a sum",
        lambda x: fp.psum(x.sum(), "i"),
        lambda mesh, parts: over("i", reference.psum)(mesh, [part.sum() for part in parts]),
        lambda spec: P() if spec.axes == {"i"} else None,
    ),
    Body(
        "pmax", lambda x: fp.pmax(x, "i"), over("i", reference.pmax), if_varying("i", lambda spec: spec.without({"i"}))
    ),
    Body(
        "all_gather",
        lambda x: fp.all_gather(x, "i", 1, to="invariant"),
        over("i", lambda parts: reference.all_gather(parts, 1)),
        lambda spec: gathered(spec) if spec.dim_axes()[1:] == (("i",),) else None,
    ),
    Body(
        "psum_scatter",
        lambda x: fp.psum_scatter(x, "i", 1),
        over("i", lambda parts: reference.psum_scatter(parts, 1)),
        if_varying("i", lambda spec: _scattered(spec.without({"i"}))),
    ),
    Body(
        "pvary", lambda x: fp.pvary(x, "i"), each(lambda x: x), lambda spec: None if "i" in spec.axes else _added(spec)
    ),
    Body(
        "pscatter",
        lambda x: fp.pscatter(x, "i", 0),
        over("i", lambda parts: [part.chunk(len(parts))[n] for n, part in enumerate(parts)]),
        lambda spec: P("i") if spec == P() else P(("j", "i")) if spec == P("j") else None,
    ),
    Body(
        "ring",
        lambda x: fp.ppermute(x, "i", [(r, (r + 1) % fp.axis_size("i")) for r in range(fp.axis_size("i"))]),
        over("i", lambda parts: [parts[n - 1] for n in range(len(parts))]),
        if_varying("i", lambda spec: spec),
    ),
    Body(
        "shift",
        lambda x: fp.ppermute(x, "i", [(r, r + 1) for r in range(fp.axis_size("i") - 1)]),
        over("i", lambda parts: [torch.zeros_like(parts[0]), *parts[:-1]]),
        if_varying("i", lambda spec: spec),
    ),
    Body(
        "own number",
        lambda x: x * (fp.axis_index("i") + 1),  # by 0 alone, on an axis of one rank, zeros would be partial sums too
        lambda mesh, parts: [part * (mesh.axis_index(rank, "i") + 1) for rank, part in enumerate(parts)],
        if_varying("i", lambda spec: spec),
    ),
]


def _scattered(spec: P) -> P:
    """i as the innermost axis of dim 1."""
    first, second = [*spec.dims, (), ()][:2]
    return P(first, (*second, "i"))


def _added(spec: P) -> P:
    """Copies along i, stacked outermost on dim 0."""
    first = spec.dims[0] if spec.dims else ()
    return P(("i", *first), *spec.dims[1:])


def legal() -> Iterator[tuple[Body, Mesh, P, P]]:
    for body, mesh, spec in itertools.product(BODIES, MESHES, SPECS):
        out = body.out(spec) if spec.axes <= set(mesh.axis_names) else None
        if out is not None and out.axes <= set(mesh.axis_names):
            yield body, mesh, spec, out


CASES = list(legal())


def whole(mesh: Mesh) -> torch.Tensor:
    size = 2 * mesh.size * mesh.size
    return (torch.arange(size * size, dtype=torch.float64).reshape(size, size) % 23) - 11


def test_there_are_cases_of_every_body() -> None:
    assert len(CASES) > 100
    assert {body.name for body, *_ in CASES} == {body.name for body in BODIES}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.name)
def test_a_body_is_what_a_loop_over_ranks_says(body: Body) -> None:
    for _, mesh, spec, out in (case for case in CASES if case[0] is body):
        x = whole(mesh)
        parts = [shard_leaf(x, spec, mesh, rank) for rank in mesh.ranks]
        want = unshard_leaf(body.loop(mesh, parts), out, mesh)
        found = fp.shard_map(body.run, mesh, (spec,), out)(x)
        assert torch.equal(found, want), f"{spec} on {mesh}"


def mutations(spec: P, mesh: Mesh) -> Iterator[P]:
    """Every spec one edit away: an axis dropped, added, replaced, moved to the unreduced or the reduced ones."""
    free = [axis for axis in mesh.axis_names if axis not in spec.axes]
    for axis in spec.axes:
        yield spec.without({axis})
        yield P(*spec.without({axis}).dims, unreduced={axis})
        yield P(*spec.without({axis}).dims, reduced={axis})
        for other in free:
            yield P(*(tuple(other if f == axis else f for f in dim) for dim in spec.dims))
    for axis in free:
        yield P(*spec.dims, unreduced={axis})
        yield P(*spec.dims, reduced={axis})
        for dim in range(2):
            dims = [*map(list, spec.dims), [], []][:2]
            dims[dim].append(axis)
            yield P(*map(tuple, dims))


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.slow)], ids=["one in six", "all"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.name)
def test_every_mutation_of_an_out_spec_is_refused(body: Body, step: int) -> None:
    """Law 7: a legal spec mutated into a wrong one never passes."""
    refused = 0
    for _, mesh, spec, out in [case for case in CASES if case[0] is body][::step]:
        for wrong in set(mutations(out, mesh)):
            said = "results do not lie as out_specs say|specs do not fit the results"
            with pytest.raises((fp.OutSpecError, SpecError), match=said):
                fp.shard_map(body.run, mesh, (spec,), wrong)(whole(mesh))
            refused += 1
    assert refused


@pytest.mark.parametrize("fill", [torch.zeros, torch.ones])
def test_zeros_join_partial_sums(fill: Callable[..., torch.Tensor]) -> None:
    """Every rank's zeros add up to zeros, its ones do not to ones."""

    def body(x: torch.Tensor) -> torch.Tensor:
        partial = fp.pcast(x, "i", to="unreduced")
        return fp.psum(fill(4, dtype=x.dtype).index_put((torch.tensor([2, 0]),), partial * 3), "i")

    x = torch.arange(4.0)
    f = fp.shard_map(body, Mesh(i=2), P("i"), P())
    if fill is torch.zeros:
        assert f(x).tolist() == [12, 0, 6, 0]
        assert torch.func.grad(lambda x: f(x).sum())(x).tolist() == [3, 3, 3, 3]
    else:
        with pytest.raises(fp.TypingError, match=r"index_put\.default is not linear"):
            f(x)


DERIVATIVES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda f, w: fp.grad(f)(w),
    "hessian": lambda f, w: fp.hessian(f)(w),
    "jvp of grad": lambda f, w: fp.jvp(fp.grad(f), (w,), (w + 1,)),
    "grad of jvp": lambda f, w: fp.grad(lambda w: fp.jvp(f, (w,), (w + 1,))[1])(w),
}


@pytest.mark.parametrize("name", DERIVATIVES)
@settings(max_examples=4)
@given(data=st.data())
def test_derivatives_by_what_ranks_share_sum_over_what_they_hold(name: str, data: st.DataObject) -> None:
    """Of a function that closes over shards, which an Invariant meets."""
    mesh = data.draw(strategies.meshes().filter(lambda mesh: mesh.axis_names))
    axes, derivative = mesh.axis_names, DERIVATIVES[name]
    x = torch.arange(3.0 * 2 * mesh.size, dtype=torch.float64).reshape(-1, 3) % 7 - 3
    w = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)

    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        return derivative(lambda w: fp.psum(((x @ w) ** 3).sum(), axes), w)

    found = fp.shard_map(body, mesh, (P(axes), P()), P())(x, w)
    torch.testing.assert_close(found, derivative(lambda w: ((x @ w) ** 3).sum(), w), rtol=0, atol=0)


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_by_a_constant(name: str) -> None:
    """Which no argument gave a type: all ranks hold it."""
    x = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) % 7 - 3
    w = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    f = fp.shard_map(
        lambda x: DERIVATIVES[name](lambda w: fp.psum(((x @ w) ** 3).sum(), "i"), w), Mesh(i=2), P("i"), P()
    )
    torch.testing.assert_close(f(x), DERIVATIVES[name](lambda w: ((x @ w) ** 3).sum(), w), rtol=0, atol=0)


def test_a_body_in_a_body_takes_a_constant() -> None:
    whole = torch.arange(4.0)
    inner = fp.shard_map(lambda w: fp.psum(w.sum(), "j"), Mesh(j=2), P("j"), P())
    f = fp.shard_map(lambda x: fp.psum(x.sum(), "i") * inner(whole), Mesh(i=2, j=2), P("i"), P())
    assert f(torch.ones(4)) == 4 * 6


def test_in_specs_are_a_tuple() -> None:
    with pytest.raises(fp.LayoutError, match=r"1 entries for 2 arguments.*a list .* write a tuple"):
        fp.shard_map(torch.add, Mesh(i=2), [P("i"), P("i")], P("i"))(torch.ones(2), torch.ones(2))
