"""`constrain(x, spec)`: a marker in model code that requires a layout of a value. It is the identity outside a plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches

import torch

from sharding_specs import Mesh, P, SpecError, as_spec

from ..collectives import current_axes, hidden_axes, mesh_axis_size
from ..ir import Source, current_source, warn_at
from ..tracing import recorder
from .marks import define_marker

_ALIKE = 0.7  # threshold of difflib's ratio: "tesnor" and "tensor" have 0.83, "seq" and "sequence" 0.55


def constrain(x: torch.Tensor, spec: P | str) -> torch.Tensor:
    """Constrain the layout of a value on the axes that a spec names. Outside a plan, return the value unchanged.

    Sequence parallelism is one constraint per residual edge. `constrain(x, "batch time/tensor embed")` turns the psum
    before it into a psum_scatter, and ops that need the full sequence gather it.

    >>> import torch, functional_parallel as fp
    >>> fp.constrain(torch.ones(2, 4), "batch time/tensor").shape
    torch.Size([2, 4])

    Args:
        x: any value of the model.
        spec: the required layout. Axes that the mesh does not have are ignored, with a warning if the name is close
            to an axis of the mesh.

    Raises:
        SpecError: when the spec does not fit the value, or has more than dims. In a plan, also when the spec names an
            axis of the mesh with several ranks that no transform of the plan splits.
    """
    spec = as_spec(spec)
    if spec.named_axes != spec.axes or spec.padded or spec.storage:
        raise SpecError(
            f"{current_source() or 'a call'}: constrain to {spec!r}: a constraint names the axes of dims; unreduced=, "
            "reduced=, owner=, padded= and a storage have no effect there. The plan decides when partial sums are added"
        )
    _note(spec)
    pending = {axis: mesh_axis_size(axis) for axis in hidden_axes() if axis in spec.axes}
    if current_axes() or hidden_axes():
        _warn_of_slips(spec)
    if spec.named > x.ndim:
        raise SpecError(_misfit(x, spec, f"the spec has {spec.named} dims; drop the last entries"))
    if not pending:
        return x
    placements = spec.only(pending).placements(Mesh(pending))
    outers = [outer for *_, outer in placements if isinstance(outer, int)]
    if len(outers) < len(placements):
        raise SpecError(_misfit(x, spec, "it has unequal blocks; constrain the slices of the value, one per block"))
    for (axis, dim, _), outer in zip(placements, outers, strict=True):
        _check_fit(x, spec, axis, dim, outer * pending[axis])
    return _Constrain.apply(x, [p.axis for p in placements], [p.dim for p in placements], outers)


def _note(spec: P) -> None:
    # The axes of a `shard_map` body are split explicitly in the body, and are not recorded.
    active = recorder()
    if active is not None:
        by_hand = current_axes() if active.is_local_body else ()
        noted = active.notes.setdefault(_NOTES, {})
        for axis in spec.axes.difference(by_hand):
            noted.setdefault(axis, (spec, current_source()))


def refuse_idle(split: Collection[str], mesh: Mesh, transforms: Sequence[str]) -> None:
    """Refuse constraints on an axis of several ranks that the plan does not split."""
    active = recorder()
    noted = {} if active is None else active.notes.get(_NOTES, {})
    wrong = sorted(axis for axis in noted if axis in mesh.axis_names and axis not in split and mesh.axis_size(axis) > 1)
    if wrong:
        lines = [_idle(axis, noted[axis], mesh) for axis in wrong]
        listed = f"The plan's transforms are: {', '.join(transforms)}" if transforms else "The plan splits no axis"
        raise SpecError("\n".join([*lines, f"{listed}. {_WAY_OUT}"]))


def _idle(axis: str, constraint: tuple[P, Source | None], mesh: Mesh) -> str:
    spec, source = constraint
    return (
        f"{source or 'a call'}: constrain to {spec!r} has no effect, because no transform of the plan splits {axis!r}, "
        f"an axis of {mesh.axis_size(axis)} ranks of {mesh!r}"
    )


_WAY_OUT = (
    "Add a transform that splits the axis, as fp.tensor_parallel(axis, specs); or take the axis out of the spec, or "
    "out of the mesh"
)
_NOTES = "constraints"


def _check_fit(x: torch.Tensor, spec: P, axis: str, dim: int, blocks: int) -> None:
    if dim < x.ndim and x.shape[dim] % blocks == 0:
        return
    problem = (
        f"there is no dim {dim}"
        if dim >= x.ndim
        else f"dim {dim} of size {x.shape[dim]} does not divide into {blocks} blocks along {axis!r}; pad it to "
        f"{-(-x.shape[dim] // blocks) * blocks}, or constrain another dim"
    )
    raise SpecError(_misfit(x, spec, problem))


def _misfit(x: torch.Tensor, spec: P, problem: str) -> str:
    return f"{current_source()}: constrain a value of shape {tuple(x.shape)} to {spec.as_written()}: {problem}"


def _warn_of_slips(spec: P) -> None:
    known = {*current_axes(), *hidden_axes()}
    for axis in sorted(spec.axes - known):
        meant = get_close_matches(axis, known, n=1, cutoff=_ALIKE)
        if meant:
            text = f"constrain to {spec!r}: the mesh has no axis {axis!r}, which is ignored; did you mean {meant[0]!r}?"
            warn_at(current_source(), text)


def constrain_rest(x: torch.Tensor, axes: Sequence[str], dims: Sequence[int], outers: Sequence[int]) -> torch.Tensor:
    rest = [index for index, axis in enumerate(axes) if axis in hidden_axes()]
    done = [index for index in range(len(axes)) if index not in rest]
    if not rest:
        return x

    def outer_of(index: int) -> int:
        outer = outers[index]
        for other in done:
            if dims[other] == dims[index] and outers[other] < outer:
                outer //= mesh_axis_size(axes[other])
        return outer

    return _Constrain.apply(x, [axes[i] for i in rest], [dims[i] for i in rest], [outer_of(i) for i in rest])


# Gradients follow from the collectives that the constraint becomes.
_Constrain = define_marker("constrain(Tensor x, str[] axes, int[] dims, int[] outers)", constrain_rest, names_dims=True)
OP = _Constrain.op
