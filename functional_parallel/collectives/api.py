"""Public collectives, as functions of values.

Every function takes a pytree of tensors and an axis: a name, or a tuple of names, the first one major. In the
specifications below, x_i is the value of rank i and n is the number of ranks along the axis. V, I, U and R are the
states of `types`. Dims are dims of one rank's value and may be negative.

The examples run on `vmap(f, axis_name="i")`, where row i of the argument is x_i.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

from . import primitives
from .axes import Axes, axis_size, normalize_axes
from .leaves import NUMBERS, Leaf, checked_emit, emit_leaves, over_leaves
from .types import State, called

Tree = TypeVar("Tree")


# --- Reductions ---


def psum(x: Tree, axis: Axes) -> Tree:
    """Return the sum over the ranks, on every rank: Σ_i x_i.

    Type V → I, U → I. Transposes to `pvary` (for U: to a cast to Reduced). For a Python number c it returns n·c without
    communication. Booleans are counted, as in torch.sum. An Invariant operand is an error; write `x * axis_size(axis)`.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: psum(x, "i"), out_dims=None, axis_name="i")(torch.tensor([[1, 2], [3, 4]]))
    tensor([4, 6])

    Args:
        x: pytree of tensors or numbers.
        axis: mesh axis or axes to sum over.

    Returns:
        A pytree of the same shapes.

    Raises:
        UnboundAxisError: when the axis is not bound here.
        CollectiveTypeError: when x is known to be equal on all ranks.
    """

    def leaf(value: Leaf, axes: tuple[str, ...]) -> Leaf:
        if isinstance(value, NUMBERS):
            return value * axis_size(axes)
        return checked_emit("psum", value.to(torch.int64) if value.dtype == torch.bool else value, axes, src="auto")

    return over_leaves("psum", leaf, x, axis, numbers=True)


def pmean(x: Tree, axis: Axes) -> Tree:
    """Return the mean over the ranks, on every rank: Σ_i x_i / n.

    Type V → I, U → I. Transposes to `pvary` divided by n. The mean of the shards' means is the global mean only if all
    shards have the same size. If not, write `psum(total) / psum(count)`.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: pmean(x, "i"), out_dims=None, axis_name="i")(torch.tensor([1.0, 2.0, 6.0]))
    tensor(3.)

    Args:
        x: pytree of tensors or numbers.
        axis: mesh axis or axes to average over.

    Returns:
        A pytree of the same shapes.

    Raises:
        CollectiveTypeError: when x is known to be equal on all ranks.
    """

    def leaf(value: Leaf, axes: tuple[str, ...]) -> Leaf:
        with called("pmean"):
            total = psum(value, axes)
        return total / axis_size(axes)

    return over_leaves("pmean", leaf, x, axis, numbers=True)


def pmax(x: Tree, axis: Axes) -> Tree:
    """Return the elementwise maximum over the ranks, on every rank.

    Type V → I. It has no derivative. Under a transform that differentiates it, write `pmax(x.detach(), axis)`. NaN on
    any rank gives NaN on all ranks.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: pmax(x, "i"), out_dims=None, axis_name="i")(torch.tensor([[1, 4], [3, 2]]))
    tensor([3, 4])

    Args:
        x: pytree of tensors or numbers.
        axis: mesh axis or axes.

    Returns:
        A pytree of the same shapes.
    """
    return emit_leaves("pmax", x, axis, numbers=True)


def pmin(x: Tree, axis: Axes) -> Tree:
    """Return the elementwise minimum over the ranks, on every rank.

    Type V → I. It has no derivative. Under a transform that differentiates it, write `pmin(x.detach(), axis)`. NaN on
    any rank gives NaN on all ranks.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: pmin(x, "i"), out_dims=None, axis_name="i")(torch.tensor([[1, 4], [3, 2]]))
    tensor([1, 2])

    Args:
        x: pytree of tensors or numbers.
        axis: mesh axis or axes.

    Returns:
        A pytree of the same shapes.
    """
    return emit_leaves("pmin", x, axis, numbers=True)


def psum_scatter(x: Tree, axis: Axes, dim: int = 0) -> Tree:
    """Return chunk i of the sum over the ranks on rank i: (Σ_j x_j)[i].

    Type V → V, U → V. Transposes to `all_gather` (for U: to Reduced). It equals `psum` followed by `pscatter`, at half
    the traffic.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: psum_scatter(x, "i"), axis_name="i")(torch.tensor([[1, 2], [3, 4]]))
    tensor([[4],
            [6]])

    Args:
        x: pytree of tensors.
        axis: mesh axis or axes.
        dim: the dim to split; its size must be divisible by n.

    Returns:
        A pytree of the same shapes, with the size of `dim` divided by n.

    Raises:
        CollectiveShapeError: when there is no such dim, or n does not divide its size.
    """
    return emit_leaves("psum_scatter", x, axis, dim=dim, src="auto")


# --- Gathering and slicing ---


def all_gather(x: Tree, axis: Axes, dim: int = 0, to: str = "varying") -> Tree:
    """Return the values of all ranks, concatenated along a dim, on every rank: [x_0, …, x_(n-1)].

    Type V → V, I or R, as specified by `to`. To Varying or Reduced it transposes to `psum_scatter`: each rank has a
    separate gradient of the full tensor, and the gradients are summed. To Invariant it transposes to `pscatter`: all
    ranks have one gradient.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: all_gather(x, "i", to="invariant"), out_dims=None, axis_name="i")(torch.tensor([[1, 2], [3, 4]]))
    tensor([1, 2, 3, 4])

    Args:
        x: pytree of tensors.
        axis: mesh axis or axes.
        dim: dim of the concatenation.
        to: "varying", "invariant" or "reduced".

    Returns:
        A pytree of the same shapes, with the size of `dim` multiplied by n.

    Raises:
        CollectiveShapeError: when there is no such dim.
    """
    return emit_leaves("all_gather", x, axis, dim=dim, dst=to)


def pscatter(x: Tree, axis: Axes, dim: int = 0) -> Tree:
    """Return chunk i of an Invariant value on rank i: x[i]. Nothing is sent.

    Type I → V. Transposes to `all_gather(to="invariant")`.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: pscatter(x, "i"), in_dims=None, axis_name="i", axis_size=2)(torch.tensor([1, 2, 3, 4]))
    tensor([[1, 2],
            [3, 4]])

    Args:
        x: pytree of tensors, equal on all ranks.
        axis: mesh axis or axes.
        dim: the dim to split; its size must be divisible by n.

    Returns:
        A pytree of the same shapes, with the size of `dim` divided by n.

    Raises:
        CollectiveShapeError: when there is no such dim, or n does not divide its size.
    """
    return emit_leaves("pscatter", x, axis, dim=dim)


# --- Moving ---


def all_to_all(x: Tree, axis: Axes, split_dim: int, concat_dim: int) -> Tree:
    """Return, on rank i, chunk i of every rank's value, concatenated: [x_0[i], …, x_(n-1)[i]].

    Type V → V. Transposes to itself with the dims swapped. It converts a value from sharded along `concat_dim` to
    sharded along `split_dim`.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: all_to_all(x, "i", 0, 0), axis_name="i")(torch.tensor([[1, 2], [3, 4]]))
    tensor([[1, 3],
            [2, 4]])

    Args:
        x: pytree of tensors.
        axis: mesh axis or axes.
        split_dim: the dim to split; its size must be divisible by n.
        concat_dim: dim of the concatenation.

    Returns:
        A pytree of the same shapes, with the size of `split_dim` divided and of `concat_dim` multiplied by n.

    Raises:
        CollectiveShapeError: when there is no such dim, or n does not divide its size.
    """
    return emit_leaves("all_to_all", x, axis, split_dim=split_dim, concat_dim=concat_dim)


def ppermute(x: Tree, axis: Axes, pairs: Iterable[tuple[int, int]]) -> Tree:
    """Send each source's value to its target. The result is zeros on ranks that are not a target.

    Type V → V. Transposes to the inverse pairs.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: ppermute(x, "i", [(0, 1), (1, 2)]), axis_name="i")(torch.tensor([1, 2, 3]))
    tensor([0, 1, 2])

    Args:
        x: pytree of tensors.
        axis: mesh axis or axes.
        pairs: (source, target) ranks; no source and no target twice.

    Returns:
        A pytree of the same shapes.

    Raises:
        CollectiveShapeError: when a rank does not exist, sends twice or receives twice.
    """
    return emit_leaves("ppermute", x, axis, pairs=list(pairs))


def pbroadcast(x: Tree, axis: Axes, source: int = 0) -> Tree:
    """Return the value of one rank on every rank: x_source.

    Type V → I. The transpose keeps the gradient on the source and is zero on the other ranks.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: pbroadcast(x, "i", source=2), out_dims=None, axis_name="i")(torch.tensor([1, 2, 3]))
    tensor(3)

    Args:
        x: pytree of tensors.
        axis: mesh axis or axes.
        source: rank that provides the value.

    Returns:
        A pytree of the same shapes.

    Raises:
        CollectiveShapeError: when there is no such rank.
    """
    return emit_leaves("pbroadcast", x, axis, source=source)


# --- Casts, which send nothing, and the index of the rank ---


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
    return emit_leaves("pcast", x, axis, numbers=True, src=src, dst=State(to).value)


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
