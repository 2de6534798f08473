"""Purpose of moved and cast values: parameters, gradients or new values, each with its path and the line of its use."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from ..ir import Role, Source, Traced, first_operand, info, operands_of, primitive_name, update_info
from ..ops import TO_MEMORY
from .aliasing import view_base

aten = torch.ops.aten

_MOVES = {  # beside views and collectives: ops of one operand, which is their result in another place or form
    *(aten._to_copy.default, aten.clone.default, aten.reshape.default, aten.constant_pad_nd.default),
    *(aten._unsafe_view.default, aten.slice_backward.default, aten.select_backward.default, TO_MEMORY),
}
_JOINS = {aten.stack.default, aten.cat.default}

Known = tuple[Role, tuple[fx.Node, ...]]  # with the inputs that hold the parameters


class RoleFinder:
    """Finds the roles while the step is recorded: a linear forward is needed by no output, and erased afterwards."""

    def __init__(self) -> None:
        self._found: dict[fx.Node, Known] = {}  # of any input
        self._moved: set[fx.Node] = set()
        self._is_moving = False

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Call a function with ops that return their operand in another place or form."""
        self._is_moving = True
        result = move(x)
        self._is_moving = False
        return result

    def __call__(self, node: fx.Node) -> None:
        if self._is_moving:
            self._moved.add(node)
        is_sum = node.target is aten.add.Tensor and info(node).backward  # of the gradients of two uses
        if not (self._moves(node) or is_sum or node.target in _JOINS):
            return
        if (forward := info(node).forward_node) in self._found:
            self._found[node] = Role.GRADIENT, self._found[forward][1]
            return
        parts = [self._known(operand) for operand in operands_of(node)]
        known = [part for part in parts if part is not None]
        gradients = [part for part in known if is_sum and part[0] is Role.GRADIENT]  # the other summands are, too
        known = gradients or known
        if gradients or len(known) == len(parts):  # else it combines something else with a parameter
            role = known[0][0] if len({role for role, _ in known}) == 1 else Role.GRADIENT
            self._found[node] = role, tuple(dict.fromkeys(each for _, inputs in known for each in inputs))

    def _known(self, node: fx.Node) -> Known | None:
        return (Role.PARAMETER, (node,)) if node.op == "placeholder" else self._found.get(node)

    def record(self, traced: Traced) -> None:
        """Record the role of each op. This must run before passes, as they move values too."""
        nodes = [node for node in traced.graph.nodes if node.op in ("placeholder", "call_function")]
        known = {node: known for node in nodes if (known := self._known(node)) is not None}
        found = {node: each for node, each in known.items() if all(info(of).is_parameter for of in each[1])}
        self._find_new_values(traced, found)
        paths = {node: tuple(info(of).param_path or "the parameter" for of in each[1]) for node, each in found.items()}
        uses = _uses(traced, paths)
        for node, (role, _) in found.items():
            if node.op == "call_function":
                update_info(node, role=role, parameters=paths[node], used_at=uses.get(paths[node][0]))

    def _moves(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not operands_of(node):
            return False
        is_known = primitive_name(node) is not None or node.target in _MOVES or node in self._moved
        return is_known or view_base(node) is not None

    def _find_new_values(self, traced: Traced, found: dict[fx.Node, Known]) -> None:
        gradients = {node for node, (role, _) in found.items() if role is Role.GRADIENT}  # a function may return them
        for node in traced.inputs:
            index = info(node).updated_output
            value = traced.outputs[index] if index is not None and node in found else None
            while isinstance(value, fx.Node) and self._moves(value) and value not in gradients:
                found[value] = Role.NEW_PARAMETER, found[node][1]
                value = first_operand(value)


def _uses(traced: Traced, paths: dict[fx.Node, tuple[str, ...]]) -> dict[str, Source]:
    uses: dict[str, Source] = {}
    for node in traced.nodes:
        source = info(node).source
        if node in paths or info(node).backward or source is None:
            continue
        for operand in operands_of(node):
            for path in paths.get(operand, ()):
                uses.setdefault(path, source)
    return uses
