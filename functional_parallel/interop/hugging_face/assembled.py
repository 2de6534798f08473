"""Tensors of a model as expressions of the tensors in files. Any box of them is read as boxes of the files.

transformers converts the tensors of a folder by functions of tensors: it stacks experts, joins projections, cuts fused
ones. Called with `Assembled` tensors, which have a shape and no values, such a function records what it does. Views,
`torch.cat` and `torch.stack` are followed. The result of any other op needs its arguments in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from sharding_specs import Box

from ... import _torch

Source = Callable[[str, Box, torch.Tensor], object]  # fills a tensor with a box of the tensor of a key
Read = Callable[[Box, torch.Tensor, Source], object]

_JOINS = {"cat", "concat", "concatenate", "stack"}


class Assembled(torch.Tensor):
    """Tensor without values that knows how it is assembled from tensors in files.

    >>> files = {"a": torch.zeros(2, 2), "b": torch.ones(2, 2)}
    >>> a, b = (Assembled.of_key(key, x.shape, x.dtype) for key, x in files.items())
    >>> found = torch.empty(2, 1)
    >>> torch.cat([a, b.T]).read(Box((1, 0), (2, 1)), found, lambda key, box, x: x.copy_(files[key][box.slices]))
    >>> found.flatten()
    tensor([0., 1.])

    Attributes:
        keys: keys of the tensors that it consists of.
        needs_all: whether a box of it needs all of some tensor in the files.
    """

    keys: frozenset[str]
    needs_all: bool
    _read: Read

    @staticmethod
    def of_key(key: str, shape: Sequence[int], dtype: torch.dtype) -> Assembled:
        made = _assembled(shape, dtype, (), lambda box, target, source: source(key, box, target))
        made.keys = frozenset([key])
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            raise TypeError(f"{name} writes into a tensor that is read from files")
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        leaves, tree = optree.tree_flatten(result)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return result
        inputs = [x for x in optree.tree_leaves((args, kwargs)) if isinstance(x, Assembled)]
        found = []
        for number, leaf in enumerate(leaves):
            follow = _joined(name, inputs, args, kwargs) or _viewed(inputs, leaf)
            read = follow or _computed(func, args, kwargs, number)
            found.append(_assembled(leaf.shape, leaf.dtype, inputs, read, needs_all=follow is None))
        return tree.unflatten(found)

    def read(self, box: Box, target: torch.Tensor, source: Source) -> None:
        """Fill a tensor with a box of this tensor. It may have another dtype."""
        self._read(box, target, source)

    def full(self, source: Source, dtype: torch.dtype | None = None) -> torch.Tensor:
        found = torch.empty(tuple(self.shape), dtype=dtype or self.dtype, device="cpu")
        self._read(Box((0,) * self.ndim, tuple(self.shape)), found, source)
        return found


def _assembled(
    shape: Sequence[int], dtype: torch.dtype, inputs: Sequence[Assembled], read: Read, needs_all: bool = False
) -> Assembled:
    made = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(Assembled)
    made.keys, made._read = frozenset[str]().union(*(x.keys for x in inputs)), read
    made.needs_all = needs_all or any(x.needs_all for x in inputs)
    return made


def _joined(name: str, inputs: Sequence[Assembled], args: Any, kwargs: Any) -> Read | None:
    """Return the reader of tensors that are joined along a dim, all of one dtype; None if they are not."""
    if name not in _JOINS or "out" in kwargs or len({x.dtype for x in inputs}) > 1 or not inputs[0].ndim:
        return None
    tensors = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    parts = [x.unsqueeze(dim) for x in tensors] if name == "stack" else list(tensors)
    joined = dim % parts[0].ndim

    def read(box: Box, target: torch.Tensor, source: Source) -> None:
        begin = 0
        for part in parts:
            held = Box(tuple(begin if dim == joined else 0 for dim in range(part.ndim)), tuple(part.shape))
            common, begin = held.intersection(box), begin + part.shape[joined]
            if common is not None:
                part.read(common.within(held), target[common.within(box).slices], source)

    return read


def _viewed(inputs: Sequence[Assembled], result: torch.Tensor) -> Read | None:
    """Return the reader of a box of the only argument, with dims in another order, left out or new; None if it is not.

    A dim of the result has the stride of its dim in the argument, which is contiguous.
    """
    if len(inputs) != 1 or result.dtype != inputs[0].dtype or not result.numel():
        return None
    if _torch.StorageWeakRef(result.untyped_storage()) != _torch.StorageWeakRef(inputs[0].untyped_storage()):
        return None
    shape, strides = tuple(inputs[0].shape), inputs[0].stride()
    of_stride = {stride: dim for dim, stride in enumerate(strides) if shape[dim] > 1}
    start = [result.storage_offset() // stride % size for stride, size in zip(strides, shape, strict=True)]
    dims: list[int | None] = [None] * len(shape)  # of the result, by dim of the argument
    for number, (size, stride) in enumerate(zip(result.shape, result.stride(), strict=True)):
        dim = of_stride.get(stride, -1) if size > 1 else None
        if dim is not None and (dim < 0 or dims[dim] is not None or start[dim] + size > shape[dim]):
            return None
        if dim is not None:
            dims[dim] = number
    kept = [dim for dim in dims if dim is not None]

    def read(box: Box, target: torch.Tensor, source: Source) -> None:
        first = (at if dim is None else at + box.start[dim] for at, dim in zip(start, dims, strict=True))
        part = Box(tuple(first), tuple(1 if dim is None else box.size[dim] for dim in dims))
        view = target.permute(*kept, *(dim for dim in range(target.ndim) if dim not in kept))
        inputs[0].read(part, view.as_strided(part.size, _strides(view.stride(), dims)), source)

    return read


def _strides(strides: Sequence[int], dims: Sequence[int | None]) -> list[int]:
    rest = iter(strides)
    return [1 if dim is None else next(rest) for dim in dims]


def _computed(func: Callable[..., Any], args: Any, kwargs: Any, number: int) -> Read:
    """Return the reader of one of the tensors that a function returns for full tensors."""

    def read(box: Box, target: torch.Tensor, source: Source) -> None:
        given = optree.tree_map(lambda x: x.full(source) if isinstance(x, Assembled) else x, (args, kwargs))
        target.copy_(optree.tree_leaves(func(*given[0], **given[1]))[number][box.slices])

    return read
