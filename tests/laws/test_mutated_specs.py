"""Every legal spec of a plan, changed in one place, is refused or computes the same function to the bit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P

Dims = tuple[tuple[Any, ...], ...]

BATCH, TIME, WIDTH, TOKENS, LAYERS = 4, 2, 4, 8, 2
PARAMS = {
    "table": (TOKENS, WIDTH),
    "up": (WIDTH, 2 * WIDTH),
    "bias": (2 * WIDTH,),
    "down": (2 * WIDTH, WIDTH),
    "layers": (LAYERS, WIDTH, WIDTH),
}


def loss_with(stream: Any) -> Callable[..., Tensor]:
    """A model closed on the integers: lookup, hidden layer, stacked layers, constrained stream."""

    def loss(params: dict[str, Tensor], tokens: Tensor) -> Tensor:
        x = params["table"][tokens]
        h = torch.relu(fp.constrain(x, stream) @ params["up"] + params["bias"])
        x = x + fp.constrain(h @ params["down"], stream)
        for layer in params["layers"].unbind():
            x = x + (x @ layer).clamp(-2, 2)
        return ((x @ params["table"].T).amax(-1) * (1 + tokens)).sum()

    return loss


def arguments() -> tuple[dict[str, Tensor], Tensor]:
    """Integers without ties in a maximum: the table holds powers of two."""
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randint(-2, 3, shape, generator=generator).double() for name, shape in PARAMS.items()}
    params["table"] = 2.0 ** torch.arange(TOKENS * WIDTH).reshape(TOKENS, WIDTH).fmod(11).double()
    return params, torch.arange(BATCH * TIME).reshape(BATCH, TIME) * 3 % TOKENS


@dataclass(frozen=True)
class Specs:
    """All specs of a plan: parameters, batch, and the stream that the model constrains."""

    params: dict[str, Any]
    batch: Any
    stream: Any

    def plan(self, kind: str, mesh: Mesh) -> Any:
        if kind == "from_specs":
            return fp.from_specs(self.params, mesh, batch=self.batch, microbatches=2)
        parts = [fp.tensor_parallel(axis, self.params) for axis in ("tensor", "expert") if axis in mesh.axis_names]
        stage = 1 if kind == "stage 1" else 3
        return fp.chain(*parts, fp.zero(stage, "data", batch=self.batch), fp.accumulate(2))

    def mutated(self, other_axes: tuple[str, ...]) -> Iterator[tuple[str, Specs]]:
        for name, spec in self.params.items():
            for how, changed in mutations(spec, other_axes):
                yield f"{name} {how}", Specs({**self.params, name: changed}, self.batch, self.stream)
        for how, changed in mutations(self.batch, other_axes):
            yield f"batch {how}", Specs(self.params, changed, self.stream)
        for how, changed in mutations(self.stream, other_axes):
            yield f"stream {how}", Specs(self.params, self.batch, changed)


def mutations(spec: Dims, axes: tuple[str, ...]) -> Iterator[tuple[str, Dims]]:
    """All specs that differ in one place; as dims, since some are refused where a spec is made."""
    seen = {spec}
    for how, changed in _changes(spec, axes):
        if changed not in seen:
            seen.add(changed)
            yield f"{how}: {changed}", changed


def _changes(spec: Dims, axes: tuple[str, ...]) -> Iterator[tuple[str, Dims]]:
    held = [(dim, place) for dim, factors in enumerate(spec) for place in range(len(factors))]
    for dim, place in held:
        factors, axis = spec[dim], spec[dim][place]
        dropped = (*factors[:place], *factors[place + 1 :])
        yield "dropped", _with(spec, dim, dropped)
        for other in axes:
            yield "renamed", _with(spec, dim, (*factors[:place], other, *factors[place + 1 :]))
        for target in range(len(spec) + 1):
            if target != dim:
                without = _with(spec, dim, dropped) + ((),) * (target == len(spec))
                yield "moved", _with(without, target, (*without[target], axis))
        yield "blocked", _with(spec, dim, (*factors[:place], 2, *factors[place:]))
        yield "reordered", _with(spec, dim, factors[::-1])
    for dim in range(len(spec) + 1):
        longer = spec + ((),) * (dim == len(spec))
        for axis in axes:
            yield "added inside", _with(longer, dim, (*longer[dim], axis))
            yield "added outside", _with(longer, dim, (axis, *longer[dim]))
    for first in range(len(spec)):
        for second in range(first):
            swapped = list(spec)
            swapped[first], swapped[second] = swapped[second], swapped[first]
            yield "swapped", tuple(swapped)
    yield "longer", (*spec, ())
    yield "shorter", spec[:-1]


def _with(spec: Dims, dim: int, factors: tuple[Any, ...]) -> Dims:
    return (*spec[:dim], factors, *spec[dim + 1 :])


# -----------------------------------------------------------------------------
# Plans
# -----------------------------------------------------------------------------

T, D, PIPE = ("tensor",), ("data",), ("pipe",)
TENSOR = {"table": (T, ()), "up": ((), T), "bias": (T,), "down": (T, ()), "layers": ((), (), T)}
CASES = {
    "from_specs": (
        Specs({"table": (T, D), "up": (D, T), "bias": (T,), "down": (T, D), "layers": ((), T, D)}, (D, ()), (D, T, ())),
        Mesh(data=2, tensor=2),
    ),
    "from_specs with a pipeline": (
        Specs({**TENSOR, "layers": (PIPE, (), T)}, (D, ()), (D, (), ())),
        Mesh(pipe=2, data=1, tensor=2),
    ),
    "stage 1": (Specs(TENSOR, (D, ()), (D, T, ())), Mesh(data=2, tensor=2)),
    "stage 3, two axes": (
        Specs({**TENSOR, "up": (("expert",), T), "layers": ((), ("tensor", "expert"), ())}, (D, ()), ((), (), ())),
        Mesh(expert=2, data=2, tensor=2),
    ),
}


def made(specs: Specs) -> Specs:
    spec = lambda dims: P(*dims)  # noqa: E731
    return Specs({name: spec(dims) for name, dims in specs.params.items()}, spec(specs.batch), spec(specs.stream))


def outcome(case: str, specs: Specs, mesh: Mesh) -> tuple[str, Any]:
    """The gradients and the loss, or the refusal."""
    kind = "from_specs" if case.startswith("from_specs") else case.partition(",")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rules that split nothing
        try:
            found = made(specs)
            step = fp.compile(fp.grad_and_value(found.plan(kind, mesh)(loss_with(found.stream))), mesh)
            return "computed", step(*arguments())
        except (ValueError, TypeError) as error:
            return "refused", str(error)


def check(case: str, part: int, of: int) -> dict[str, int]:
    specs, mesh = CASES[case]
    gradients, value = fp.grad_and_value(loss_with(P()))(*arguments())
    counts = {"computed": 0, "refused": 0}
    everything = [("unchanged", specs), *specs.mutated((*mesh.axis_names, "nowhere"))]
    for how, changed in everything[part::of]:
        kind, found = outcome(case, changed, mesh)
        counts[kind] += 1
        if kind == "refused":
            assert len(found) > 20, f"{case}, {how}: refused with nothing but {found!r}"
            assert how != "unchanged", found
            continue
        assert torch.equal(found[1], value), f"{case}, {how}: the loss is {found[1]}, not {value}"
        for name, gradient in gradients.items():
            assert torch.equal(found[0][name], gradient), f"{case}, {how}: another gradient of {name}"
    return counts


@pytest.mark.parametrize("case", CASES)
def test_some_mutations_are_refused_or_change_nothing(case: str) -> None:
    specs, mesh = CASES[case]
    total = 1 + sum(1 for _ in specs.mutated((*mesh.axis_names, "nowhere")))
    assert sum(check(case, 0, math.ceil(total / 6)).values()) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_mutation_is_refused_or_changes_nothing(case: str) -> None:
    counts = check(case, 0, 1)
    print(case, counts)
    assert min(counts.values()) > 20
