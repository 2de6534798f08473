"""Layouts of parameters, gradients and optimizer state in a training step: storage, loss and update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import optree

from sharding_specs import Mesh, broadcast_specs

from ...collectives import bind
from ...functions import Layout, PyTree, SpecTree
from ...ir import hollow
from ...optim import Optimizer, is_declared_elementwise, like_params, tree_map_params
from ...pipelines import pipeline_of, stacks_of
from ...requests import (
    NormSharding,
    StateRequest,
    SummedApart,
    UpdateSharding,
    flat_update,
    owners_of,
    split_state,
    update_specs,
    with_leaves,
)
from .elementwise import inner_slices, slice_mismatch, with_constants
from .flat import FlatPacking, NoPacking
from .update_layout import at_rest


@dataclass(frozen=True)
class StepLayout:
    """Specs of parameters, gradients and state in a step.

    `compute` and `kept` have the tree of the parameters. The other specs have the tree that `packing` computes from it.
    """

    params: PyTree  # shapes, in the dtypes in which they are trained
    packing: NoPacking | FlatPacking
    compute: SpecTree  # of the parameters in the loss
    kept: SpecTree  # of the parameters at rest, between steps
    summed: SpecTree  # of the gradients that the loss returns
    whole: SpecTree  # of the parameters before the update splits them
    update: SpecTree  # of the parameters in the optimizer's update
    counted: SpecTree  # of the gradients for the sum of squares of their norm
    frozen: tuple[bool, ...]  # per leaf of the parameters, by the optimizer
    owners: Mapping[str, int] = field(default_factory=dict)  # index of the rank that holds all, by axis

    def state(self, state: PyTree, optimizer: Optimizer, requests: Sequence[StateRequest]) -> SpecTree:
        """Return the specs of a packed state of full tensors: the optimizer's `specs`, or the layouts of the update."""
        own, leaves = split_state(state, requests)
        by_itself = getattr(optimizer, "specs", None)  # a user's own pair may lack it
        specs = self._like_params(own) if by_itself is None else by_itself(self.params, self.update)
        added = [each.specs(held, self._like_params) for each, held in zip(requests, leaves, strict=True)]
        found = with_leaves(specs, requests, added)
        if not self.owners:
            return found
        return optree.tree_map(lambda spec: spec.replace(owner=self.owners), broadcast_specs(found, state))

    def _like_params(self, tree: PyTree) -> SpecTree:
        return like_params(tree, self.packing.like, self.update)

    def packed_state(self, state: PyTree) -> PyTree:
        """Pack a state of full tensors into the tree that the step holds."""
        return tree_map_params(self.packing.pack_whole, state, optree.tree_structure(self.params))

    def unpacked_state(self, state: PyTree) -> PyTree:
        """Unpack a state of full tensors into the tree of the parameters, which a checkpoint saves for every layout."""
        return tree_map_params(self.packing.unpack_whole, state, self.packing.structure)


def find_step_layout(f: Layout, mesh: Mesh, params: PyTree, optimizer: Optimizer, clipped: bool) -> StepLayout:
    """Compute the layouts of a step from the layout of its loss. Of the trained parameters only the shapes matter.

    If the update uses the gradients' norm (`clipped`), every ZeRO stage sums it in the same order.
    """
    shapes = optree.tree_map(hollow, params)
    with bind(f.mesh(mesh).shape, None):
        compute = broadcast_specs(f.arguments((shapes,))[0], shapes)
        kept = optree.tree_map(at_rest, compute)
        frozen = tuple(optree.tree_leaves(_decided(f, shapes, optimizer, "frozen", False)))
        if flat_update(f):
            axes = tuple(each.axis for each in f.all(UpdateSharding))
            _refuse_stages(f, axes)
            apart = f.last(SummedApart)
            label = 0 if apart is None else apart.label(shapes)
            packing = FlatPacking(shapes, compute, mesh, axes, optimizer, label, frozen)
            split = packing.split
            return StepLayout(shapes, packing, compute, kept, packing.summed, packing.whole, split, split, frozen)
        stacks, norm = stacks_of(f), f.last(NormSharding) if clipped else None
        if stacks is not None:
            stacks.require_elementwise(optimizer, shapes, partial(_beyond_layers, optimizer))
        update = _split_over(update_specs(f), shapes, kept, mesh)
        everywhere = optree.tree_map(lambda spec: spec.replace(owner={}), update)
        counted = _split_over(None if norm is None else norm.specs, shapes, everywhere, mesh)
        packed = NoPacking(shapes, _decided(f, shapes, optimizer, "constants", None))
        return StepLayout(shapes, packed, compute, kept, compute, kept, update, counted, frozen, owners_of(f))


def _refuse_stages(f: Layout, axes: Sequence[str]) -> None:
    if pipeline_of(f) is not None:
        raise ValueError(
            f"zero(…, {axes[0]!r}, layout='flat') lays all parameters end to end, but a pipeline's ranks hold "
            "those of their own stages: use layout='dims' with fp.pipeline"
        )


def _decided(f: Layout, shapes: PyTree, optimizer: Optimizer, field: str, default: Any) -> PyTree:
    """Return the result of the optimizer's `field` per parameter, from full parameters, or stacks of layers."""
    decide = getattr(optimizer, field, None)  # a user's own pair may lack it
    if decide is None:
        return None if default is None else optree.tree_map(lambda _: default, shapes)
    stacks = stacks_of(f)
    if stacks is not None:
        return stacks.per_layer(decide, shapes)
    return optree.tree_broadcast_prefix(decide(shapes), shapes)


def _beyond_layers(optimizer: Optimizer, stacked: PyTree, is_stack: Callable[[Any], bool]) -> str | None:
    if not is_declared_elementwise(optimizer):
        return "it does not declare it, by fp.optim.Optimizer(…, elementwise=True)"
    decide = getattr(optimizer, "constants", None)
    constants = None if decide is None else optree.tree_broadcast_prefix(decide(stacked), stacked)
    update, slices = with_constants(optimizer, constants), inner_slices(stacked, is_stack)
    found = slice_mismatch(optimizer.init, update, stacked, slices)
    return None if found is None else f"given one layer of each stack, it {found}"


def _split_over(
    further: Callable[[tuple[PyTree, ...]], SpecTree] | None, params: PyTree, specs: SpecTree, mesh: Mesh
) -> SpecTree:
    if further is None:
        return specs
    return optree.tree_map(lambda a, b: a.divided(b, mesh), specs, broadcast_specs(further((params,)), params))
