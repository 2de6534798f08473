"""Transforms and their composition.

A transform is a value. It maps a function to a local function, and has a name and a position in the legal order.
`chain(a, b)(f)` is `b(a(f))`: the first transform is innermost.
"""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..errors import OrderError
from ..functions import LocalFunction, PyTree, as_local_function, require_function
from ..ir import Source, current_source
from ..requests import Order
from .as_code import AsCode, as_code, call_as_code, from_code


@dataclass(frozen=True)
class Transform(AsCode, ABC):
    """Base class of transforms: frozen dataclasses with their arguments as fields.

    A transform prints as the call that makes it, and compares and hashes by its arguments. A class has the method
    `apply` and, unless it changes the function on full values, the `order` of its position in a chain.

    >>> import functional_parallel as fp
    >>> fp.zero(3, "data", prefetch=2)
    fp.zero(3, 'data', prefetch=2)
    """

    order: ClassVar[Order] = Order.PRECISION
    shown: ClassVar[tuple[str, ...] | None] = None  # arguments in the short text for messages, by default all
    source: ClassVar[Source | None]  # of an object: the line that makes it

    def __new__(cls, *_: Any, **named: Any) -> Transform:
        made = super().__new__(cls)
        object.__setattr__(made, "source", current_source())
        return made

    def __post_init__(self) -> None:
        axis = getattr(self, "axis", "")
        if not isinstance(axis, str):
            raise TypeError(
                f"{self.name}: a transform takes one axis of the mesh, by its name, not {axis!r}; for several "
                "fp.chain one transform for each, the first innermost"
            )

    @property
    def name(self) -> str:
        """Short text for messages."""
        return call_as_code(self, self.shown).removeprefix("fp.")

    @abstractmethod
    def apply(self, f: LocalFunction) -> LocalFunction:
        """Transform a function. It has the layout that its transforms give it; see `LocalFunction.then`."""

    def __call__(self, f: Callable[..., PyTree]) -> LocalFunction:
        if not isinstance(f, LocalFunction):
            require_function(f, self.name)
        inner = as_local_function(f)
        if self.order < inner.applied.order:
            raise OrderError(
                f"{self.name} ({self.order.words}) stands outside {' → '.join(inner.applied.describe)} "
                f"({Order(inner.applied.order).words}), but belongs inside it: apply the transforms by fp.chain"
            )
        local = self.apply(inner)
        return local.with_applied(replace(local.applied, order=self.order))

    @property
    def transforms(self) -> tuple[Transform, ...]:
        return (self,)

    def to_json(self) -> str:
        """Return the plan of this transform as JSON; see `Plan.to_json`."""
        return Plan(self.transforms).to_json()


@dataclass(frozen=True)
class Plan:
    """Chain of transforms, which is itself a transform."""

    transforms: tuple[Transform, ...]

    def __call__(self, f: Callable[..., PyTree]) -> Callable[..., PyTree]:
        for transform in self.transforms:
            f = transform(f)
        return f

    def __repr__(self) -> str:
        return f"fp.chain({', '.join(map(as_code, self.transforms))})"

    def __str__(self) -> str:
        return f"chain({', '.join(each.name for each in self.transforms)})"

    def to_json(self) -> str:
        r"""Return the plan as JSON: the list of its transforms as code.

        >>> import functional_parallel as fp
        >>> plan = fp.chain(fp.remat(), fp.zero(3, "data"))
        >>> plan.to_json(), fp.Plan.from_json(plan.to_json()) == plan
        ('["fp.remat()", "fp.zero(3, \'data\')"]', True)

        Raises:
            ValueError: if an argument of a transform is no data, such as a function. The message names it.
        """
        for each in self.transforms:
            from_code(as_code(each))
        return json.dumps(list(map(as_code, self.transforms)))

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan that `to_json` wrote.

        Args:
            text: JSON. Its transforms are those of this library, and others whose classes exist by now. Of
                several classes with one name, the last counts.

        Raises:
            ValueError: if the text has anything else. No code in it runs.
        """
        return chain(*map(from_code, json.loads(text)))


def chain(*transforms: Transform | Plan) -> Plan:
    """Compose transforms, the first innermost: `chain(a, b)(f)` is `b(a(f))`.

    >>> import functional_parallel as fp
    >>> fp.chain(fp.tensor_parallel("tensor", {}), fp.data_parallel("data"))
    fp.chain(fp.tensor_parallel('tensor', {}), fp.data_parallel('data'))

    Args:
        transforms: transforms or chains of them, in the order precision and remat, tensor and sequence, zero / data,
            compress, offload, accumulate, pipeline, local SGD.

    Raises:
        TypeError: if an argument is not a transform.
        OrderError: if the order is illegal, or if two transforms use the same axis. Also if the chain contains both
            accumulate and pipeline, because both cut the batch. For an illegal order, the message has the legal one.
    """
    for transform in transforms:
        if not isinstance(transform, (Transform, Plan)):
            raise TypeError(
                f"chain takes transforms, such as fp.tensor_parallel(…) or fp.zero(3, 'data'), not {transform!r}; "
                "apply other functions, grad and vmap among them, to plan(loss)"
            )
    flat = tuple(single for transform in transforms for single in transform.transforms)
    _check_microbatches(flat)
    _check_order(flat)
    _check_axes(flat)
    return Plan(flat)


def _check_microbatches(transforms: tuple[Transform, ...]) -> None:
    by_order = {transform.order: transform for transform in transforms}
    if {Order.ACCUMULATE, Order.PIPELINE} <= by_order.keys():
        raise OrderError(
            f"{by_order[Order.PIPELINE].name} sums the gradients of its microbatches itself: leave "
            f"{by_order[Order.ACCUMULATE].name} out, and give the pipeline as many times more microbatches"
        )


def _check_order(transforms: tuple[Transform, ...]) -> None:
    for before, after in itertools.pairwise(transforms):
        if before.order > after.order:
            right = ", ".join(each.name for each in sorted(transforms, key=lambda transform: transform.order))
            raise OrderError(
                f"{after.name} ({after.order.words}) stands outside {before.name} ({before.order.words}), but belongs "
                f"inside it; write chain({right})"
            )


def _check_axes(transforms: tuple[Transform, ...]) -> None:
    taken: dict[str, Transform] = {}
    for transform in transforms:
        axis = getattr(transform, "axis", None)
        if axis is None or transform.order is Order.PRECISION:  # it splits no argument
            continue
        other = taken.setdefault(axis, transform)
        if other is not transform:
            raise OrderError(
                f"{other.name} and {transform.name} both take the axis {axis!r}; each axis goes to one transform"
            )
