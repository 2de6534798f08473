"""Check that specs fit their tensors. One error lists every leaf that does not fit."""

from __future__ import annotations

from collections.abc import Sequence

import optree
import torch

from .blocks import Blocks, units
from .errors import SpecError
from .mesh import Mesh
from .pytree import SpecTree, Tree
from .spec import P
from .trees import broadcast_specs, tree_paths


def validate(tree: Tree, specs: SpecTree, mesh: Mesh, *, pad: bool = False, advice: str = "") -> None:
    """Check a spec tree against a tree of tensors (or of anything with a shape).

    >>> import torch
    >>> validate({"w": torch.ones(5, 4)}, {"w": P("data", "model")}, Mesh(data=2))
    Traceback (most recent call last):
    sharding_specs.errors.SpecError: specs do not fit on Mesh(data=2):
      w: shape (5, 4), P('data', 'model'): dim 0 of size 5 does not divide by 'data' of 2 ranks; make it 6, shard \
another dim, or replicate it
      w: shape (5, 4), P('data', 'model'): the mesh has no axis 'model' (its axes: data)

    Args:
        tree: any pytree of tensors.
        specs: a pytree prefix of specs.
        mesh: the mesh.
        pad: allow uneven dims, for a storage layout that pads them.
        advice: additional advice for uneven dims, as a separate line.

    Raises:
        SpecError: when a leaf does not fit. The message lists every such leaf with path, shape, spec, axis and sizes.
    """
    full = optree.tree_leaves(broadcast_specs(specs, tree))
    problems, uneven = [], False
    for path, leaf, spec in zip(tree_paths(tree), optree.tree_leaves(tree), full, strict=True):
        shape = tuple(getattr(leaf, "shape", ()))
        where = f"  {path or 'the value'}: shape {shape}, {spec.as_written()}"
        found = misfits(shape, spec, mesh, pad=pad)
        problems += [f"{where}: {text}" for text in found]
        uneven |= len(found) > len(misfits(shape, spec, mesh, pad=True))
    if problems:
        more = [f"  {advice}"] if uneven and advice else []
        raise SpecError(f"specs do not fit on {mesh!r}:\n" + "\n".join(problems + more))


def require_dims(tree: Tree, specs: SpecTree, name: str = "the tensors") -> None:
    """Check that no spec has more dims than its tensor. Trailing unsharded dims of the spec count.

    >>> import torch
    >>> require_dims({"b": torch.ones(4)}, {"b": P("data", None)})
    Traceback (most recent call last):
    sharding_specs.errors.SpecError: specs do not fit the tensors:
      b: shape (4,), P('data', None): the spec has 2 dims, the tensor has 1; drop the last entries

    Args:
        tree: any pytree; leaves that are not tensors are not checked.
        specs: a pytree prefix of specs.
        name: description of the tensors, for the error.

    Raises:
        SpecError: when a spec has more dims. The message lists every such leaf with path, shape and spec.
    """
    leaves, full = optree.tree_leaves(tree), optree.tree_leaves(specs)
    if len(full) != len(leaves) or not all(isinstance(spec, P) for spec in full):  # a prefix
        full = optree.tree_leaves(broadcast_specs(specs, tree))
    wrong = [
        f"  {path or 'the value'}: shape {tuple(leaf.shape)}, {spec.as_written()}: {_longer(spec, leaf.ndim)}"
        for path, leaf, spec in zip(tree_paths(tree), leaves, full, strict=True)
        if isinstance(leaf, torch.Tensor) and spec.named > leaf.ndim
    ]
    if wrong:
        raise SpecError(f"specs do not fit {name}:\n" + "\n".join(wrong))


def _longer(spec: P, ndim: int) -> str:
    return f"the spec has {spec.named} dims, the tensor has {ndim}; drop the last entries"


def misfits(shape: Sequence[int], spec: P, mesh: Mesh, *, pad: bool = False) -> list[str]:
    """Return the reasons why a tensor of this shape does not fit the spec, one sentence each.

    With `pad`, a storage layout is checked, which may pad uneven dims.

    >>> misfits((5,), P("data", "model"), Mesh(data=2))[0]
    'the spec has 2 dims, the tensor has 1; drop the last entries'
    """
    found = []
    if spec.named > len(shape):
        found.append(_longer(spec, len(shape)))
    for dim, (size, factors) in enumerate(zip(shape, spec.dims, strict=False)):
        if dim in spec.padded:
            if size != spec.padded[dim]:
                found.append(f"dim {dim} has size {size}, the spec pads one of size {spec.padded[dim]}")
        else:
            found += _uneven(dim, size, factors, mesh, pad)
    known = ", ".join(mesh.axis_names) or "none"
    unknown = sorted(spec.named_axes - set(mesh.axis_names))
    found += [f"the mesh has no axis {axis!r} (its axes: {known})" for axis in unknown]
    owners = [(axis, rank) for axis, rank in spec.owner.items() if axis in mesh.axis_names]
    return found + [
        f"the owner along {axis!r} is rank {rank}, but the axis has ranks 0 … {mesh.axis_size(axis) - 1}"
        for axis, rank in owners
        if not 0 <= rank < mesh.axis_size(axis)
    ]


def _uneven(dim: int, size: int, factors: Sequence[str | Blocks], mesh: Mesh, pad: bool) -> list[str]:
    inner = not all(isinstance(factor, str) for factor in factors)
    if pad and not inner:
        return []
    blocks = 1
    for factor in factors:
        if isinstance(factor, str) and factor not in mesh.axis_names:
            continue
        count = mesh.axis_size(factor) if isinstance(factor, str) else units(factor)
        blocks *= count
        if size % blocks:
            what = f"{factor!r} of {count} ranks" if isinstance(factor, str) else f"the factor {factor}"
            if isinstance(factor, tuple):
                what = f"blocks of sizes {':'.join(map(str, factor))}, which have {count} units"
            elsewhere = "units" if any(isinstance(each, tuple) for each in factors) else "blocks"
            more = f" (with the factors outside it, {blocks} {elsewhere})" if blocks != count else ""
            way_out = f"make it {-(-size // blocks) * blocks}, shard another dim, or replicate it"
            return [f"dim {dim} of size {size} does not divide by {what}{more}; {way_out}"]
    return []
