"""Random functions that write in place, through views and with gradients off: all derivatives are torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from sharding_specs import Mesh, P

Op = Callable[[torch.Tensor], torch.Tensor]

VIEWS: dict[str, Op] = {
    "itself": lambda v: v,
    "from the second": lambda v: v[1:],
    "every other": lambda v: v[::2],
    "the last": lambda v: v[-1],
    "column": lambda v: v.select(-1, 0),
    "half": lambda v: v.chunk(2, -1)[-1],
    "unbound": lambda v: v.unbind(0)[0],
    "turned": lambda v: v.transpose(0, -1),
    "permuted": lambda v: v.permute(*range(1, v.ndim), 0),
    "unsqueezed": lambda v: v.unsqueeze(-1),
    "squeezed": lambda v: v.squeeze(),
    "flat": lambda v: v.view(-1),
    "diagonal": lambda v: v.diagonal(),
}

WRITES: dict[str, Op] = {
    "double": lambda v: v.mul_(2),
    "increase": lambda v: v.add_(1),
    "negate": lambda v: v.neg_(),
    "cut": lambda v: v.relu_(),
    "bound": lambda v: v.clamp_min_(1),
    "fill": lambda v: v.fill_(3),
    "fill the diagonal": lambda v: v.fill_diagonal_(3),
    "add its sum": lambda v: v.add_(v.detach().sum()),
    "copy": lambda v: v.copy_(v * 3),
}

STEPS = st.tuples(
    st.sampled_from(sorted(VIEWS)), st.sampled_from([None, *sorted(WRITES)]), st.integers(0, 7), st.booleans()
)


@dataclass(frozen=True)
class Program:
    """Views of what is there, some of them written to; then what all of them hold, squared."""

    steps: tuple[tuple[str, str | None, int, bool], ...]
    on_parameter: bool

    def __call__(self, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        values = [w * 1, x @ w]
        for view, write, which, is_on in self.steps:
            values.append(VIEWS[view](values[which % len(values)]))
            if write is not None:
                with torch.set_grad_enabled(is_on):
                    WRITES[write](values[-1])
        if self.on_parameter:
            with torch.no_grad():
                w.mul_(3)
        return sum((v.square() * (i + 1)).sum() for i, v in enumerate([*values, w]))  # type: ignore[return-value]


def arguments(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w, direction, x = torch.randint(-2, 3, (3, 4, 4), generator=generator).double()
    return w, direction, x


def by_torch(f: Callable[..., Any], *args: Any) -> Any:
    """What torch makes of it; it refuses some views, and to change what a backward needs."""
    try:
        return f(*(arg.clone() for arg in args))
    except (RuntimeError, IndexError):
        assume(False)


PLANS = {
    "one rank": (fp.data_parallel("d"), 1),
    "data": (fp.data_parallel("d"), 2),
    "zero": (fp.zero(3, "d"), 2),
    "columns": (fp.tensor_parallel("d", P(None, "d")), 2),
    "rows": (fp.tensor_parallel("d", P("d")), 2),
}


@pytest.mark.filterwarnings("ignore::functional_parallel.PartitionWarning")
@settings(max_examples=12)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=4).map(tuple),
    on_parameter=st.booleans(),
    plan=st.sampled_from(sorted(PLANS)),
    seed=st.integers(0, 100),
)
def test_values_gradients_and_tangents(
    steps: tuple[tuple[str, str | None, int, bool], ...], on_parameter: bool, plan: str, seed: int
) -> None:
    f, (w, direction, x) = Program(steps, on_parameter), arguments(seed)
    gradient, value = by_torch(torch.func.grad_and_value(f), w, x)
    transform, ranks = PLANS[plan]
    found = fp.compile(fp.grad_and_value(transform(f)), Mesh(d=ranks))(w, x)
    assert torch.equal(found[1], value) and torch.equal(found[0], gradient)
    wanted = by_torch(lambda w, v, x: torch.func.jvp(lambda w: f(w, x), (w,), (v,)), w, direction, x)
    forward = fp.compile(transform(f), Mesh(d=ranks))
    found = torch.func.jvp(lambda w: forward(w, x), (w,), (direction,))
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert torch.equal(torch.func.grad(forward)(w, x), gradient)


def test_a_diagonal_that_does_not_count() -> None:
    """As in a contrastive loss: no sample is its own negative."""

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        scores = (x @ w) @ (x @ w).T
        others = torch.ones_like(scores, dtype=torch.bool).fill_diagonal_(False)
        return scores.fill_diagonal_(-7).relu().sum() + (scores * others).sum()

    w, _, x = arguments(0)
    for transform, ranks in PLANS.values():
        fp.testing.assert_equivalent(loss, transform, Mesh(d=ranks), w, x, exact=True)
