"""What a trace yields: a flat FX graph of aten ops and named collectives, with shapes and source lines beside it.

Every node carries in `node.meta`: `val` (an `Aval`, or a tuple of them), `source` (a `Source` or None), `backward`
(whether autograd emitted it) and `no_grad` (whether the user switched gradients off around it).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import fx

from .. import _torch
from ..collectives import primitive_of
from .source import Source

__all__ = [
    "Aval",
    "Traced",
    "argument",
    "aval_of",
    "forget_rewrites",
    "hollow",
    "in_order",
    "named_arguments",
    "operands_of",
    "primitive_name",
    "source_of",
    "tensor_operands",
    "walk_args",
    "where",
    "without_memory",
]

K = TypeVar("K", bound=Hashable)

_CPU = torch.device("cpu")
_FOR_REWRITES = ("forward", "merged", "implicit_cast")


@dataclass(frozen=True, slots=True)
class Aval:
    """A tensor without its values: shape, dtype, device.

    >>> Aval((2, 3), torch.float32).nbytes
    24
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = _CPU

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_differentiable(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.").replace("float", "f").replace("bf16", "bf16").replace("int", "i")
        return f"{name}[{', '.join(map(str, self.shape))}]"


def aval_of(value: torch.Tensor) -> Aval:
    """A tensor's shape, dtype and device; one object for all tensors that share them."""
    return _aval(tuple(int(size) for size in value.shape), value.dtype, value.device)


_aval = lru_cache(maxsize=4096)(Aval)


def without_memory(leaf: Any) -> Any:
    """A tensor of the same shape and dtype on the meta device; what is no tensor is itself."""
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, torch.Tensor) else leaf


def hollow(like: Any, shape: Sequence[int] | None = None) -> Any:
    """A tensor with the memory of one element, for those who ask for its shape, dtype and device alone.

    >>> hollow(torch.zeros(2, 3)).shape, hollow(torch.zeros(2, 3), (4, 3)).untyped_storage().nbytes()
    (torch.Size([2, 3]), 4)

    Args:
        like: a tensor or an `Aval`; a leaf that is neither is returned as it is.
        shape: another shape than that one's.
    """
    if not isinstance(like, (torch.Tensor, Aval)):
        return like
    return torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape if shape is None else tuple(shape))


@dataclass
class Traced:
    """A traced function: flat tensors in, flat values out.

    `inputs` are the placeholders in argument order; `captured` are tensors of an enclosing trace that the function
    closed over, with the placeholders that stand for them in `captured_inputs`; `constants` are real tensors met on the
    way, by the name of their `get_attr` node. `outputs` hold nodes, or Python values returned as they are.
    `layout_reads` has a `LayoutRead` for each input, by number, whose strides the graph depends on.
    """

    graph: fx.Graph
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    captured: list[torch.Tensor] = field(default_factory=list)
    captured_inputs: list[fx.Node] = field(default_factory=list)
    layout_reads: dict[int, Any] = field(default_factory=dict)

    @property
    def nodes(self) -> Iterator[fx.Node]:
        """The ops in order, without placeholders, constants and the output."""
        return (node for node in self.graph.nodes if node.op == "call_function")

    def copy(self) -> tuple[Traced, dict[fx.Node, fx.Node]]:
        """The same function in a graph of its own, for a rewrite on trial; and each node's copy."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.graph.nodes:
            if node.op != "output":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta = dict(node.meta)
                if "forward" in node.meta:
                    copies[node].meta["forward"] = copies.get(node.meta["forward"], node.meta["forward"])
        copied = Traced(
            graph,
            [copies[node] for node in self.inputs],
            [copies[output] if isinstance(output, fx.Node) else output for output in self.outputs],
            dict(self.constants),
            list(self.captured),
            [copies[node] for node in self.captured_inputs],
            dict(self.layout_reads),
        )
        copied.seal()
        return copied, copies

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """Let one value stand for another, outputs included, and drop that op.

        What refers to the op from outside the graph, as a backward op does to its forward, finds the new one under
        "merged" in its meta.
        """
        node.replace_all_uses_with(by)
        node.meta["merged"] = by
        self.outputs = [by if output is node else output for output in self.outputs]
        self.graph.erase_node(node)

    def settle(self) -> None:
        """Say that no more rewrites come; see `forget_rewrites`."""
        forget_rewrites(self.graph)

    def seal(self) -> None:
        """Set the graph's output node from `outputs` and drop what no output needs."""
        for node in list(self.graph.nodes):
            if node.op == "output":
                self.graph.erase_node(node)
        self.graph.output(tuple(self.outputs))
        for node in reversed(list(self.graph.nodes)):
            if node.op in ("call_function", "get_attr") and not node.users:
                self.graph.erase_node(node)


def forget_rewrites(graph: fx.Graph) -> None:
    """Forget what only rewrites ask for: names, which ops were erased, and what a backward op is the backward of."""
    for node in graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if key not in _FOR_REWRITES}
    _torch.forget_names(graph)


def primitive_name(node: fx.Node) -> str | None:
    """`"psum"` for a node that calls `torch.ops.fp.psum`; None for an op that is no primitive."""
    return primitive_of(node.target)


def source_of(node: fx.Node) -> Source | None:
    return node.meta.get("source")


def where(node: fx.Node) -> str:
    """An op and its source line, for messages."""
    return f"{node.target} at {source_of(node) or 'an unknown line'}"


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The node's operands in order of appearance, each occurrence counted."""
    found: list[fx.Node] = []
    walk_args((node.args, node.kwargs), lambda value: found.append(value) if isinstance(value, fx.Node) else None)
    return found


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The values an op takes, each once."""
    return list(dict.fromkeys(tensor_operands(node)))


def in_order(wanted: K, needed: Callable[[K], Iterable[K]], done: Container[K]) -> Iterator[K]:
    """What is not done yet of something and all that it needs, each after what it needs itself.

    Not by recursion: a norm is a chain of as many sums as there are parameters.

    >>> done = {}
    >>> for each in in_order(6, lambda number: [number // 2, number // 3] if number > 1 else [], done):
    ...     done[each] = "done"
    >>> list(done)
    [1, 3, 0, 2, 6]

    Args:
        wanted: what is to be done in the end.
        needed: what something needs, in the order in which to do it.
        done: what is done; the caller adds each to it before asking for the next.
    """
    waiting = [wanted]
    while waiting:
        last = waiting[-1]
        missing = [] if last in done else [each for each in needed(last) if each not in done]
        if missing:
            waiting += reversed(missing)
            continue
        waiting.pop()
        if last not in done:
            yield last


def named_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an op is called on, by the names in its schema; without those that it was not given."""
    return {**dict(zip((each.name for each in op._schema.arguments), args, strict=False)), **kwargs}


def argument(node: fx.Node, name: str) -> Any:
    """What an op takes under a name of its schema: as it was given, else the default; None where there is no such name.

    >>> x = fx.Graph().placeholder("x")
    >>> unbind = x.graph.call_function(torch.ops.aten.unbind.int, (x,))
    >>> argument(unbind, "dim"), argument(unbind, "keepdim")
    (0, None)
    """
    position, default = _parameters(node.target).get(name, (len(node.args), None))
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


@lru_cache(maxsize=4096)
def _parameters(op: Any) -> dict[str, tuple[int, Any]]:
    """Where an op takes its arguments, and what stands for them if it is not given any."""
    return {each.name: (index, each.default_value) for index, each in enumerate(op._schema.arguments)}


def walk_args(args: Any, visit: Callable[[Any], Any]) -> Any:
    """Rebuild an argument structure (tuples, lists, dicts, slices) with `visit` applied to every leaf."""
    return fx.node.map_aggregate(args, visit)


getitem = operator.getitem
