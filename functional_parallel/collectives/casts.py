"""Public functions that do not communicate: casts between the states of a value, and the index of the rank."""

from __future__ import annotations

from typing import TypeVar

import torch  # noqa: F401 - the examples use it
from torch import Tensor

from . import primitives
from .axes import Axes, normalize_axes
from .leaves import NUMBERS, Leaf, checked_emit, over_leaves
from .types import State

__all__ = ["axis_index", "pcast", "pvary"]

Tree = TypeVar("Tree")


def pcast(x: Tree, axis: Axes, to: str, src: str = "auto") -> Tree:
    """Change the type of a value without changing or sending it.

    ========  ==========================================  ==========================
    type      meaning                                     transpose
    ========  ==========================================  ==========================
    I → V     from here on the ranks may differ           psum
    I → R     the gradient is wanted as partial sums      psum, of partial sums
    R → V     from here on the ranks may differ           V → U
    V → U     the values are partial sums                 R → V
    ========  ==========================================  ==========================

    >>> from functional_parallel.collectives import vmap
    >>> gradient = torch.func.grad(lambda w, x: pcast(w, "i", to="varying") * x)
    >>> w, xs = torch.tensor(1.0), torch.tensor([1.0, 2.0, 3.0])
    >>> vmap(gradient, in_dims=(None, 0), out_dims=None, axis_name="i")(w, xs)
    tensor(6.)

    Args:
        x: pytree of tensors; numbers are Invariant and pass unchanged.
        axis: mesh axis or axes.
        to: "varying", "reduced" or "unreduced".
        src: state of x. In a compiled program the checker infers it. In an eager run, "auto" means Invariant (for
            `to="unreduced"`: Varying), so a cast from Reduced must pass `src="reduced"`.

    Returns:
        A pytree of the same values.

    Raises:
        CollectiveTypeError: when x is known to have another state than the source of the cast.
    """

    def leaf(value: Leaf, axes: tuple[str, ...]) -> Leaf:
        if isinstance(value, NUMBERS):
            return value
        return checked_emit("pcast", value, axes, src=src, dst=State(to).value)

    return over_leaves("pcast", leaf, x, axis, numbers=True)


def pvary(x: Tree, axis: Axes) -> Tree:
    """Cast an Invariant value to Varying. Nothing is sent, and its gradient is summed over the ranks.

    Type I → V. Transposes to `psum`. For a parameter that is combined with sharded data, this is data parallelism.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: pvary(x, "i"), in_dims=None, axis_name="i", axis_size=3)(torch.tensor(7))
    tensor([7, 7, 7])

    Args:
        x: pytree of tensors, equal on all ranks.
        axis: mesh axis or axes.

    Returns:
        A pytree of the same values.
    """
    return pcast(x, axis, "varying")


def axis_index(axis: Axes) -> Tensor:
    """Return the index of this rank along an axis, or along several axes, the first one major.

    Type V, an integer scalar. It has no derivative.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: axis_index("i") * x, axis_name="i")(torch.tensor([5, 5, 5]))
    tensor([ 0,  5, 10])

    Args:
        axis: mesh axis or axes.

    Returns:
        An int64 scalar.
    """
    return primitives.axis_index(normalize_axes(axis))
