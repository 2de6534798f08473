"""Memory per rank during training, estimated from shapes and specs. Nothing is traced and no tensor is allocated."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch

from sharding_specs import Mesh, broadcast_specs, local_shape, register_dataclasses, tree_paths

from ..errors import PipelineError
from ..functions import PyTree, SpecTree
from ..ir import is_trained
from ..optim import Optimizer, sgd, tree_map_params
from ..pipelines import pipeline_of, stage_of_layer
from ..quantities import readable_bytes
from ..requests import UpdateSharding, owners_of
from ..training import StepLayout, TrainStep, train_step


class Convention(NamedTuple):
    """Bytes per element that training stores. Publications use different conventions."""

    parameters: int
    gradients: int
    optimizer: int  # master copy and moments


CONVENTIONS = {
    "zero": Convention(2, 2, 12),  # fp16; fp32 master, mean, square: ZeRO, arXiv 1910.02054 §3.1
    "megatron": Convention(2, 4, 12),  # bf16, gradients summed in fp32: Megatron-LM's distributed optimizer
    "fp16": Convention(2, 2, 16),  # with an fp32 copy of the gradients
    "fp32": Convention(4, 4, 8),  # no master copy
}


@dataclass(frozen=True)
class Estimate:
    """Bytes per rank between steps. `str` formats them as a table."""

    parameters: int
    gradients: int
    optimizer: int
    note: str = ""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def __str__(self) -> str:
        names = ("parameters", "gradients", "optimizer", "total")
        lines = [f"{name.ljust(10)}  {readable_bytes(getattr(self, name))}" for name in names]
        return "\n".join([*lines, *([f"note: {self.note}"] if self.note else [])])


def estimate(
    params: PyTree,
    mesh: Mesh,
    plan: Callable[..., PyTree] | None = None,
    *,
    convention: str | Convention = "zero",
    optimizer: Optimizer | None = None,
) -> Estimate:
    """Estimate the bytes of parameters, gradients and optimizer state that each rank stores under a plan.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> model = torch.empty(7_500_000_000, device="meta")
    >>> for stage in range(4):
    ...     print(f"{fp.estimate(model, Mesh(data=64), fp.zero(stage, 'data')).total / 1e9:.1f}")
    120.0
    31.4
    16.6
    1.9

    Args:
        params: a pytree of tensors, on the meta device or any other.
        mesh: the mesh.
        plan: a transform or a chain. Without it everything is replicated.
        convention: bytes per element of a floating-point parameter: "zero", "megatron", "fp16", "fp32" or a
            `Convention`.
        optimizer: if given, replaces the convention by the tensors that `train_step` stores with this optimizer. Every
            tensor counts in its dtype, gradients in the dtype of the optimizer's update. Masters and a loss scale,
            if any, are included in the state.

    Returns:
        The bytes, without activations. With a pipeline they are an upper bound: the bytes of
        the rank that holds most, if every rank also held all parameters outside stacks of layers.

    Raises:
        ValueError: for an unknown convention.
        PipelineError: if the plan has a pipeline but no stacks of layers. The stages of the parameters are then known
            only after a trace.
    """
    register_dataclasses(params)
    shapes = optree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, params)
    train = train_step(lambda *_: None, optimizer or sgd(0.0), mesh, plan)
    shapes, state = train.states.begun(shapes)
    layouts = train.states.layouts(shapes)
    kept = _kept(shapes, state, train, layouts, convention if optimizer is None else None)
    pipeline = pipeline_of(train.f.applied)
    axis = None if pipeline is None else pipeline.axis
    note = "" if axis is None else f"the rank of {axis!r} that holds most, with all that is no layer of a stack"
    for name, rank in owners_of(train.f.applied).items():
        note = f"rank {rank} of {name!r}, the master; the other ranks hold nothing between steps"
    found = []
    for there in _where_layers_are(train, layouts):
        parts = [_bytes(_only(tree, layouts.params, there), specs, mesh, *how) for tree, specs, *how in kept]
        found.append(Estimate(parts[0], parts[1], parts[2], note))
    return max(found, key=lambda each: each.total)


def _kept(
    shapes: PyTree, state: PyTree, train: TrainStep, layouts: StepLayout, convention: str | Convention | None
) -> list[Any]:
    update = train.f.applied.last(UpdateSharding)
    whole = update is not None and update.whole_gradients
    if convention is None:
        stored, state, specs = train.states.placed(layouts, shapes, state, fresh=False)
        packed = layouts.packing.pack_whole(layouts.params)
        partial = (layouts.params, layouts.kept) if whole else (packed, layouts.update)
        return [(stored, layouts.kept), (*partial, None, False), (state, specs)]
    shapes = layouts.by_layer(shapes, shapes, fresh=False)
    packed = layouts.packing.pack_whole(shapes)
    partial = (shapes, layouts.kept) if whole else (packed, layouts.update)
    each = _convention(convention)
    return [
        (shapes, layouts.kept, each.parameters),
        (*partial, each.gradients, False),
        (packed, layouts.update, each.optimizer, False),
    ]


def _where_layers_are(train: TrainStep, layouts: StepLayout) -> Iterator[PyTree]:
    paths, tree = tree_paths(layouts.params), optree.tree_structure(layouts.params)
    plan = pipeline_of(train.f.applied)
    if plan is None:
        yield tree.unflatten([True] * len(paths))
        return
    lengths = {} if layouts.stacks is None else layouts.stacks.paths
    if not lengths:
        raise PipelineError(
            f"which parameters a rank of {plan.axis!r} holds follows from where the model is cut, and that from its "
            "ops: ask the program, train.lower(train.init(params), *batch).memory(), or give fp.pipeline the specs of "
            f"stacked layers, P({plan.axis!r}, …)"
        )
    schedule = plan.on(train.mesh)
    for rank in range(schedule.ranks):
        stages = {stage % schedule.depth for stage, other in enumerate(schedule.rank_of_stage) if other == rank}
        yield tree.unflatten(
            [path not in lengths or stage_of_layer(path, lengths, schedule.depth) in stages for path in paths]
        )


def _only(tree: PyTree, shapes: PyTree, there: PyTree) -> PyTree:
    def chosen(like: PyTree) -> PyTree:
        return optree.tree_map(lambda leaf, is_there: leaf if is_there else "elsewhere", like, there)

    return tree_map_params(chosen, tree, optree.tree_structure(shapes))


def _convention(name: str | Convention) -> Convention:
    if isinstance(name, Convention):
        return name
    if name not in CONVENTIONS:
        known = ", ".join(map(repr, CONVENTIONS))
        raise ValueError(f"estimate(convention={name!r}): the known ones are {known}; or give a Convention")
    return CONVENTIONS[name]


def _bytes(tree: PyTree, specs: SpecTree, mesh: Mesh, each: int | None = None, others: bool = True) -> int:
    leaves, layouts = optree.tree_leaves(tree), optree.tree_leaves(broadcast_specs(specs, tree))
    total = 0
    for leaf, spec in zip(leaves, layouts, strict=True):
        if isinstance(leaf, torch.Tensor) and (others or is_trained(leaf)):
            parts = 1 + leaf.is_complex()  # a convention counts real and imaginary part as two elements
            size = each * parts if each is not None and is_trained(leaf) else leaf.dtype.itemsize
            total += size * math.prod(local_shape(leaf.shape, spec.fitted(leaf.shape, mesh), mesh))
    return total


def activation_bytes(
    batch: int,
    sequence: int,
    hidden: int,
    heads: int,
    *,
    layers: int = 1,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    partitioned: bool = False,
    pipeline: int = 1,
    interleave: int = 1,
) -> float:
    """Compute a formula that docs/optimizers.md has. This function is removed in the next release."""
    warnings.warn("fp.activation_bytes is removed; docs/optimizers.md has the formula", FutureWarning, stacklevel=2)
    unit, core = sequence * batch * hidden, 0 if recompute == "selective" else 5 * heads * sequence**2 * batch
    block = 10 * unit / (tensor if sequence_parallel else 1) + (24 * unit + core) / tensor
    if recompute == "full":
        block = 2 * unit / (tensor if partitioned else 1)
    return block * layers * (1 + (pipeline - 1) / (pipeline * interleave) if interleave > 1 else 1)
