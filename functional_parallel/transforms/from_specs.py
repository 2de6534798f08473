"""Chain of transforms of a spec tree."""

from __future__ import annotations

from collections.abc import Callable

import optree

from sharding_specs import Mesh, SpecError, as_spec, tree_paths

from ..functions import SpecTree
from ..schedules import Schedule
from .accumulate import names_microbatches
from .argument_specs import Rules
from .parallel import data_parallel, tensor_parallel, zero
from .pipeline import pipeline
from .transform import Plan, Transform, chain


def from_specs(
    specs: Rules,
    mesh: Mesh,
    *,
    data: str = "data",
    pipe: str = "pipe",
    batch: SpecTree = None,
    strict: bool = False,
    schedule: str | Schedule | Callable[..., Schedule] = "1f1b",
    microbatches: int | None = None,
) -> Plan:
    """Return the chain of transforms that a spec tree implies on a mesh.

    If the mesh has the data axis, it splits the batch. Specs that name it define the storage layout of parameters
    (ZeRO-3). If the mesh has the pipeline's axis, it cuts the model into stages. The cuts are between the layers of
    stacks. Their specs name the axis in dim 0; without stacks, the work is balanced. Every other axis that specs name
    splits the computation over parameters (tensor parallelism).

    >>> from sharding_specs import Mesh, P
    >>> from_specs({"w": P("tensor", "data")}, Mesh(data=2, tensor=2))
    fp.chain(fp.tensor_parallel('tensor', {'w': P('tensor', 'data')}), fp.zero(3, 'data', {'w': P('tensor', 'data')}))

    Args:
        specs: rules from path patterns to specs, or a tree of specs.
        mesh: the mesh.
        data: the name of the axis that splits the batch.
        pipe: the name of the pipeline's axis.
        batch: specs of the arguments after the parameters, as for `data_parallel`.
        strict: raise an error for an op without a sharding rule.
        schedule: the schedule of the pipeline, as for `pipeline`.
        microbatches: the number of microbatches of the pipeline; by default twice the number of its ranks.

    Raises:
        SpecError: if specs name an axis that the mesh does not have.
    """
    axes = _axes(specs)
    named = {axis for _, axis in axes}
    missing = [f"  {path}: {axis!r}" if path else f"  {axis!r}" for path, axis in axes if axis not in mesh.axis_names]
    if missing:
        raise SpecError(f"the specs name axes that {mesh!r} does not have:\n" + "\n".join(missing))
    inner = (axis for axis in reversed(mesh.axis_names) if axis in named - {data, pipe})
    chosen: list[Transform] = [tensor_parallel(axis, specs, strict=strict) for axis in inner]
    if data in mesh.axis_names and data in named:
        chosen.append(zero(3, data, specs, batch=batch, strict=strict))
    elif data in mesh.axis_names:
        chosen.append(data_parallel(data, batch=batch, strict=strict))
    if pipe in mesh.axis_names:
        count = 2 * mesh.axis_size(pipe) if microbatches is None else microbatches
        stacks = specs if pipe in named else None
        cut = batch if names_microbatches(batch) else None  # as the data axis cuts the batch
        chosen.append(pipeline(pipe, stacks, schedule=schedule, microbatches=count, batch=cut))
    return chain(*chosen)


def _axes(specs: Rules) -> list[tuple[str, str]]:
    pairs = isinstance(specs, (list, tuple)) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in specs)
    by_path = specs if pairs else zip(tree_paths(specs), optree.tree_leaves(specs), strict=True)
    return [(path, axis) for path, spec in by_path for axis in sorted(as_spec(spec).named_axes)]
