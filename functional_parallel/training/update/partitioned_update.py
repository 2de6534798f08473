"""Optimizer's update on a rank's shards, equal to the shards of the update of full parameters.

An update is called on shards if the optimizer has `specs`, or is declared elementwise. Any other update is partitioned
like a loss, which inserts the collectives that it needs: none for an elementwise one. Examples of others are Muon's
iterations over a matrix and LAMB's norm of a parameter. An update must not read padding, so padded dims are gathered.
"""

from __future__ import annotations

from functools import partial

import optree

from sharding_specs import P, broadcast_specs

from ...functions import PyTree, SpecTree, as_local_function, axis_mesh, relayout_leaf
from ...ops import ADAMW
from ...partitioner import Partitioning
from ...rules import register_rule
from .returned import Update, require_same_structure

register_rule(ADAMW, "..., ..., ..., ..., , -> ..., ..., ...")  # parameter, gradient, two moments, step, rate


def update_shards(update: Update, args: tuple[PyTree, ...], specs: tuple[SpecTree, ...]) -> tuple[PyTree, PyTree]:
    """Return new parameters and state of one rank, with the layouts of the old ones."""
    full = tuple(broadcast_specs(spec, arg) for spec, arg in zip(specs, args, strict=True))
    axes = {axis for spec in optree.tree_leaves(full) for axis in spec.axes}
    if not axes:
        return update(*args)
    even = optree.tree_map(_even, full)
    local = as_local_function(_checked(update))
    for axis in (name for name in reversed(axis_mesh().axis_names) if name in axes):
        own = optree.tree_map(partial(_of_axis, axis), even)
        out_specs = own[2], own[1]
        how = Partitioning("the optimizer's update", axis, lambda _, own=own: own, out_specs, parameters=2)  # type: ignore[misc]
        local = how.apply(local)
    inputs = optree.tree_map(relayout_leaf, args, full, even)
    new, _ = local.run(local.applied.resolve(inputs, axis_mesh()), *inputs)
    found: tuple[PyTree, PyTree] = optree.tree_map(relayout_leaf, new, (even[2], even[1]), (full[2], full[1]))
    return found


def _checked(update: Update) -> Update:
    return lambda gradients, state, params: require_same_structure(update(gradients, state, params), params, state)


def _of_axis(axis: str, spec: P) -> P:
    return spec.only({axis})


def _even(spec: P) -> P:
    """Return a spec without the axes that split padded dims: an update must not read the padding."""
    return spec.without(axis for dim in spec.padded for axis in spec.dim_axes()[dim])
