"""Checks that the rows of the migration tables share. Each trains or computes with what a row returns."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

import functional_parallel as fp
from functional_parallel.training import TrainStep
from sharding_specs import Mesh, P

from .names import Model, adamw, loss, loss_of, params, x, y

__all__ = [
    "BODY",
    "DATA",
    "UNCHANGED",
    "close",
    "counts",
    "first_loss",
    "in_body",
    "in_precision",
    "moves_activations",
    "products",
    "recomputes",
    "same_loop",
    "splits_activations",
    "traced_twice",
    "trained",
    "trains",
]

DATA = Mesh(data=2)
BODY = torch.arange(16.0).reshape(4, 4)
UNCHANGED = fp.remat(where="none")
STEPS = 2


def close(found: Any, want: Any, **tolerances: float) -> bool:
    """Return True if values agree to the tolerances of torch.testing. If not, raise an error with the difference."""
    torch.testing.assert_close(found, want, **tolerances)
    return True


@cache
def losses_of_torch(clip: float | None = None) -> list[float]:
    """Losses of torch's own loop on one device."""
    torch.manual_seed(0)
    module = Model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss_of(module, x, y)
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        losses.append(value.item())
    return losses


def first_loss(value: torch.Tensor) -> bool:
    return close(value.item(), losses_of_torch()[0])


def same_loop(train: TrainStep, clip: float | None = None, rtol: float = 1e-4) -> bool:
    """Whether a training step has the losses of torch's loop."""
    state = train.init(params)
    losses = []
    for _ in range(STEPS):
        state, metrics = train(state, x, y)
        losses.append(metrics.loss.item())
    return close(losses, losses_of_torch(clip), rtol=rtol, atol=0)


def trained(plan: Any, mesh: Mesh = DATA, rtol: float = 1e-4, **options: Any) -> TrainStep:
    """Train under a plan, compare with torch's loop, and return the step."""
    train = fp.train_step(loss, adamw, mesh, plan, **options)
    assert same_loop(train, rtol=rtol)
    return train


def trains(mesh: Mesh = DATA, kinds: str | None = None, rtol: float = 1e-4) -> Callable[[Any], bool]:
    """Check of a plan: it trains as torch does, with exactly these kinds of collectives, if given."""

    def check(plan: Any) -> bool:
        found = {kind for kind, _ in trained(plan, mesh, rtol).program.counts()}
        return kinds is None or found == set(kinds.split())

    return check


def in_precision(dtype: str, sums: str = "f32") -> Callable[[Any], bool]:
    """Check of a plan: it trains in a dtype, and sums gradients over ranks in another."""

    def check(plan: Any) -> bool:
        program = trained(plan, rtol=3e-2).program
        summed = [one.operand for one in program.collectives() if one.kind.startswith("psum") and one.operand.ndim]
        return any(f"{dtype}[" in line for line in program.lines()) and all(str(one).startswith(sums) for one in summed)

    return check


def counts(plan: Any, mesh: Mesh = DATA, **options: Any) -> dict[str, int]:
    """Number of collectives of a training step, by kind."""
    found: dict[str, int] = {}
    for (kind, _), number in trained(plan, mesh, **options).program.counts().items():
        found[kind] = found.get(kind, 0) + number
    return found


def products(plan: Any, f: Callable[..., Any] = loss, arguments: tuple[Any, ...] = (params, x, y)) -> int:
    """Number of products of matrices in the program of value and gradients, which must be those of the function."""
    step = fp.compile(fp.grad_and_value(plan(f)), Mesh())
    close(step(*arguments), torch.func.grad_and_value(f)(*arguments))
    return sum(" mm(" in line or "addmm(" in line for line in step.program.lines())


def recomputes(plan: Any) -> bool:
    """Whether a plan for one rank recomputes products of matrices."""
    return products(plan) > products(UNCHANGED)


def in_body(in_spec: P, out_spec: P, want: torch.Tensor, mesh: Mesh | None = None) -> Callable[[Any], bool]:
    """Check of a function of a shard of `BODY`: the result, put together by its spec."""

    def check(f: Any) -> bool:
        return close(fp.shard_map(f, mesh or Mesh(tensor=2), in_spec, out_spec)(BODY), want)

    return check


def traced_twice(f: Any) -> bool:
    """Of four calls in a model, the trace runs two."""
    seen: list[Any] = []

    def model(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return f(f(f(f(x, w), w), w), w).sum()  # type: ignore[no-any-return]

    weight = torch.randn(4, 4)
    sys.setprofile(lambda frame, event, _: seen.append(event) if frame.f_code is f.__wrapped__.__code__ else None)
    try:
        value = fp.compile(fp.data_parallel("data")(model), DATA)(weight, x)
    finally:
        sys.setprofile(None)
    return seen.count("call") == 2 and close(value, model(weight, x))


def _beside_plain(plan: Any, plain: Any) -> tuple[Any, Any] | None:
    """Return the programs of two plans for gradients of a network with large activations, if the bits are equal."""

    def deep(params: Any, x: torch.Tensor) -> torch.Tensor:
        for w in params.values():
            x = torch.tanh(x @ w)
        return x.square().mean()

    weights = {"first": torch.randn(8, 8), "second": torch.randn(8, 8)}
    steps = [fp.compile(fp.grad(each(deep)), Mesh(tensor=2)) for each in (plan, plain)]
    rows = torch.randn(4096, 8)
    one, other = (step(weights, rows) for step in steps)
    same = all(torch.equal(one[name], other[name]) for name in weights)
    return (steps[0].program, steps[1].program) if same else None


def splits_activations(transform: Any) -> bool:
    """A large activation between layers is gathered for the backward."""
    split = fp.tensor_parallel("tensor", {"*": P("tensor")})
    programs = _beside_plain(fp.chain(transform, split), split)
    assert programs is not None
    gathers = [each.counts().get(("all_gather", ("tensor",)), 0) for each in programs]
    return gathers[0] > gathers[1]


def moves_activations(transform: Any) -> bool:
    """A large activation goes to the host and back."""
    split = fp.tensor_parallel("tensor", {"*": P("tensor")})
    programs = _beside_plain(fp.chain(split, transform), split)
    return programs is not None and sorted(programs[0].bytes_moved()) == [("device", "host"), ("host", "device")]
