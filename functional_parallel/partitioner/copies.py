"""Partition the copies of a body once: the first one runs op by op, and later ones repeat the ops that it recorded.

A copy repeats another copy if the interpreter cannot distinguish the values that they take from outside: their layouts
and conversions, and shapes, strides and types of the shards. Any other copy runs op by op.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from .. import _torch
from ..checker import Typing, is_zero
from ..ir import Aval, Copy, aval_of, info
from ..tracing import Recorder
from .values import Description, HeldShards, Numbers, PartitionedValue, Value, ValueTable

_MOST_ZEROS = 16  # ops that `is_zero` goes back


class Interpreter(Protocol):
    """Runs the ops of a graph on the shards of one rank."""

    values: dict[fx.Node, Any]
    sliced: list[fx.Node]  # replicated values with a computed slice, if possible from the operands of their op
    held: HeldShards

    def visit(self, node: fx.Node) -> None: ...

    def hold(self, node: fx.Node, value: Value) -> None: ...

    def fork(self) -> Interpreter: ...


@contextmanager
def recorded(active: Recorder) -> Iterator[list[fx.Node]]:
    """Collect the ops that are recorded inside."""
    nodes: list[fx.Node] = []
    node = next(iter(reversed(active.traced.graph.nodes)))
    yield nodes
    while (node := node.next).op != "root":
        nodes.append(node)


def reads_only(nodes: Sequence[fx.Node], known: Sequence[fx.Node | None]) -> bool:
    """Whether ops read only these values, and constants that they created."""
    reads = {operand for node in nodes for operand in node.all_input_nodes}
    return all(node.op == "get_attr" for node in reads.difference(known))


@dataclass
class TakenValues:
    """Values that a copy takes from outside, and their tensors, each once."""

    values: list[PartitionedValue]
    tensors: list[Tensor]
    of_nodes: list[Numbers]  # for each external node, the numbers of its values
    described: list[Description]
    trained: list[int]  # numbers of the tensors with a gradient
    key: Hashable

    @classmethod
    def of(cls, copy: Copy, run: Interpreter, active: Recorder) -> TakenValues | None:
        """Return the values. None if a gradient of one of them would not be found, or one is not a tensor."""
        table = ValueTable()
        of_nodes = [table.add(run.values[node]) for node in copy.externals]
        plain = [_torch.unwrap(tensor) for tensor in table.tensors]
        trained = [index for index, tensor in enumerate(table.tensors) if requires_grad(tensor)]
        if (
            table.has_others
            or any(map(requires_grad, plain))
            or any(run.held.is_shared(table.tensors[index]) for index in trained)
        ):
            return None
        nodes = [active.value(tensor) for tensor in plain]
        same = tuple(-1 if node is None else nodes.index(node) for node in nodes)
        looks = tuple(observed(tensor, active) for tensor in plain)
        zeros = tuple(map(_zero_depth, copy.externals))
        key = (copy.form, repr(of_nodes), tuple(table.described), tuple(trained), looks, same, zeros)
        return cls(table.values, table.tensors, of_nodes, table.described, trained, key)

    def read_later(self, copy: Copy) -> set[int]:
        """Return the numbers of the values that ops after the copy read."""
        pairs = zip(copy.later, self.of_nodes, strict=True)
        return {each for later, of in pairs if later for each in (of if isinstance(of, list) else [of])}


@dataclass
class FoundValues:
    """Results of a copy, and its conversions of the values that it takes."""

    tensors: list[Tensor]  # that do not come from outside
    described: list[Description]
    of_escapes: list[Numbers]  # numbers of values: those from outside, then the described ones
    forms: list[tuple[int, Any, int]]  # new conversions: number of the value, layout, number of the tensor
    has_others: bool  # whether a result is neither a tensor nor None

    @classmethod
    def of(cls, copy: Copy, run: Interpreter, taken: TakenValues, known: Sequence[Mapping[Any, Tensor]]) -> FoundValues:
        """Return them after the copy ran. `known` has the conversions that the values from outside had before."""
        table = ValueTable(taken.values, taken.tensors)
        forms = [
            (number, form, table.add_tensor(x) or 0)
            for number, value in enumerate(taken.values)
            for form, x in value.forms.items()
            if form not in known[number]
        ]
        of_escapes = [table.add(run.values[copy.nodes[position]]) for position in copy.escapes]
        return cls(table.tensors[len(taken.tensors) :], table.described, of_escapes, forms, table.has_others)

    def kept(self, later: Collection[int]) -> tuple[list[tuple[int, Any, int]], set[int | None]]:
        """Return the conversions of values that later ops read, and the numbers of the tensors that are kept."""
        forms = [each for each in self.forms if each[0] in later]
        return forms, {*(number for each in self.described for number in each.tensors), *(each[2] for each in forms)}


@dataclass(frozen=True)
class Made:
    """A recorded tensor, which a repeated copy makes again for another node."""

    node: fx.Node | None
    aval: Aval
    strides: tuple[int, ...]
    has_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor, active: Recorder) -> Made:
        plain = _torch.unwrap(tensor)
        return cls(active.value(plain), aval_of(plain), _strides(plain), requires_grad(tensor))

    def again(self, active: Recorder, nodes: Mapping[fx.Node, fx.Node]) -> Tensor:
        assert self.node is not None
        options: Any = {"dtype": self.aval.dtype, "device": self.aval.device}
        with _torch.disable_functorch(), active.fake_mode:
            made = torch.empty_strided(self.aval.shape, self.strides, **options)
        active.bind(made, nodes.get(self.node, self.node))
        return made


def observed(tensor: Tensor, active: Recorder) -> Hashable:
    """Return the facts that the readers of a tensor depend on."""
    node, is_fake = active.value(tensor), isinstance(tensor, _torch.FakeTensor)
    if node is None:
        return aval_of(tensor), _strides(tensor), id(tensor) if is_fake else None
    zeros = None if active.on_node is None else _zero_depth(node)
    return aval_of(tensor), _strides(tensor), info(node).type, zeros


def requires_grad(tensor: Tensor) -> bool:
    with _torch.disable_torch_function():
        return tensor.requires_grad


def _strides(tensor: Tensor) -> tuple[int, ...]:
    with _torch.disable_torch_function():
        return tuple(tensor.stride())


def _zero_depth(node: fx.Node) -> int | None:
    """Return how many ops `is_zero` goes back until it finds zeros."""
    return next(depth for depth in range(_MOST_ZEROS + 1) if is_zero(node, depth)) if is_zero(node) else None


def is_repeatable(active: Recorder) -> bool:
    """Whether copies may be repeated in a trace: there is no derivative, or one gradient."""
    is_typed = active.on_node is None or isinstance(active.on_node, Typing)
    return is_typed and torch.is_grad_enabled() and (not _torch.is_inside_transform() or _torch.takes_one_gradient())
