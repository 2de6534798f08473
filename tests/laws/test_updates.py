"""An update of any form is that of full parameters, under every ZeRO stage; a false declaration is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P

ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "double": lambda x: 2 * x,
    "clamp": lambda x: x.clamp(-3, 3),
    "shift": lambda x: x + 1,
    "positive": lambda x: torch.where(x > 0, x, 0),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "squares": lambda x: x * x.square().sum(),
    "cumsum": lambda x: x.cumsum(-1) if x.ndim else x,
    "cumsum of rows": lambda x: x.cumsum(0) if x.ndim else x,
    "flip": lambda x: x.flip(0) if x.ndim else x,
    "rows": lambda x: x - x.sum(0, keepdim=True) if x.ndim else x,
    "largest": lambda x: x - x.max(),
    "length": lambda x: x * len(x) if x.ndim else x,
    "roll": lambda x: x.roll(1, -1) if x.ndim else x,
}
PLANS: dict[str, tuple[Any, Mesh]] = {
    "zero 1": (fp.zero(1, "data"), Mesh(data=2)),
    "zero 2": (fp.zero(2, "data"), Mesh(data=3)),
    "zero 3": (fp.zero(3, "data"), Mesh(data=2)),
    "tensor, zero 3": (
        fp.chain(fp.tensor_parallel("tensor", {"a": P(None, "tensor"), "b": P("tensor")}), fp.zero(3, "data")),
        Mesh(data=2, tensor=2),
    ),
}
steps = st.lists(st.sampled_from([*ELEMENTWISE, *OTHERS]), min_size=1, max_size=3)
sizes = st.sampled_from([2, 4, 6])  # even: tensor parallelism splits these dims


def optimizer_of(names: list[str], momentum: bool) -> fp.optim.Optimizer:
    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        held = optree.tree_map(torch.add, state, grads) if momentum else grads

        def changed(g: Tensor) -> Tensor:
            for name in names:
                g = ({**ELEMENTWISE, **OTHERS})[name](g).remainder(17)  # small integers: every sum is exact
            return g

        return optree.tree_map(lambda p, g: p - changed(g), params, held), held if momentum else state

    def init(params: Any) -> Any:
        return optree.tree_map(torch.zeros_like, params) if momentum else ()

    return fp.optim.Optimizer(init, update)


def loss(params: Any, x: Tensor) -> Tensor:
    return ((x @ params["a"]) * params["b"]).sum() + params["c"].sum()


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-3, 4, shape, generator=generator).double() for name, shape in shapes.items()}


@settings(max_examples=25, deadline=None)
@given(steps, st.booleans(), st.sampled_from([*PLANS]), st.integers(1, 5), sizes, st.integers(1, 5))
def test_any_update_is_that_of_full_parameters(
    names: list[str], momentum: bool, plan: str, rows: int, columns: int, free: int
) -> None:
    transform, mesh = PLANS[plan]
    optimizer = optimizer_of(names, momentum)
    params = drawn({"a": (rows, columns), "b": (columns,), "c": (free,)}, 0)
    step = fp.train_step(loss, optimizer, mesh, transform)
    state, wanted, own = step.init(params), params, optimizer.init(params)
    for seed in (1, 2):
        x = drawn({"x": (12, rows)}, seed)["x"]
        state, _ = step(state, x)
        wanted, own = optimizer.update(torch.func.grad(loss)(wanted, x), own, wanted)
    for found, right in zip(*map(optree.tree_leaves, (step.params(state), wanted)), strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("name", [*ELEMENTWISE, *OTHERS])
def test_a_declaration_is_checked(name: str) -> None:
    optimizer, params = optimizer_of([name], momentum=True), drawn({"a": (3, 4), "b": (4,), "c": (2, 3, 2)}, 0)
    if name in ELEMENTWISE:
        fp.testing.assert_elementwise(optimizer, params)
    else:
        with pytest.raises(fp.errors.NotEquivalentError, match=r"declares by .* is elementwise, and it is not"):
            fp.testing.assert_elementwise(optimizer, params)
