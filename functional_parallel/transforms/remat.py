"""Rematerialisation: the backward computes forward values again, so that they need not be kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from ..local_function import LocalFunction, unsharded
from ..program.passes import Remat
from ..source import region
from .transform import Order, Transform

__all__ = ["recompute", "remat"]

_POLICIES = ("layers", "attention", "nothing")

F = TypeVar("F", bound=Callable[..., Any])


def remat(policy: str | Callable[..., bool] = "layers", *, every: int = 1, where: str = "*") -> Transform:
    """Keep fewer forward values for the backward, and compute the others again (arXiv 1604.06174).

    | policy | kept | computed again |
    |---|---|---|
    | "layers" | what one layer hands to the next | the inside of each layer |
    | "layers", every=k | what every k-th layer hands on | the inside of each run of k layers |
    | "attention" | all but attention's scores and probabilities (arXiv 2205.05198 §5) | those |
    | "nothing" | nothing | the whole forward |

    Layers are told apart by the paths of their parameters: `layers/0/…`, `layers/1/…`. Collectives inside what is
    computed again are performed again; random draws are keyed, so they repeat themselves. Only `jax.checkpoint`'s
    meaning is taken over, not its place: nothing in the model changes. To mark a function in a model, `fp.recompute`.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> def loss(params, x):
    ...     for layer in params["layers"]:
    ...         x = torch.tanh(torch.tanh(x @ layer["a"]) @ layer["b"])
    ...     return x.sum()
    >>> params = {"layers": [{"a": torch.ones(2, 8), "b": torch.ones(8, 2)}] * 3}
    >>> def products(plan):
    ...     program = fp.compile(fp.grad(plan(loss)), Mesh()).lower(params, torch.ones(4, 2))
    ...     return str(program).count("mm(")
    >>> products(fp.remat()) - products(fp.remat(where="none"))       # three layers' first product again
    3

    Args:
        policy: a name from the table, or a function from a node of the program (`torch.fx.Node`) to whether its value
            is kept.
        every: with "layers", how many layers make one run; about the square root of their number needs least memory.
        where: with "layers", a pattern for the paths of the layers to which the policy applies.

    Raises:
        ValueError: when there is no such policy, or `every` is not positive.
    """
    if not callable(policy) and policy not in _POLICIES:
        raise ValueError(f"remat({policy!r}): the policies are {', '.join(map(repr, _POLICIES))}, or a function")
    if every < 1:
        raise ValueError(f"remat(every={every}): runs have at least one layer")
    name = f"remat({getattr(policy, '__name__', repr(policy))}{f', every={every}' if every > 1 else ''})"

    def apply(f: Callable[..., Any]) -> LocalFunction:
        local = f if isinstance(f, LocalFunction) else unsharded(f)
        return local.asking(Remat(policy, every, where))

    return Transform(name, None, Order.PRECISION, apply)


def recompute(f: F) -> F:
    """Mark a function in a model whose inner values the backward computes again.

    >>> import torch, functional_parallel as fp
    >>> @fp.recompute
    ... def block(w, x):
    ...     return torch.tanh(torch.tanh(x @ w) @ w)

    Args:
        f: any function; outside `fp.compile` and `fp.train_step` the mark does nothing.
    """

    @functools.wraps(f)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with region(getattr(f, "__qualname__", "recompute")):
            return f(*args, **kwargs)

    return marked  # type: ignore[return-value]
