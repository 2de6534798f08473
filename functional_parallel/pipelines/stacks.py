"""Functions of stacked layer parameters as functions of the layers, which a pipeline stores apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import optree

from sharding_specs import Mesh, P, SpecError

from ..functions import LocalFunction, PyTree, Resolved, SpecTree, StackedTree


def unstacked(f: LocalFunction, find: Callable[[PyTree], StackedTree], lies: tuple[str, str]) -> LocalFunction:
    """Convert a function of stacked parameters to a function of layers. `find` returns which parameters are stacks."""

    def start(args: tuple[PyTree, ...], mesh: Mesh) -> Resolved:
        return replace(f.applied.start(args, mesh), stacks=find(args[0]))  # transforms inside do not shard this dim

    def resolve(inner: Resolved) -> Resolved:
        stacks = inner.stacks
        assert stacks is not None
        args, count = inner.entered(inner.args), len(inner.update)

        def of_layers(specs: Sequence[P]) -> tuple[P, ...]:
            return tuple(optree.tree_leaves(stacks.spread(specs, _of_layer)))

        specs = (*of_layers(inner.specs[:count]), *inner.specs[count:])
        outer = replace(inner, args=args, tree=optree.tree_structure(args), specs=specs, own=(), inner=inner)
        norm = None if inner.norm is None else of_layers(inner.norm)
        return replace(outer, update=of_layers(inner.update), norm=norm)

    def call(resolved: Resolved, params: PyTree, *rest: PyTree) -> tuple[PyTree, SpecTree]:
        assert resolved.stacks is not None
        return f.run(resolved.inside, resolved.stacks.restack(params), *rest)

    applied = f.then(f.run, resolver=resolve, lies=lies).applied
    return LocalFunction(call, replace(applied, start=start), f.name)


def _of_layer(spec: P) -> P:
    if spec.dims and spec.dims[0]:
        raise SpecError(
            f"{spec!r} cuts the first dim of a stack of layers, which a pipeline takes apart; give that transform the "
            "spec tree, so that it takes another dim"
        )
    padded = {dim - 1: size for dim, size in spec.padded.items()}
    return spec.replace(spec.dims[1:], padded=padded)
