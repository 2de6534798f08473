"""Layouts of parameters, gradients and optimizer state in a training step: storage, loss and update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import optree
import torch

from sharding_specs import Mesh, P, broadcast_specs, tree_paths

from ...functions import Applied, LocalFunction, PyTree, SpecTree, StackedTree
from ...ir import hollow, without_memory
from ...optim import Optimizer, is_declared_elementwise, like_params, tree_map_params
from ...pipelines import pipeline_of
from ...requests import (
    Microbatches,
    OffloadedState,
    StateRequest,
    SummedApart,
    UpdateSharding,
    flat_update,
    owners_of,
    split_state,
    with_leaves,
)
from ...stateful import at_rest
from .elementwise import inner_slices, slice_mismatch, with_constants
from .flat import FlatPacking, NoPacking


@dataclass(frozen=True)
class StepLayout:
    """Specs of parameters, gradients and state in a step.

    `compute` and `kept` have the tree of the parameters. The other specs have the tree that `packing` computes from it.
    """

    mesh: Mesh
    params: PyTree  # shapes, in their training dtypes
    packing: NoPacking | FlatPacking
    compute: SpecTree  # of the parameters in the loss
    kept: SpecTree  # of the parameters at rest, between steps
    summed: SpecTree  # of the gradients that the loss returns
    whole: SpecTree  # of the parameters before the update splits them
    update: SpecTree  # of the parameters in the optimizer's update
    gradients: SpecTree  # of the gradients between their sum and the update
    counted: SpecTree  # of the gradients for the sum of squares of their norm
    frozen: tuple[bool, ...]  # per leaf of the parameters, by the optimizer
    owners: Mapping[str, int] = field(default_factory=dict)  # index of the rank that holds all, by axis
    stacks: StackedTree | None = None  # which parameters of the user are stacks of layers
    offload: OffloadedState = field(default_factory=OffloadedState)

    def entered(self) -> StepLayout:
        """Return the layouts inside a program, which has fetched the parameters and state."""
        kept, update = (optree.tree_map(P.entered, specs) for specs in (self.kept, self.update))
        return replace(self, kept=kept, update=update)

    def in_memories(self, offload: OffloadedState, accumulates: bool) -> StepLayout:
        """Return the layouts with state and gradients in memories. The norm is where gradients are accumulated."""
        leaves = optree.tree_leaves(self.packing.like)

        def placed(specs: SpecTree, memory: str) -> SpecTree:
            found, structure = optree.tree_flatten(specs)
            return structure.unflatten(map(_in_memory, found, offload.memories(leaves, memory)))

        update, gradients = placed(self.update, offload.memory), placed(self.gradients, offload.gradients)
        counted = placed(self.counted, offload.gradients if accumulates else "device")
        return replace(self, update=update, gradients=gradients, counted=counted, offload=offload)

    def inside(self, specs: SpecTree) -> SpecTree:
        """Return the specs of state where the update reads it, inside a program."""
        found = optree.tree_map(P.entered, specs)
        return optree.tree_map(lambda spec: _in_memory(spec, "device"), found) if self.offload.on_device else found

    def state(self, state: PyTree, optimizer: Optimizer, requests: Sequence[StateRequest]) -> SpecTree:
        """Return the specs of a packed state of full tensors: the optimizer's `specs`, or the layouts of the update."""
        own, leaves = split_state(state, requests)
        by_itself = getattr(optimizer, "specs", None)  # a user's own pair may lack it
        specs = self.like_params(own) if by_itself is None else by_itself(self.params, self.update)
        specs = self.with_numbers(own, specs, self.offload.on_device)
        added = [each.specs(held, self) for each, held in zip(requests, leaves, strict=True)]
        found = with_leaves(specs, requests, added)
        if not self.owners:
            return found
        return optree.tree_map(lambda spec: spec.replace(owner=self.owners), broadcast_specs(found, state))

    def with_numbers(self, state: PyTree, specs: SpecTree, on_device: bool = False) -> SpecTree:
        """Put the numbers of an optimizer's state where its update is, and everything else if that is one memory."""
        memory = self.offload.memory
        is_whole = all(spec.memory == memory for spec in optree.tree_leaves(self.update))

        def placed(leaf: Any, spec: P) -> P:
            is_number = isinstance(leaf, torch.Tensor) and not leaf.ndim
            inside = P(memory=memory).entered().memory  # no number is on disk
            there = memory if not is_number else "device" if on_device else inside
            return _in_memory(spec, there) if is_whole or is_number else spec

        return optree.tree_map(placed, state, broadcast_specs(specs, state))

    def like_params(self, tree: PyTree) -> SpecTree:
        return like_params(tree, self.packing.like, self.update)

    def trained(self) -> dict[str, tuple[torch.Tensor, P]]:
        """Return the trained parameters and their specs in the update, by path. A flat layout has none."""
        if self.packing.groups:
            return {}
        leaves = zip(optree.tree_leaves(self.params), optree.tree_leaves(self.update), strict=True)
        rows = zip(tree_paths(self.params), leaves, self.frozen, strict=True)
        return {
            path: (leaf, spec.in_compute())
            for path, (leaf, spec), fixed in rows
            if not fixed and isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        }

    def by_layer(self, tree: PyTree, params: PyTree, fresh: bool) -> PyTree:
        """Return a tree with the layers of stacks apart, where it is like the user's parameters.

        Layers of a `fresh` tree, whose memory is not the caller's, get separate memory.
        """
        if self.stacks is None:
            return tree
        found = self.stacks.unstack_all(tree, params)
        return optree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, found) if fresh else found

    def as_given(self, params: PyTree) -> PyTree:
        """Return parameters of the step with the structure and shapes of the user's, without values."""
        return params if self.stacks is None else self.stacks.restack(optree.tree_map(without_memory, params))

    def packed_state(self, state: PyTree) -> PyTree:
        """Pack a state of full tensors into the tree that the step holds."""
        return tree_map_params(self.packing.pack_whole, state, optree.tree_structure(self.params))

    def unpacked_state(self, state: PyTree) -> PyTree:
        """Unpack a state of full tensors into the tree of the parameters, which a checkpoint saves for every layout."""
        return tree_map_params(self.packing.unpack_whole, state, self.packing.structure)


def find_step_layout(f: LocalFunction, mesh: Mesh, params: PyTree, optimizer: Optimizer, clipped: bool) -> StepLayout:
    """Resolve the layouts of a step. Of the user's parameters, in the types that are trained, only the shapes matter.

    If the update uses the gradients' norm (`clipped`), every ZeRO stage sums it in the same order.
    """
    found = _layouts_on_device(f, mesh, params, optimizer, clipped)
    offload, accumulates = f.applied.last(OffloadedState), bool(f.applied.all(Microbatches))
    return found if offload is None else found.in_memories(offload, accumulates)


def _layouts_on_device(f: LocalFunction, mesh: Mesh, params: PyTree, optimizer: Optimizer, clipped: bool) -> StepLayout:
    resolved, applied = f.resolve((params,), mesh), f.applied
    like = optree.tree_map(hollow, params)
    shapes, specs = resolved.args[0], resolved.arguments[0]
    compute, kept = optree.tree_map(P.in_compute, specs), optree.tree_map(at_rest, specs)
    whole = optree.tree_map(P.entered, kept)
    frozen = tuple(optree.tree_leaves(_decided(resolved.stacks, like, optimizer, "frozen", False)))
    if flat_update(applied):
        axes = tuple(each.axis for each in applied.all(UpdateSharding))
        _refuse_stages(applied, axes)
        _refuse_share(applied)
        apart = applied.last(SummedApart)
        label = 0 if apart is None else apart.label(shapes)
        packing = FlatPacking(shapes, compute, mesh, axes, optimizer, label, frozen)
        split = packing.split
        memories = {spec.entered().memory for spec in optree.tree_leaves(kept)}
        storage = {"memory": memories.pop()} if len(memories) == 1 else {}
        flat = optree.tree_map(lambda spec: spec.replace(storage=storage), packing.whole)
        return StepLayout(mesh, shapes, packing, compute, kept, packing.summed, flat, split, split, split, frozen)
    if resolved.stacks is not None:
        _require_elementwise(resolved.stacks, optimizer, like)
    structure, norm = optree.tree_structure(shapes), (resolved.norm if clipped else None) or (P(),) * len(frozen)
    update = resolved.updated()
    counted = [a.replace(owner={}, storage={}).divided(b, mesh) for a, b in zip(update, norm, strict=True)]
    packed = NoPacking(shapes, _decided(resolved.stacks, like, optimizer, "constants", None))
    owners = owners_of(applied)
    trees = structure.unflatten(update), structure.unflatten(map(P.in_compute, update)), structure.unflatten(counted)
    return StepLayout(mesh, shapes, packed, compute, kept, compute, whole, *trees, frozen, owners, resolved.stacks)


def _in_memory(spec: P, memory: str) -> P:
    return spec.replace(storage={**spec.storage, "memory": memory})


def _refuse_stages(f: Applied, axes: Sequence[str]) -> None:
    if pipeline_of(f) is not None:
        raise ValueError(
            f"zero(…, {axes[0]!r}, layout='flat') lays all parameters end to end, but a pipeline's ranks hold "
            "those of their own stages: use layout='dims' with fp.pipeline"
        )


def _refuse_share(f: Applied) -> None:
    offload = f.last(OffloadedState)
    if offload is not None and offload.fraction != 1:
        raise ValueError(
            f"fp.offload(fraction={offload.fraction:g}): a flat layout has one vector of state, of which no share "
            "moves: use layout='dims' in fp.zero, or leave the fraction out"
        )


def _decided(stacks: StackedTree | None, params: PyTree, optimizer: Optimizer, field: str, default: Any) -> PyTree:
    """Return the result of the optimizer's `field` per parameter of the step. A layer gets the result of its stack."""
    decide = getattr(optimizer, field, None)  # a user's own pair may lack it
    if decide is None and default is None:
        return None
    structure = optree.tree_structure(params)
    found = default if decide is None else decide(params)
    values = structure.flatten_up_to(optree.tree_broadcast_prefix(found, params))
    return structure.unflatten(values) if stacks is None else stacks.spread(values)


def _require_elementwise(stacks: StackedTree, optimizer: Optimizer, params: PyTree) -> None:
    """Check that the optimizer does not need a full stack of layers, if the parameters have one."""
    if not any(stacks.lengths):
        return
    why = "it has `specs`, as that of adafactor, whose means go over a whole parameter"
    if getattr(optimizer, "specs", None) is None:
        found = _beyond_layers(stacks, optimizer, params)
        if found is None:
            return
        why = found
    raise ValueError(
        f"{next(iter(stacks.paths)).rpartition('/')[0] or 'the parameter'} is a stack of layers, each updated on the "
        f"rank of its stage, but this optimizer is not elementwise ({why}). Make every layer a parameter of its own, a "
        "list of them in place of the stack, and leave the stacks out of fp.pipeline's specs; or take an elementwise "
        "one such as fp.optim.adamw"
    )


def _beyond_layers(stacks: StackedTree, optimizer: Optimizer, params: PyTree) -> str | None:
    """Return why the update of a layer differs from its update in a stack; None if it does not."""
    if not is_declared_elementwise(optimizer):
        return "it does not declare it, by fp.optim.Optimizer(…, elementwise=True)"
    stacked = optree.tree_map(without_memory, params)
    decide = getattr(optimizer, "constants", None)
    constants = None if decide is None else optree.tree_broadcast_prefix(decide(stacked), stacked)
    are_stacks = {id(leaf) for leaf, n in zip(optree.tree_leaves(stacked), stacks.lengths, strict=True) if n}
    update, slices = with_constants(optimizer, constants), inner_slices(stacked, lambda leaf: id(leaf) in are_stacks)
    found = slice_mismatch(optimizer.init, update, stacked, slices)
    return None if found is None else f"given one layer of each stack, it {found}"
