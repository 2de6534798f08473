"""Which layer of the model a value belongs to, from the pytree paths of the parameters it is made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from ...tracing import Traced
from .recompute import operands

__all__ = ["Layers", "layer_of_path"]


def layer_of_path(path: str) -> str:
    """The part of a parameter's path that names its layer: up to the first number after a name.

    >>> layer_of_path("0/layers/3/attention/w"), layer_of_path("0/embedding")
    ('0/layers/3', '0/embedding')
    """
    parts = path.split("/")
    named = False
    for index, part in enumerate(parts):
        if part.isdigit() and named:
            return "/".join(parts[: index + 1])
        named = named or not part.isdigit()
    return path


@dataclass
class Layers:
    """The layers of a model, in the order in which its forward meets their parameters, and each value's layer.

    Attributes:
        names: the layers' paths.
        of: per forward value the index of its layer, the last one that it depends on; -1 if on no parameter.
    """

    names: list[str]
    of: dict[fx.Node, int]

    @classmethod
    def find(cls, traced: Traced, forward: Iterable[fx.Node]) -> Layers:
        names = {node: layer_of_path(node.meta["path"]) for node in traced.inputs if node.meta.get("parameter")}
        order: dict[str, int] = {}
        of: dict[fx.Node, int] = {}
        for node in forward:
            met = [
                order.setdefault(names[operand], len(order)) if operand in names else of.get(operand, -1)
                for operand in operands(node)
            ]
            of[node] = max(met, default=-1)
        return cls(list(order), of)

    def is_numbered(self, index: int) -> bool:
        """Whether this is one of a stack of layers."""
        return index >= 0 and self.names[index].rsplit("/", 1)[-1].isdigit() and "/" in self.names[index]

    def stem(self, index: int) -> str:
        """The path of the stack that a numbered layer is part of."""
        return self.names[index].rsplit("/", 1)[0]
