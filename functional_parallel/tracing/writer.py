"""Graph of a trace, and the node of each of its tensors.

`Recorder` adds the dispatch, which decides how each op is recorded. Helpers of the dispatch accept a `Writer`.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument, Target

from .. import _torch
from ..errors import TracingError
from ..ir import Args, Aval, Kwargs, NodeInfo, Source, Traced, aval_of, current_source, info, update_info, walk_args
from .closed_over import ClosedOver, closed_over
from .memory_layout import Layouts
from .view_chains import ViewChains

aten = torch.ops.aten


class TraceWriter(_torch.TorchDispatchMode):
    """Write nodes, and find the node of a tensor. The arguments are as for `trace`; `outer` is the trace around."""

    def __init__(
        self,
        fake_mode: _torch.FakeTensorMode,
        forward_only: bool,
        on_node: Callable[[fx.Node], None] | None,
        outer: TraceWriter | None,
        is_local_body: bool = False,
    ) -> None:
        _torch.TorchDispatchMode.__init__(self)
        self.fake_mode, self.forward_only, self.on_node = fake_mode, forward_only, on_node
        self.is_local_body, self.outer = is_local_body, outer
        self.results: _torch.FakeResults = _torch.FakeResults(fake_mode) if outer is None else outer.results
        self.traced = Traced(fx.Graph())
        self._nodes: dict[int, fx.Node] = {}
        self._references: dict[int, weakref.ref[torch.Tensor]] = {}
        self.aliases = ViewChains(self.create)
        around = None if outer is None else outer.layouts
        self.layouts: Layouts = Layouts(self.traced, self.node_of, self.living, around)
        self.closed_over: set[fx.Node] = set()
        self._trainable: dict[fx.Node, ClosedOver] = {}  # closed-over tensors that require gradients
        self.zeros: set[fx.Node] = set()
        self._is_unrolling = False
        self.calls: dict[Any, Any] = {}  # recorded calls, by what they depend on
        self.sites: dict[fx.Node, tuple[Any, int]] = {}  # constants with the number of a draw from an ambient key
        self.values_read = 0  # times that the function read the values of a tensor
        self.notes: dict[Any, Any] = {} if outer is None else outer.notes  # shared by nested traces
        self._forwards: dict[int, fx.Node] = {}  # by number of the autograd node
        self._thread = threading.get_ident()
        self._numbered = _torch.next_node_number()
        self._around = -1  # number of a backward that is running around the ops recorded now

    # --- nodes of tensors ---

    def start(self, arguments: list[torch.Tensor], types: Sequence[Any] | None, paths: Sequence[str] = ()) -> None:
        for index, tensor in enumerate(arguments):
            node = self.traced.graph.placeholder(f"x{index}")
            update_info(node, val=aval_of(tensor), type=None if types is None else types[index])
            if paths:
                update_info(node, path=paths[index])
            self.traced.inputs.append(node)
            self.bind(tensor, node)

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        key = id(tensor)
        self._nodes[key] = node
        self.layouts.bind(tensor, node)
        if key not in self._references:
            self._references[key] = weakref.ref(tensor, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        self._nodes.pop(key, None)
        self._references.pop(key, None)

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node that computes a tensor. Create one for a new constant or captured tensor."""
        node = self._nodes.get(id(tensor))
        if node is not None:
            return node
        node = self._capture(tensor) if isinstance(tensor, _torch.FakeTensor) else self._constant(tensor)
        self.closed_over.add(node)
        update_info(node, val=aval_of(tensor))
        self.bind(tensor, node)
        if tensor.requires_grad and node.op == "get_attr":
            self._trainable[node] = closed_over(tensor)
        return node

    def value(self, tensor: torch.Tensor) -> fx.Node | None:
        return self._nodes.get(id(tensor))

    def bindings(self) -> dict[int, tuple[Any, fx.Node]]:
        """Return the node of each tensor that lives, with a reference to the tensor, by number."""
        return {key: (self._references[key], node) for key, node in self._nodes.items()}

    def has_written(self, before: dict[int, tuple[Any, fx.Node]]) -> bool:
        """Whether a tensor with one of these bindings has other values now."""
        now = self.bindings()
        return any(
            key in now and now[key][0] is known and now[key][1] is not node for key, (known, node) in before.items()
        )

    def living(self) -> Iterator[_torch.FakeTensor]:
        references = [reference for key, reference in self._references.items() if key in self._nodes]
        found = (reference() for reference in references)
        return (tensor for tensor in found if isinstance(tensor, _torch.FakeTensor))

    @property
    def trainable_constants(self) -> list[ClosedOver]:
        """Closed-over tensors that require gradients, of this trace and of the traces inside it."""
        # A tensor that the function only detaches, or reads without gradients, is not included.
        inside: list[ClosedOver] = self.notes.setdefault("trainable constants", [])
        return [*inside, *self._differentiated()]

    def _differentiated(self) -> Iterator[ClosedOver]:
        for node, found in self._trainable.items():
            if any(user.target is not aten.detach.default and not info(user).no_grad for user in node.users):
                yield found

    def _constant(self, tensor: torch.Tensor) -> fx.Node:
        if _torch.is_functorch_wrapped(tensor):
            raise TracingError(
                "the function closes over a tensor that an enclosing torch.func transform is differentiating or "
                f"mapping (shape {tuple(tensor.shape)}); pass it as an argument"
            )
        name = f"constant{len(self.traced.constants)}"
        with _torch.disable_modes():  # the fake mode would make it a fake
            self.traced.constants[name] = tensor.detach()
        return self._at_front(lambda: self.traced.graph.create_node("get_attr", name))

    def _capture(self, tensor: _torch.FakeTensor) -> fx.Node:
        if self.outer is None and tensor.fake_mode is self.fake_mode:
            raise TracingError(
                f"{current_source() or 'the function'}: a tensor of shape {tuple(tensor.shape)} was computed where the "
                "trace does not see it, in a thread that the function started; compute it without one"
            )
        name = f"captured{len(self.traced.captured)}"
        node = self._at_front(lambda: self.traced.graph.placeholder(name))
        self.traced.captured.append(tensor)
        self.traced.captured_inputs.append(node)
        if self.outer is not None:
            update_info(node, type=info(self.outer.node_of(tensor)).type)
        return node

    def _at_front(self, create: Callable[[], fx.Node]) -> fx.Node:
        with self.traced.graph.inserting_before(next(iter(self.traced.graph.nodes), None)):
            return create()

    def lift(self, func: _torch.Op, value: torch.Tensor) -> torch.Tensor:
        lifted = _torch.without_constant(func(value))
        self.bind(lifted, self.literal(value, current_source()))
        return lifted

    def literal(self, value: torch.Tensor, source: Source | None) -> fx.Node:
        """Add a constant with these values, which the line created."""
        with _torch.disable_modes():
            node = self._constant(value.clone())
        update_info(node, val=aval_of(value), source=source)
        return node

    # --- nodes of ops ---

    @contextmanager
    def unrolling(self) -> Iterator[None]:
        """Record the replacement of an op that was called below autograd, where composite ops are not decomposed."""
        outer, self._is_unrolling = self._is_unrolling, True
        try:
            with self:
                yield
        finally:
            self._is_unrolling = outer

    @contextmanager
    def inside_backward(self) -> Iterator[None]:
        """Record a forward and its backward while another backward is running."""
        kept = self._forwards, self._numbered, self._thread, self._around
        self._forwards, self._numbered = {}, _torch.next_node_number()
        self._thread, self._around = threading.get_ident(), _torch.backward_number()
        try:
            yield
        finally:
            self._forwards, self._numbered, self._thread, self._around = kept

    def write(self, func: _torch.Op, args: Args, kwargs: Kwargs, result: Argument) -> fx.Node:
        node_args, node_kwargs = walk_args((tuple(args), dict(kwargs)), self._as_node)
        number = _torch.backward_node_number(self._around)
        backward = number is not None
        forward = self._forwards.get(number) if number is not None else None
        source = (info(forward).source if forward is not None else None) if backward else current_source()
        no_grad = self._gradients_are_off(func, backward)
        copy = None if forward is None else info(forward).copy
        known = NodeInfo(_value(result), source, None, backward, no_grad, forward, copy=copy)
        node = self.traced.call(func, node_args, known, node_kwargs)
        self._number(node)
        self._bind_result(node, result)
        return node

    def _as_node(self, value: Argument) -> Argument:
        if isinstance(value, torch.device):
            return _torch.wished_device(value)
        return self.node_of(value) if isinstance(value, torch.Tensor) else value

    def _gradients_are_off(self, func: _torch.Op, backward: bool) -> bool:
        """Whether an op that is recorded now has no derivative because gradients are switched off."""
        raise NotImplementedError

    def _number(self, node: fx.Node) -> None:
        # Each thread numbers its nodes from 0, so nodes that a backward creates in an autograd thread are skipped.
        if threading.get_ident() != self._thread:
            return
        now = _torch.next_node_number()
        for number in range(self._numbered, now):
            self._forwards[number] = node
        self._numbered = now

    def _bind_result(self, node: fx.Node, result: Argument) -> None:
        self._announce(node)
        if isinstance(result, torch.Tensor):
            self.bind(result, node)
            return
        for index, part in enumerate(result):
            if isinstance(part, torch.Tensor):
                item = self.create(operator.getitem, (node, index), {}, info(node)._replace(val=aval_of(part)))
                self.bind(part, item)

    def _announce(self, node: fx.Node) -> None:
        if self.on_node is not None:
            self.on_node(node)

    def create(self, op: Target, args: Args, kwargs: Kwargs, known: NodeInfo) -> fx.Node:
        node = self.traced.call(op, args, known, kwargs)
        self._announce(node)
        return node

    def finish(self, outputs: Sequence[Any]) -> Traced:
        self.traced.outputs = [self._as_node(value) for value in outputs]
        self.traced.seal()
        self.notes.setdefault("trainable constants", []).extend(self._differentiated())
        return self.traced


def _value(result: Argument) -> Aval | tuple[Aval | None, ...]:
    if isinstance(result, torch.Tensor):
        return aval_of(result)
    return tuple(aval_of(part) if isinstance(part, torch.Tensor) else None for part in result)
