"""Values of a program that only one rank along an axis holds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from sharding_specs import Mesh, P

from ..ir import Traced, operands_of, primitive_name

__all__ = ["absent_values", "has_owner"]


def has_owner(specs: Sequence[P], mesh: Mesh) -> bool:
    """Whether some rank lacks a value of a program whose inputs have these specs."""
    return any(mesh.axis_size(axis) > 1 for spec in specs for axis in spec.owner)


def absent_values(traced: Traced, specs: Sequence[P], mesh: Mesh, rank: int) -> frozenset[fx.Node]:
    """Return the values of a program that a rank does not hold, because another rank owns them.

    `specs` are those of the inputs. An op on such a value runs on the owner only. A broadcast or scatter runs on all
    ranks, and so does a gather or reduce, which only returns nothing elsewhere.
    """
    coordinates = mesh.coordinates(rank)
    found = {
        node
        for node, spec in zip(traced.inputs, specs, strict=True)
        if any(coordinates[axis] != owner for axis, owner in spec.owner.items())
    }
    for node in traced.nodes:
        name = primitive_name(node)
        if name in ("gather", "reduce"):
            (axis,), owner = node.args[1], node.args[-1 if name == "gather" else 2]
            is_absent = coordinates[axis] != owner
        else:
            is_absent = name not in ("broadcast", "scatter") and not found.isdisjoint(operands_of(node))
        if is_absent:
            found.add(node)
    return frozenset(found)
