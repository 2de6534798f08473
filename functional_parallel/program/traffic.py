"""Which parameters a collective transfers, and the line of the model that uses them, for `explain`.

A gather of a parameter, and the sum of its gradient, are emitted where the function is called. The model's line is that
of the first op that computes with the parameter.
"""

from __future__ import annotations

import torch
from torch import fx

from ..ir import Source, Traced, info, operands_of, primitive_name, update_info
from .aliasing import view_base

aten = torch.ops.aten

_CARRIERS = {  # beside views and collectives: ops whose result is their operands, elsewhere or in another form
    *(aten._to_copy.default, aten.clone.default, aten.reshape.default, aten.constant_pad_nd.default),
    *(aten._unsafe_view.default, aten.slice_backward.default, aten.stack.default, aten.add.Tensor),
}

Labels = dict[fx.Node, tuple[str, ...]]


def label_traffic(traced: Traced) -> None:
    """Record for each collective of a parameter, or of its gradient, the path of the parameter and the model's line.

    It must run before passes, as they forget which forward op a backward op belongs to.
    """
    labels: Labels = {}
    for node in traced.graph.nodes:
        found = _label(node, labels)
        if found:
            labels[node] = found
    _label_updates(traced, labels)
    uses = _uses(traced, labels)
    for node, paths in labels.items():
        if node.op == "call_function":
            update_info(node, parameters=paths, used_at=uses.get(paths[0]))


def _label(node: fx.Node, labels: Labels) -> tuple[str, ...]:
    if node.op == "placeholder":
        return (info(node).param_path or "the parameter",) if info(node).is_parameter else ()
    if not _is_carrier(node):
        return ()
    forward = info(node).forward_node
    if forward is not None and forward in labels:
        return labels[forward]
    parts = [labels.get(operand, ()) for operand in operands_of(node)]
    # An op that combines something else with a parameter does not only carry it.
    return tuple(dict.fromkeys(path for part in parts for path in part)) if all(parts) else ()


def _is_carrier(node: fx.Node) -> bool:
    is_collective = primitive_name(node) is not None and bool(operands_of(node))
    return is_collective or node.target in _CARRIERS or view_base(node) is not None


def _label_updates(traced: Traced, labels: Labels) -> None:
    """Label the values that become the new value of a parameter, back to the op that computes it."""
    for node in traced.inputs:
        index = info(node).updated_output
        value = traced.outputs[index] if index is not None and node in labels else None
        while isinstance(value, fx.Node) and value not in labels and _is_carrier(value):
            labels[value] = labels[node]
            value = value.args[0]


def _uses(traced: Traced, labels: Labels) -> dict[str, Source]:
    """Return, for each path, the line of the first op of the forward that computes with the parameter."""
    found: dict[str, Source] = {}
    for node in traced.nodes:
        source = info(node).source
        if node in labels or info(node).backward or source is None:
            continue
        for operand in operands_of(node):
            for path in labels.get(operand, ()):
                found.setdefault(path, source)
    return found
