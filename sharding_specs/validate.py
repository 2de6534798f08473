"""Whether specs fit the tensors they are for; one error lists every leaf that does not."""

from __future__ import annotations

from typing import Any

import optree

from .mesh import Mesh
from .spec import P, SpecError
from .trees import broadcast_specs, tree_paths

__all__ = ["validate"]


def validate(tree: Any, specs: Any, mesh: Mesh) -> None:
    """Check a spec tree against a tree of tensors (or of anything with a shape).

    >>> import torch
    >>> validate({"w": torch.ones(5, 4)}, {"w": P("data", "model")}, Mesh(data=2))
    Traceback (most recent call last):
    sharding_specs.spec.SpecError: specs do not fit on Mesh(data=2):
      w: shape (5, 4), P('data', 'model'): dim 0 of size 5 does not divide by 'data' of 2 ranks; pad it to 6, pick another \
dim, or leave it whole
      w: shape (5, 4), P('data', 'model'): the mesh has no axis 'model' (its axes: data)

    Args:
        tree: any pytree of tensors.
        specs: a pytree prefix of specs.
        mesh: the mesh.

    Raises:
        SpecError: listing every offending leaf with path, shape, spec, axis and sizes.
    """
    full = optree.tree_leaves(broadcast_specs(specs, tree))
    problems = []
    for path, leaf, spec in zip(tree_paths(tree), optree.tree_leaves(tree), full, strict=True):
        shape = tuple(getattr(leaf, "shape", ()))
        problems += [f"  {path or 'the value'}: shape {shape}, {spec!r}: {text}" for text in _problems(shape, spec, mesh)]
    if problems:
        raise SpecError(f"specs do not fit on {mesh!r}:\n" + "\n".join(problems))


def _problems(shape: tuple[int, ...], spec: P, mesh: Mesh) -> list[str]:
    unknown = sorted((spec.axes | spec.unreduced | spec.reduced) - set(mesh.axis_names))
    found = []
    if len(spec.dims) > len(shape):
        found.append(f"the spec has {len(spec.dims)} dims, the tensor has {len(shape)}; drop the last entries")
    for dim, factors in enumerate(spec.dims[: len(shape)]):
        blocks = 1
        for factor in factors:
            if factor in unknown:
                continue
            size = mesh.axis_size(factor) if isinstance(factor, str) else factor
            blocks *= size
            if shape[dim] % blocks:
                what = f"{factor!r} of {size} ranks" if isinstance(factor, str) else f"the factor {factor}"
                more = f" (with the factors outside it, {blocks} blocks)" if blocks != size else ""
                up = -(-shape[dim] // blocks) * blocks
                found.append(
                    f"dim {dim} of size {shape[dim]} does not divide by {what}{more}; "
                    f"pad it to {up}, pick another dim, or leave it whole"
                )
                break
    known = ", ".join(mesh.axis_names) or "none"
    return found + [f"the mesh has no axis {axis!r} (its axes: {known})" for axis in unknown]
