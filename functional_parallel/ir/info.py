"""What the library knows of a node of a graph, in one typed, immutable value.

It is stored under one key of `node.meta`. Copies of a node share it, so a change makes a new value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..collectives import Type
from .aval import Aval
from .source import Source

__all__ = ["NodeInfo", "forget_info", "info", "set_info", "update_info"]

_KEY = "info"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """The facts about a node.

    Attributes:
        val: shape, dtype and device of the value; a tuple of them for an op with several results.
        source: the line of the user's code that computes it.
        type: its state along each axis.
        backward: whether autograd emitted the op.
        no_grad: whether gradients were switched off where it was recorded.
        forward_node: the op that a backward op belongs to.
        replaced_by: the node that replaced this one, which was erased.
        implicit_cast: whether the checker inserted the op.
        recomputed: whether the op is a copy that recomputes a value in the backward.
        is_cheap_copy: whether it is such a copy of a cheap op.
        phase: "forward", "backward" or "update", where it is not the op's own.
        enumerated: of an indexing op, pairs of a dim of the operand and the dim of the indices that enumerates it.
        spec: of a microbatched value, the spec that says which dim holds the microbatches.
        path: of an input, its pytree path.
        param_path: of a parameter, its path within the parameters.
        is_parameter: whether the input is a parameter of the model.
        is_state: whether the input is part of the state that a step returns updated.
        donated: whether the program may write into the input's memory.
        updated_output: the number of the output that is the input's new value.
        trained: whether a gradient reaches the parameter; None where none was requested.
    """

    val: Aval | tuple[Aval | None, ...] | None = None
    source: Source | None = None
    type: Type | None = None
    backward: bool = False
    no_grad: bool = False
    forward_node: fx.Node | None = None
    replaced_by: fx.Node | None = None
    implicit_cast: bool = False
    recomputed: bool = False
    is_cheap_copy: bool = False
    phase: str | None = None
    enumerated: tuple[tuple[int, int], ...] = ()
    spec: Any = None
    path: str = ""
    param_path: str = ""
    is_parameter: bool = False
    is_state: bool = False
    donated: bool = False
    updated_output: int | None = None
    trained: bool | None = None

    @property
    def aval(self) -> Aval:
        """Shape, dtype and device of the one result."""
        assert isinstance(self.val, Aval), f"a node with several results, or none: {self.val}"
        return self.val

    @property
    def results(self) -> tuple[Aval | None, ...]:
        """Shape, dtype and device of each result; None for one that is not a tensor."""
        return self.val if isinstance(self.val, tuple) else (self.val,)

    @property
    def nbytes(self) -> int:
        """The bytes of all results."""
        return sum(each.nbytes for each in self.results if each is not None)

    @property
    def typed(self) -> Type:
        """The type, of a value in a typed graph."""
        assert self.type is not None, "the graph has no types"
        return self.type

    def result(self, index: int) -> Aval:
        """Return shape, dtype and device of one result, which is a tensor."""
        found = self.results[index]
        assert found is not None, f"result {index} is not a tensor"
        return found

    @property
    def avals(self) -> tuple[Aval, ...]:
        """Shape, dtype and device of each result, for an op all of whose results are tensors."""
        found = tuple(each for each in self.results if each is not None)
        assert len(found) == len(self.results), "a result is not a tensor"
        return found


_NOTHING = NodeInfo()


def info(node: fx.Node) -> NodeInfo:
    """Return what is known of a node."""
    found: NodeInfo = node.meta.get(_KEY, _NOTHING)
    return found


def set_info(node: fx.Node, value: NodeInfo) -> None:
    """Replace all that is known of a node."""
    node.meta[_KEY] = value


def forget_info(node: fx.Node) -> None:
    """Forget all that is known of a node, of a copy that torch compiles."""
    node.meta.clear()


def update_info(node: fx.Node, **changes: Any) -> None:
    """Change some facts about a node."""
    node.meta[_KEY] = replace(info(node), **changes)
