"""Which layer of the model a value belongs to, from the pytree paths of the parameters it is made of."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from ..ir import Traced, info, operands_of

__all__ = ["LayerIndex", "is_numbered", "layer_of_path", "made_of_parameters"]

_NUMBERED = re.compile(r"(.+)[/.]\d+")


def layer_of_path(path: str) -> str:
    """The part of a parameter's path that names its layer: up to the first number after a name.

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
    """Whether a layer is one of a stack, by its path."""
    return _NUMBERED.fullmatch(layer) is not None


@dataclass
class LayerIndex:
    """The layers of a model, in the order in which its forward meets their parameters, and each value's layer.

    Attributes:
        names: the layers' paths.
        of: per forward value the index of its layer, the last one that it depends on; -1 if on no parameter.
    """

    names: list[str]
    of: dict[fx.Node, int]

    @classmethod
    def find(cls, traced: Traced, forward: Collection[fx.Node]) -> LayerIndex:
        names = {node: {layer_of_path(info(node).path)} for node in traced.inputs if info(node).is_parameter}
        weights = made_of_parameters(forward)  # gathers and casts stand anywhere: a layer is met where it computes
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
        """Whether this is one of a stack of layers."""
        return index >= 0 and is_numbered(self.names[index])

    def stem(self, index: int) -> str:
        """The path of the stack that a numbered layer is part of."""
        match = _NUMBERED.fullmatch(self.names[index])
        return match[1] if match is not None else self.names[index]


def made_of_parameters(forward: Collection[fx.Node]) -> set[fx.Node]:
    """Parameters, and what is made of nothing else: casts, gathers, views of them."""
    found: set[fx.Node] = set()
    for node in forward:
        needs = operands_of(node)
        found.update(need for need in needs if need.op == "placeholder" and info(need).is_parameter)
        if needs and all(need in found for need in needs):
            found.add(node)
    return found
