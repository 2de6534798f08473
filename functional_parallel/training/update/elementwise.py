"""Check of updates that are declared elementwise: the update of slices is the slice of the update.

An update that is not declared is partitioned, which is right for every update. A declared one is called on shards, on
layers of a stack and on concatenated parameters, and sends nothing. The check calls it on small tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import torch

from sharding_specs import tree_paths

from ... import _torch
from ...functions import PyTree
from ...ir import is_trained
from ...optim import Optimizer, tree_map_params
from ...tracing import disable_ambient_modes
from .returned import Update, require_same_structure

_LONGEST = 16  # of a dim: an update may treat parameters by their shape, so small ones keep it


def with_constants(optimizer: Optimizer, constants: PyTree) -> Update:
    """Return the update of an optimizer with these constants; None if it takes none."""
    return optimizer.update if constants is None else partial(optimizer.update, constants=constants)


def slice_mismatch(
    init: Callable[[PyTree], PyTree],
    update: Update,
    params: PyTree,
    convert: Callable[[PyTree], PyTree],
    converted_update: Update | None = None,
) -> str | None:
    """Describe how an update of slices differs from the slices of the update; None if it does not.

    Of the parameters only shapes and dtypes matter. `convert` returns the slices of a tree like the parameters. Leaves
    with other shapes than the parameters are not slices.
    """
    with _torch.disable_functorch(), _torch.disable_modes(), disable_ambient_modes(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        first, second, start = (_drawn(params, generator) for _ in range(3))
        held, state = require_same_structure(update(first, state := init(start), start), start, state)

        def converted(held: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
            return convert(held), tree_map_params(convert, state, optree.tree_structure(params))

        wanted = converted(*update(second, state, held))
        slices, of_slices = converted(held, state)
        try:
            found = (converted_update or update)(convert(second), of_slices, slices)
        except Exception as error:  # it needs the full shapes
            return f"fails ({type(error).__name__}: {error})"
        pairs = zip(tree_paths(wanted), *map(optree.tree_leaves, (wanted, found)), strict=True)
        with _torch.disable_torch_function():
            path = next((path for path, a, b in pairs if not _is_close(a, b)), None)
        return path and f"returns another {path.partition('/')[2] or 'value'} than the slice of its full result"


def require_elementwise(optimizer: Optimizer, params: PyTree, constants: PyTree = None) -> None:
    """Check that an update that is declared elementwise is. Of the parameters only shapes and dtypes matter."""
    update = with_constants(optimizer, constants)
    require_declaration_kept(slice_mismatch(optimizer.init, update, params, inner_slices(params)))


def inner_slices(params: PyTree, is_stack: Callable[[Any], bool] = lambda _: False) -> Callable[[PyTree], PyTree]:
    """Return a function that drops the first index of every dim, and takes the last layer of a stack."""

    def of_leaf(param: PyTree, leaf: PyTree) -> PyTree:
        if not isinstance(leaf, torch.Tensor) or leaf.shape != _small(param.shape):
            return leaf
        leaf = leaf[-1] if is_stack(param) else leaf
        return leaf[tuple(slice(int(size > 1), size) for size in leaf.shape)]

    return lambda tree: _of_leaves(of_leaf, params, tree)


def require_declaration_kept(mismatch: str | None) -> None:
    """Raise if an update is declared elementwise and is not."""
    if mismatch is not None:
        raise ValueError(
            "this optimizer declares by `constants` or `elementwise` that its update is elementwise, and it is not: "
            f"given slices of all tensors, it {mismatch}. Leave both away: the update is then partitioned, and "
            "`explain` lists its communication. Or give `specs`: the update then gets the parameters' specs, and calls "
            "the collectives"
        )


def _drawn(params: PyTree, generator: torch.Generator) -> PyTree:
    def leaf(param: PyTree) -> PyTree:
        if not isinstance(param, torch.Tensor):
            return param
        on_host = param.is_meta or _torch.is_missing(param.device.type)
        device = torch.device("cpu") if on_host else param.device
        shape, kind = _small(param.shape), torch.complex128 if param.is_complex() else torch.float64
        values = torch.randn(shape, generator=generator, dtype=kind, device="cpu")
        return values.to(device, param.dtype) if is_trained(param) else torch.zeros_like(values, dtype=param.dtype)

    return _of_leaves(leaf, params)


def _of_leaves(function: Callable[..., PyTree], *trees: PyTree) -> PyTree:
    """Map the leaves of trees, unseen by the modes of a trace, which take most of the time."""
    with _torch.disable_torch_function():
        return optree.tree_map(function, *trees)


def _small(shape: torch.Size) -> torch.Size:
    return torch.Size(min(size, _LONGEST) for size in shape)


def _is_close(a: PyTree, b: PyTree) -> bool:
    """Whether two results are equal but for rounding: kernels may round the last elements of a tensor differently."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is b or bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b) or not is_trained(a):
        return torch.equal(a, b)
    bound = torch.finfo(a.dtype).eps ** 0.5
    return torch.allclose(a, b, rtol=bound, atol=bound, equal_nan=True)
