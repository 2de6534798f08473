"""A plan changes where a function is computed, never what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sharding_specs import Mesh

from ..compile import Compiled, compile
from ..derivatives import grad_and_value
from .compare import NotEquivalentError, compare
from .intermediate import first_difference

__all__ = ["NotEquivalentError", "assert_equivalent"]


def assert_equivalent(
    loss: Callable[..., Any],
    plan: Callable[..., Any],
    mesh: Mesh,
    params: Any,
    *batch: Any,
    exact: bool = False,
    rtol: float | None = None,
) -> Compiled:
    """Check that value and gradients under a plan are those of the plain function.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> step = fp.testing.assert_equivalent(
    ...     lambda w, x: (x @ w).relu().sum(), fp.data_parallel("data"), Mesh(data=2), torch.ones(3), torch.ones(4, 3),
    ...     exact=True)
    >>> step.program.counts()
    {('psum', ('data',)): 2}

    Args:
        loss: a scalar function of parameters and batch.
        plan: a transform or a chain.
        mesh: the mesh.
        params, batch: whole arguments.
        exact: whether every bit counts; true for functions closed on the integers, given integers in float64.
        rtol: largest difference allowed, relative to a leaf's largest value; by dtype without it. A gradient that is
            rounding alone may differ by what the largest gradient is rounded by.

    Returns:
        The compiled gradient, to look at its program.

    Raises:
        NotEquivalentError: naming the first leaf that differs, and the first op whose value does, with its source line;
            or saying that `loss` is no function of its arguments.
    """
    want_grads, want = grad_and_value(loss)(params, *batch)
    step = compile(grad_and_value(plan(loss)), mesh)
    grads, value = step(params, *batch)
    for name, got, right in (("value", value, want), ("gradient", grads, want_grads)):
        try:
            compare(got, right, f"{name} under {plan!r} on {mesh!r}", exact=exact, rtol=rtol)
        except NotEquivalentError as error:
            why = _unlike_before(want, loss(params, *batch))
            why = why or first_difference(loss, plan, mesh, (params, *batch), name, exact=exact, rtol=rtol)
            raise NotEquivalentError(f"{error}{why}") from None
    return step


def _unlike_before(first: torch.Tensor, again: torch.Tensor) -> str:
    """What to say of a function that is called twice and returns two values."""
    if torch.allclose(first, again, rtol=0, atol=0, equal_nan=True):
        return ""
    return (
        f"\nWithout a plan it returned {first.item()!r} first and {again.item()!r} when called again with the same "
        "arguments: it draws numbers, counts its calls or writes into a tensor, and a plan is of what does not"
    )
