"""Facts about a node of a graph, in one typed, immutable value.

The value is stored under one key of `node.meta`. Copies of a node share it, so a change creates a new value.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from torch import fx

from sharding_specs import P

from ..collectives import Type
from .aval import Aval
from .source import Source

_KEY = "info"


class Role(Enum):
    """The purpose of a collective's, a cast's or a view's operand."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"  # of a parameter
    NEW_PARAMETER = "new parameter"


class NodeInfo(NamedTuple):
    val: Aval | tuple[Aval | None, ...] | None = None  # a tuple for an op with several results
    source: Source | None = None  # line of the user's code that computes it
    type: Type | None = None  # state along each mesh axis
    backward: bool = False  # whether autograd emitted the op
    no_grad: bool = False  # whether gradients were switched off where it was recorded
    forward_node: fx.Node | None = None  # for a backward op, the op that it belongs to
    replaced_by: fx.Node | None = None  # for an erased node, the node that replaced it
    implicit_cast: bool = False  # whether the op implies a cast of an operand, which the graph does not contain
    recomputed: bool = False  # whether the op is a copy that recomputes a value in the backward
    is_cheap_copy: bool = False  # whether it is a copy of a cheap op that a pipeline recomputes
    stored_by: str | None = None  # the pass that stores the value for the backward; "" for none, None if not decided
    phase: str | None = None  # "forward", "backward" or "update", if recorded by `keep_phases`
    enumerated: tuple[tuple[int, int], ...] = ()  # for an index: a dim, and the dim of the indices that enumerates it
    spec: P | None = None  # for an input of a traced function, its declared spec
    path: str = ""  # for an input, its pytree path
    param_path: str = ""  # for a parameter, its path within the parameters
    is_parameter: bool = False  # whether the input is a parameter of the model
    is_state: bool = False  # whether the input belongs to the state that a step returns updated
    donated: bool = False  # whether the program may overwrite the memory of the input
    updated_output: int | None = None  # for an input, the number of the output with its new value
    role: Role | None = None  # what the op moves, if it is a parameter or of one
    parameters: tuple[str, ...] = ()  # for an op with a role, the paths of the parameters
    runs: tuple[int, ...] = ()  # for a bucket, the number of elements of each value, on one of the ranks of a scatter
    used_at: Source | None = None  # for an op with a role, the line of the model that uses the parameter
    copy: tuple[int, int] | None = None  # for an op of a repeated layer, the number of its body and of the copy
    trained: bool | None = None  # whether a gradient reaches the parameter. None if no gradient was requested

    @property
    def aval(self) -> Aval:
        """Shape, dtype and device of the one result."""
        assert isinstance(self.val, Aval), f"a node with several results, or none: {self.val}"
        return self.val

    @property
    def results(self) -> tuple[Aval | None, ...]:
        """Shape, dtype and device of each result; None for a result that is not a tensor."""
        return self.val if isinstance(self.val, tuple) else (self.val,)

    @property
    def nbytes(self) -> int:
        """Size of all results in bytes."""
        return sum(each.nbytes for each in self.results if each is not None)

    @property
    def typed(self) -> Type:
        """Type of a value in a typed graph."""
        assert self.type is not None, "the graph has no types"
        return self.type

    def result(self, index: int) -> Aval:
        """Return shape, dtype and device of one result, which is a tensor."""
        found = self.results[index]
        assert found is not None, f"result {index} is not a tensor"
        return found

    @property
    def avals(self) -> tuple[Aval, ...]:
        """Shape, dtype and device of each result, for an op with only tensor results."""
        found = tuple(each for each in self.results if each is not None)
        assert len(found) == len(self.results), "a result is not a tensor"
        return found


_NOTHING = NodeInfo()


def info(node: fx.Node) -> NodeInfo:
    found: NodeInfo = node.meta.get(_KEY, _NOTHING)
    return found


def set_info(node: fx.Node, value: NodeInfo) -> None:
    node.meta[_KEY] = value


def forget_info(node: fx.Node) -> None:
    """Delete all facts about a node, for a copy that torch compiles."""
    node.meta.clear()


def update_info(node: fx.Node, **changes: Any) -> None:
    node.meta[_KEY] = info(node)._replace(**changes)
