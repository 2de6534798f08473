"""Find the layer of the model that a value belongs to, from the pytree paths of its parameters."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from ..ir import Traced, info, operands_of

_NUMBERED = re.compile(r"(.+)[/.]\d+")


def layer_of_path(path: str) -> str:
    """Return the prefix of a parameter's path that names its layer: up to the first number after a name.

    >>> layer_of_path("0/layers/3/attention/w"), layer_of_path("0/layers.3.attention.w"), layer_of_path("0/embedding")
    ('0/layers/3', '0/layers.3', '0/embedding')
    """
    named = False
    for part in re.finditer(r"[^/.]+", path):  # a module's parameters have dotted paths
        if part[0].isdigit() and named:
            return path[: part.end()]
        named = named or not part[0].isdigit()
    return path


def is_numbered(layer: str) -> bool:
    return _NUMBERED.fullmatch(layer) is not None


@dataclass
class LayerIndex:
    """Layers of a model, in the order of use in its forward, and the layer of each value."""

    names: list[str]  # the layers' paths
    of: dict[fx.Node, int]  # index of the last layer that a forward value depends on; -1 if it uses no parameter

    @classmethod
    def find(cls, traced: Traced, forward: Collection[fx.Node]) -> LayerIndex:
        names = {node: {layer_of_path(info(node).path)} for node in traced.inputs if info(node).is_parameter}
        weights = made_of_parameters(forward)  # gathers and casts may be anywhere; a layer is placed by its computation
        order: dict[str, int] = {}
        of: dict[fx.Node, int] = {}
        for node in forward:
            operands = operands_of(node)
            if node in weights:
                names[node] = set().union(*(names[operand] for operand in operands))
                continue
            met = [order.setdefault(name, len(order)) for v in operands for name in sorted(names.get(v, ()))]
            of[node] = max(met + [of.get(operand, -1) for operand in operands], default=-1)
        for node in forward:
            if node in weights:
                of[node] = max(order.setdefault(name, len(order)) for name in sorted(names[node]))
        return cls(list(order), of)

    def is_numbered(self, index: int) -> bool:
        return index >= 0 and is_numbered(self.names[index])

    def stem(self, index: int) -> str:
        match = _NUMBERED.fullmatch(self.names[index])
        return match[1] if match is not None else self.names[index]


def made_of_parameters(forward: Collection[fx.Node]) -> set[fx.Node]:
    """Return parameters, and values computed from parameters only: casts, gathers and views of them."""
    found: set[fx.Node] = set()
    for node in forward:
        needs = operands_of(node)
        found.update(need for need in needs if need.op == "placeholder" and info(need).is_parameter)
        if needs and all(need in found for need in needs):
            found.add(node)
    return found
