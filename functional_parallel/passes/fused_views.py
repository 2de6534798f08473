"""Replace chains of views by one view or none: `einsum` and linear layers permute each operand several times.

A chain of permutations and of dims of size one is an arrangement. It maps each dim to a dim of the first tensor, or to
a dim of size one. Any arrangement takes at most one op. A view of a view is a view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ..ir import RESHAPES, UNIT_DIMS, Traced, info
from .program_pass import Phase, ProgramPass, Scope

aten = torch.ops.aten


@dataclass(frozen=True)
class _Arrangement:
    """A view of `base`: for each dim, the dim of the base at this position, or None for a dim of size one."""

    base: fx.Node
    dims: tuple[int | None, ...]


@dataclass(frozen=True)
class FusedViews(ProgramPass):
    """Replace chains of views by one view or none."""

    name: ClassVar[str] = "views"
    phase: ClassVar[Phase] = Phase.IN_PLACE
    scope: ClassVar[Scope] = Scope.STAGE
    affects_memory: ClassVar[bool] = False
    is_implied: ClassVar[bool] = True

    def run(self, traced: Traced, mesh: Mesh) -> None:
        fuse_views(traced)


def fuse_views(traced: Traced) -> Traced:
    """Rewrite every chain of permutations, squeezes and the like, in place. Return the sealed graph."""
    found: dict[fx.Node, _Arrangement] = {}
    with traced.without_output() as undone:
        for node in list(traced.nodes):
            if node.target in RESHAPES and node.args[0].target in RESHAPES:
                node.args = (node.args[0].args[0], *node.args[1:])
            arrangement = _arrangement(node, found)
            if arrangement is None:
                continue
            base = arrangement.base
            if _is_in_order(arrangement) and info(base).aval.shape == info(node).aval.shape:
                node.replace_all_uses_with(base)
                undone[node] = base
                continue
            found[node] = arrangement
            if node.args[0] is not base:
                _write(node, arrangement)
    return traced


def _arrangement(node: fx.Node, found: dict[fx.Node, _Arrangement]) -> _Arrangement | None:
    if node.target not in _ARRANGE:
        return None
    source = node.args[0]
    own = (None if size == 1 else dim for dim, size in enumerate(info(source).aval.shape))
    before = found.get(source) or _Arrangement(source, tuple(own))
    dims = _ARRANGE[node.target](before.dims, node)
    return None if dims is None else _Arrangement(before.base, dims)


def _is_in_order(arrangement: _Arrangement) -> bool:
    kept = [dim for dim in arrangement.dims if dim is not None]
    return kept == sorted(kept)


def _write(node: fx.Node, arrangement: _Arrangement) -> None:
    base, shape = arrangement.base, info(node).aval.shape
    if _is_in_order(arrangement):
        node.target, node.args = aten.view.default, (base.args[0] if base.target in RESHAPES else base, list(shape))
    elif len(shape) == info(base).aval.ndim:
        ones = iter(dim for dim, size in enumerate(info(base).aval.shape) if size == 1)
        order = [next(ones) if dim is None else dim for dim in arrangement.dims]
        node.target, node.args = aten.permute.default, (base, order)


_Dims = tuple[int | None, ...]  # as in `_Arrangement`; the functions below return the effect of an op


def _permute(dims: _Dims, node: fx.Node) -> _Dims | None:
    return tuple(dims[index] for index in node.args[1])


def _transpose(dims: _Dims, node: fx.Node) -> _Dims | None:
    a, b = node.args[1:] or (0, -1)
    turned = list(dims)
    if turned:
        turned[a], turned[b] = turned[b], turned[a]
    return tuple(turned)


def _resize(dims: _Dims, node: fx.Node) -> _Dims | None:
    before, after = info(node.args[0]).aval.shape, info(node).aval.shape
    if [size for size in before if size != 1] != [size for size in after if size != 1]:
        return None
    kept = iter(dim for dim in dims if dim is not None)
    return tuple(None if size == 1 else next(kept) for size in after)


_ARRANGE = {
    **dict.fromkeys(RESHAPES | UNIT_DIMS, _resize),
    **dict.fromkeys([aten.t.default, aten.transpose.int], _transpose),
    aten.permute.default: _permute,
}
