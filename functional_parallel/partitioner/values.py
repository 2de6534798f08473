"""Values of a function that is run on the shards of one rank, and tables of several of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..rules import AxisLayout, TargetLayout


@dataclass
class PartitionedValue:
    """One value of the global function: its layout, this rank's shard, and its conversions to other layouts.

    A parameter keeps its layout when operands of an op disagree.
    """

    place: AxisLayout
    part: torch.Tensor
    is_parameter: bool = False
    forms: dict[TargetLayout, torch.Tensor] = field(default_factory=dict)
    is_constant: bool = False  # whether no input affects it
    is_alone: bool = False  # whether only the owner computes with it, after `fp.outputs`

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The shard, and its conversions, oldest first."""
        yield self.part
        yield from self.forms.values()

    def exchange(self, tensors: dict[int, torch.Tensor]) -> None:
        """Replace tensors, given by their id."""
        self.part = tensors.get(id(self.part), self.part)
        self.forms = {form: tensors.get(id(x), x) for form, x in self.forms.items()}


Value = PartitionedValue | list[PartitionedValue]  # a list for an op with several results
Numbers = int | list[int]


class HeldShards:
    """Values by their shard, to detect shards that several values hold: inputs given twice, results that are operands.

    A replaced shard must be replaced in all of them.
    """

    def __init__(self) -> None:
        self._values: dict[int, PartitionedValue] = {}
        self._shared: set[int] = set()

    def add(self, value: PartitionedValue) -> None:
        if self._values.setdefault(id(value.part), value) is not value:
            self._shared.add(id(value.part))

    def exchange(self, value: PartitionedValue, tensors: dict[int, torch.Tensor]) -> None:
        self._values.pop(id(value.part), None)
        value.exchange(tensors)
        self.add(value)

    def is_shared(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._shared


class Description(NamedTuple):
    """A value without its tensors, which a table numbers."""

    place: AxisLayout
    is_parameter: bool
    is_constant: bool
    is_alone: bool
    forms: tuple[TargetLayout, ...]
    tensors: tuple[int | None, ...]  # the shard, then its conversions; None for a result that is not a tensor

    def value(self, tensors: Sequence[torch.Tensor]) -> PartitionedValue:
        part, *converted = [None if number is None else tensors[number] for number in self.tensors]
        forms: Any = dict(zip(self.forms, converted, strict=True))
        return PartitionedValue(self.place, part, self.is_parameter, forms, self.is_constant, self.is_alone)  # type: ignore[arg-type]


class ValueTable:
    """Numbers of values, and of their tensors, that continue the numbers of other values."""

    def __init__(self, values: Sequence[PartitionedValue] = (), tensors: Sequence[torch.Tensor] = ()) -> None:
        self.values, self.tensors = list(values), list(tensors)
        self.described: list[Description] = []  # of the added values
        self.has_others = False  # whether a result is neither a tensor nor None
        self._numbers = {id(value): index for index, value in enumerate(values)}
        self._of_tensors = {id(tensor): index for index, tensor in enumerate(tensors)}

    def add(self, value: Value) -> Numbers:
        return [self._number(each) for each in value] if isinstance(value, list) else self._number(value)

    def add_tensor(self, tensor: torch.Tensor) -> int | None:
        if not isinstance(tensor, torch.Tensor):
            self.has_others = self.has_others or tensor is not None
            return None
        if id(tensor) not in self._of_tensors:
            self._of_tensors[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._of_tensors[id(tensor)]

    def _number(self, value: PartitionedValue) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.values)
            self.values.append(value)
            flags = (value.is_parameter, value.is_constant, value.is_alone)
            tensors = tuple(map(self.add_tensor, value.tensors))
            self.described.append(Description(value.place, *flags, tuple(value.forms), tensors))
        return self._numbers[id(value)]


def numbered(values: Sequence[PartitionedValue], numbers: Numbers) -> Value:
    return [values[each] for each in numbers] if isinstance(numbers, list) else values[numbers]
