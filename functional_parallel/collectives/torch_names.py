"""Collectives with the names of torch.distributed, as functions of values.

One program runs on all ranks, so every rank calls them and gets a result: zeros where torch.distributed would return
nothing. `send` and `recv` are a matched pair in one program, not two calls on two ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from . import shapes
from .api import all_gather, all_to_all, axis_index, pbroadcast, ppermute, psum, pvary
from .axes import Axes, axis_size
from .leaves import over_leaves, split_dim_of

Tree = TypeVar("Tree")


def broadcast(x: Tree, axis: Axes, source: int = 0) -> Tree:
    """Return the value of one rank on every rank. Alias of `pbroadcast`.

    Type V → I. The transpose keeps the gradient on the source and is zero on the other ranks.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: broadcast(x, "i", source=1), out_dims=None, axis_name="i")(torch.tensor([1, 2, 3]))
    tensor(2)

    Args:
        x: pytree of tensors.
        axis: mesh axis or axes.
        source: rank that provides the value.

    Returns:
        A pytree of the same shapes.
    """
    return pbroadcast(x, axis, source)


def scatter(x: Tree, axis: Axes, source: int = 0, dim: int = 0) -> Tree:
    """Return chunk i of the value of one rank on rank i: x_source[i].

    Type V → V. Transposes to `gather` to the source. To split an Invariant value, use `pscatter`, which sends nothing.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: scatter(x, "i", source=1), axis_name="i")(torch.tensor([[1, 2], [3, 4]]))
    tensor([[3],
            [4]])

    Args:
        x: pytree of tensors.
        axis: mesh axis or axes.
        source: rank that provides the value.
        dim: the dim to split; its size must be divisible by the number of ranks.

    Returns:
        A pytree of the same shapes, with the size of `dim` divided by the number of ranks.
    """

    def leaf(value: Tensor, axes: tuple[str, ...]) -> Tensor:
        at = split_dim_of("scatter", value, dim, axes)
        shapes.checked_rank("scatter", "source", source, axes)
        chunk = value.shape[at] // axis_size(axes)
        return all_to_all(value, axes, at, at).narrow(at, source * chunk, chunk)

    return over_leaves("scatter", leaf, x, axis)


def gather(x: Tree, axis: Axes, root: int = 0, dim: int = 0) -> Tree:
    """Return the values of all ranks, concatenated along a dim, on the root; zeros on the other ranks.

    Type V → V. Transposes to `scatter` from the root.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: gather(x, "i", root=1), axis_name="i")(torch.tensor([[1], [2]]))
    tensor([[0, 0],
            [1, 2]])

    Args:
        x: pytree of tensors.
        axis: mesh axis or axes.
        root: rank that gets the concatenation.
        dim: dim of the concatenation.

    Returns:
        A pytree of the same shapes, with the size of `dim` multiplied by the number of ranks.
    """
    return _only_on("gather", root, axis, all_gather(x, axis, dim))


def reduce(x: Tree, axis: Axes, root: int = 0) -> Tree:
    """Return the sum over the ranks on the root; zeros on the other ranks.

    Type V → V. Transposes to a broadcast from the root.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: reduce(x, "i", root=2), axis_name="i")(torch.tensor([1, 2, 3]))
    tensor([0, 0, 6])

    Args:
        x: pytree of tensors.
        axis: mesh axis or axes.
        root: rank that gets the sum.

    Returns:
        A pytree of the same shapes.
    """
    return _only_on("reduce", root, axis, pvary(psum(x, axis), axis))


@dataclass(frozen=True)
class InFlightValue(Generic[Tree]):
    """Value in flight from one rank to another. `recv` returns it."""

    value: Tree  # the received value on the target, zeros on all other ranks


def send(x: Tree, axis: Axes, source: int, target: int) -> InFlightValue[Tree]:
    """Send the value of one rank to another. All ranks call `send`. `recv` returns the value on the target.

    Type V → V. Transposes to a send from the target back to the source.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: recv(send(x, "i", source=0, target=2)), axis_name="i")(torch.tensor([5, 6, 7]))
    tensor([0, 0, 5])

    Args:
        x: pytree of tensors.
        axis: mesh axis or axes.
        source: rank that sends its value.
        target: rank that receives it.

    Returns:
        The value in flight.

    Raises:
        CollectiveShapeError: when there is no such rank.
    """
    return InFlightValue(ppermute(x, axis, [(source, target)]))


def recv(sent: InFlightValue[Tree]) -> Tree:
    """Return the value that was sent, on its target; zeros on the other ranks.

    >>> from functional_parallel.collectives import vmap
    >>> vmap(lambda x: recv(send(x, "i", source=1, target=0)), axis_name="i")(torch.tensor([5, 6]))
    tensor([6, 0])

    Args:
        sent: result of `send`.

    Returns:
        A pytree of the same shapes as the sent one.

    Raises:
        TypeError: when `sent` is not a result of `send`.
    """
    if not isinstance(sent, InFlightValue):
        raise TypeError(
            f"recv takes what fp.send returned, not {type(sent).__name__}: one program runs on all ranks, so write "
            "fp.recv(fp.send(x, axis, source, target))"
        )
    return sent.value


def _only_on(operation: str, root: int, axis: Axes, tree: Tree) -> Tree:
    def leaf(value: Tensor, axes: tuple[str, ...]) -> Tensor:
        shapes.checked_rank(operation, "root", root, axes)
        is_root = (axis_index(axes) == root).to(value.device)
        return torch.where(is_root, value, torch.zeros_like(value))

    return over_leaves(operation, leaf, tree, axis)
