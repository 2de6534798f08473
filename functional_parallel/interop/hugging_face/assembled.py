"""Tensors of a model as expressions of the tensors in files, of which any box is read as boxes of the files.

transformers converts the tensors of a folder by functions of tensors: it stacks experts, joins projections, cuts fused
ones. Called with `Assembled` tensors, which have a shape and no values, such a function records what it does. Views,
`torch.cat` and `torch.stack` are followed. The result of any other op needs its arguments in full.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from sharding_specs import Box

from ... import _torch
from ...functions import PyTree

Source = Callable[[str, Box, torch.Tensor], None]  # fills a tensor with a box of the tensor of a key

_JOINS = {"cat", "concat", "concatenate"}


class Assembled(torch.Tensor):
    """Tensor without values that knows how it is assembled from tensors in files.

    >>> import torch
    >>> from sharding_specs import Box
    >>> files = {"a": torch.zeros(2, 2), "b": torch.ones(2, 2)}
    >>> a, b = (Assembled.of_key(key, x.shape, x.dtype) for key, x in files.items())
    >>> joined, box = torch.cat([a, b.T]), Box((1, 0), (2, 1))
    >>> found = torch.empty(box.size)
    >>> joined.read(box, found, lambda key, box, target: target.copy_(files[key][box.slices]))
    >>> found
    tensor([[0.],
            [1.]])
    """

    node: Node

    @staticmethod
    def of_key(key: str, shape: Sequence[int], dtype: torch.dtype) -> Assembled:
        return _assembled(shape, dtype, Key(key))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = optree.tree_map(lambda x: x, (args, kwargs or {}))
        result = super().__torch_function__(func, types, args, kwargs or {})
        leaves, tree = optree.tree_flatten(result)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return result
        name = func.__name__
        if name.endswith("_") and not name.endswith("__") or name in ("__setitem__", "__set__"):
            raise TypeError(f"{name} writes into a tensor that is read from files")
        found = [_followed(func, *given, leaf, number) for number, leaf in enumerate(leaves)]
        return tree.unflatten(found)

    def read(self, box: Box, target: torch.Tensor, source: Source) -> None:
        """Fill a tensor with a box of this one. It may have another dtype."""
        self.node.read(box, target, source)

    def full(self, source: Source, dtype: torch.dtype | None = None) -> torch.Tensor:
        found = torch.empty(tuple(self.shape), dtype=dtype or self.dtype, device="cpu")
        self.read(Box((0,) * self.ndim, tuple(self.shape)), found, source)
        return found

    def nodes(self) -> Iterator[Node]:
        yield self.node
        for each in self.node.inputs:
            yield from each.nodes()

    def keys(self) -> set[str]:
        return {node.key for node in self.nodes() if isinstance(node, Key)}

    def is_cut_late(self) -> bool:
        """Whether a box of it needs all of some tensor in the files."""
        return any(isinstance(node, Computed) for node in self.nodes())


def _assembled(shape: Sequence[int], dtype: torch.dtype, node: Node) -> Assembled:
    made = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(Assembled)
    made.node = node
    return made


class Node(ABC):
    """How a tensor is assembled from `inputs`."""

    inputs: Sequence[Assembled]

    @abstractmethod
    def read(self, box: Box, target: torch.Tensor, source: Source) -> None: ...


@dataclass(frozen=True, eq=False)
class Key(Node):
    key: str
    inputs: Sequence[Assembled] = ()

    def read(self, box: Box, target: torch.Tensor, source: Source) -> None:
        source(self.key, box, target)


@dataclass(frozen=True, eq=False)
class View(Node):
    """Box of a tensor, with its dims in another order. A dim may be left out, or new, with one index."""

    inputs: Sequence[Assembled]  # one
    start: tuple[int, ...]  # in the input
    dims: tuple[int | None, ...]  # of the result, by dim of the input; None for one that is left out

    def read(self, box: Box, target: torch.Tensor, source: Source) -> None:
        rows = list(zip(self.start, self.dims, strict=True))
        start = tuple(first if dim is None else first + box.start[dim] for first, dim in rows)
        size = tuple(1 if dim is None else box.size[dim] for dim in self.dims)
        kept = [dim for dim in self.dims if dim is not None]
        new = [dim for dim in range(target.ndim) if dim not in kept]
        view = target.permute(*kept, *new)[(..., *[0] * len(new))]
        for number, dim in enumerate(self.dims):
            view = view.unsqueeze(number) if dim is None else view
        self.inputs[0].read(Box(start, size), view, source)


@dataclass(frozen=True, eq=False)
class Joined(Node):
    """Tensors along a dim."""

    inputs: Sequence[Assembled]
    dim: int

    def read(self, box: Box, target: torch.Tensor, source: Source) -> None:
        begin = 0
        for part in self.inputs:
            start = tuple(begin if dim == self.dim else 0 for dim in range(part.ndim))
            held, begin = Box(start, tuple(part.shape)), begin + part.shape[self.dim]
            common = held.intersection(box)
            if common is not None:
                part.read(common.within(held), target[common.within(box).slices], source)


@dataclass(frozen=True, eq=False)
class Computed(Node):
    """One of the tensors that a function returns for full tensors."""

    func: Callable[..., Any]
    args: PyTree
    number: int

    @property
    def inputs(self) -> Sequence[Assembled]:  # type: ignore[override]
        return [x for x in optree.tree_leaves(self.args) if isinstance(x, Assembled)]

    def read(self, box: Box, target: torch.Tensor, source: Source) -> None:
        args, kwargs = optree.tree_map(lambda x: x.full(source) if isinstance(x, Assembled) else x, self.args)
        target.copy_(optree.tree_leaves(self.func(*args, **kwargs))[self.number][box.slices])


def _followed(func: Callable[..., Any], args: PyTree, kwargs: PyTree, result: torch.Tensor, number: int) -> Assembled:
    node = _join(func, args, kwargs) or _view(args, kwargs, result) or Computed(func, (args, kwargs), number)
    return _assembled(result.shape, result.dtype, node)


def _join(func: Callable[..., Any], args: PyTree, kwargs: PyTree) -> Node | None:
    if func.__name__ not in _JOINS | {"stack"} or set(kwargs) - {"tensors", "dim", "axis"}:
        return None
    tensors, dim, *_ = (*args, kwargs.get("dim", kwargs.get("axis", 0))) if args else (kwargs["tensors"], kwargs["dim"])
    if not all(isinstance(x, Assembled) and x.dtype == tensors[0].dtype and x.ndim for x in tensors):
        return None
    if func.__name__ == "stack":
        tensors = [x.unsqueeze(dim) for x in tensors]
    return Joined(tuple(tensors), dim % tensors[0].ndim)


def _view(args: PyTree, kwargs: PyTree, result: torch.Tensor) -> Node | None:
    """Return the node of a result in the memory of the only argument, or of its copy; None if it is something else."""
    given = [x for x in optree.tree_leaves((args, kwargs)) if isinstance(x, Assembled)]
    if len(given) != 1 or result.dtype != given[0].dtype or not result.numel():
        return None
    if _memory(result) != _memory(given[0]):
        return None
    shape, offset, strides = tuple(given[0].shape), result.storage_offset(), given[0].stride()
    of_stride = {stride: dim for dim, stride in enumerate(strides) if shape[dim] > 1}
    start = [offset // stride % size for stride, size in zip(strides, shape, strict=True)]
    dims: list[int | None] = [None] * len(shape)
    for number, (size, stride) in enumerate(zip(result.shape, result.stride(), strict=True)):
        dim = of_stride.get(stride) if size > 1 else None
        if size > 1 and (dim is None or dims[dim] is not None or start[dim] + size > shape[dim]):
            return None
        if dim is not None:
            dims[dim] = number
    return View((given[0],), tuple(start), tuple(dims))


def _memory(x: torch.Tensor) -> object:
    return _torch.StorageWeakRef(x.untyped_storage())
