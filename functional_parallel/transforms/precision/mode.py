"""Selection of the compute dtype of each torch function, before functions are decomposed to ops without their name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeGuard

import optree
import torch

from ...functions import PyTree
from ...ir import in_main_memory
from ...tracing import CopyableMode
from .tables import FP32_INSIDE, FP32_OPS, LOSSES, LOW_PRECISION_OPS, PROMOTE_OPS, WIDE_RANGE_OPS, functions_named

Op = Callable[..., PyTree]
Args = tuple[PyTree, ...]
Kwargs = dict[str, PyTree]

_products = functools.cache(lambda: functions_named(LOW_PRECISION_OPS))
_islands = functools.cache(lambda: functions_named(FP32_OPS))
_fp32_inside = functools.cache(lambda: functions_named(FP32_INSIDE))
_far = functools.cache(lambda: functions_named(WIDE_RANGE_OPS))
_losses = functools.cache(lambda: functions_named(LOSSES))
_same_type = functools.cache(lambda: functions_named(PROMOTE_OPS))
_with_statistics = functools.cache(lambda: functions_named(["batch_norm", "instance_norm"]))


class PrecisionMode(CopyableMode):
    """Mode that computes products in `dtype`, and islands and losses in float32, while it is active.

    The result of an island is cast back to the dtype of its first floating operand, except if float16 may not hold it.
    Values computed from `kept` tensors only are also kept. A product with a kept tensor is computed in float32.
    """

    def __init__(self, dtype: torch.dtype, kept: list[torch.Tensor], islands: frozenset[Any]) -> None:
        super().__init__()
        self.dtype = dtype
        self.kept = {id(tensor): tensor for tensor in kept}  # references keep the ids unique
        self.islands, self.asked = _islands() | islands, islands

    @property
    def state(self) -> Hashable:
        return self.dtype, self.asked

    def fact(self, x: torch.Tensor) -> bool:
        """Whether it is kept."""
        return id(x) in self.kept

    def set_fact(self, x: torch.Tensor, fact: bool) -> None:
        if fact:
            self.kept[id(x)] = x

    def __torch_function__(
        self, func: Op, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        kwargs = kwargs or {}
        floating = [leaf for leaf in optree.tree_leaves((args, kwargs)) if is_floating(leaf)]
        if not floating:
            return func(*args, **kwargs)
        result = self._compute(func, args, kwargs, floating)
        if self.kept and all(id(leaf) in self.kept for leaf in floating):
            self.kept.update((id(leaf), leaf) for leaf in optree.tree_leaves(result) if is_floating(leaf))
        return result

    def _compute(self, func: Op, args: Args, kwargs: Kwargs, floating: list[torch.Tensor]) -> PyTree:
        if func in _losses():
            return func(*_map(wide, args), **_map(wide, kwargs))
        if func in self.islands and not self._is_wide_inside(func, kwargs, floating):
            return self._island(func, args, kwargs, floating[0].dtype)
        if func in _products():
            kept = any(id(leaf) in self.kept for leaf in floating)
            into = wide if kept else functools.partial(cast, dtype=self.dtype)
            return func(*_map(into, args), **_map(into, kwargs))
        if func in _same_type():
            widest = max((leaf.dtype for leaf in floating), key=lambda dtype: dtype.itemsize)
            into = functools.partial(cast, dtype=widest)
            return func(*_map(into, args), **_map(into, kwargs))
        return func(*args, **kwargs)

    def _is_wide_inside(self, func: Op, kwargs: Kwargs, floating: list[torch.Tensor]) -> bool:
        """Whether a kernel computes an island in float32 although its operands and results have low precision."""
        plain = func in _fp32_inside() - self.asked and kwargs.get("dtype") is None
        return plain and not in_main_memory(floating[0]) and {leaf.dtype for leaf in floating} == {self.dtype}

    def _island(self, func: Op, args: Args, kwargs: Kwargs, dtype: torch.dtype) -> PyTree:
        widened = _map(wide, args), _map(wide, kwargs)
        result = func(*widened[0], **widened[1])
        if func in _with_statistics():
            _write_back((args, kwargs), widened)
        if kwargs.get("dtype") is not None:  # the caller chose the dtype of the result
            return result
        if self.dtype is torch.float16 and func in _far():
            return result
        # a scalar is a loss or a term of one
        return _map(lambda leaf: cast(leaf, dtype) if is_floating(leaf) and leaf.ndim else leaf, result)


def wide(leaf: PyTree) -> PyTree:
    return leaf.float() if is_floating(leaf) and leaf.dtype.itemsize < 4 else leaf


def cast(leaf: PyTree, dtype: torch.dtype) -> PyTree:
    """Cast a floating tensor to `dtype`. Other leaves are returned unchanged."""
    return leaf.to(dtype) if is_floating(leaf) and leaf.dtype != dtype else leaf


def is_floating(leaf: PyTree) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _map(function: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    return optree.tree_map(function, tree, none_is_leaf=True)


def _write_back(given: tuple[Args, Kwargs], widened: tuple[Args, Kwargs]) -> None:
    arguments = [dict(enumerate(args)) | kwargs for args, kwargs in (given, widened)]
    for name in (1, 2, "running_mean", "running_var"):
        before, after = (each.get(name) for each in arguments)
        if before is not None and after is not before:
            before.copy_(after)
