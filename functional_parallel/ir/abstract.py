"""Tensors without values on any device: programs are lowered from them for a device that this machine lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import optree
import torch

from sharding_specs import register_dataclasses, tree_paths
from sharding_specs.pytree import Tree

from .. import _torch

T = TypeVar("T")


def abstract(
    tree: Tree | Callable[[], Tree], device: torch.device | str = "cuda", dtype: torch.dtype | None = None
) -> Tree:
    """Return tensors without values on a device, which this machine may lack, to lower programs for that device.

    `train.lower`, `fp.compile(…).lower` and with them the price and the memory of a program take such tensors. Without
    the device, a trace runs on a stand-in, and its program names the device. Model code sees it too: `x.device`,
    `x.is_cuda`, and device arguments such as "cuda" name the device. `torch.cuda.is_available()` is False.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> def loss(w, x):
    ...     return (x @ w - torch.ones(2, device=x.device)).square().mean()
    >>> train = fp.train_step(loss, fp.optim.adamw(1e-3), Mesh(data=2), fp.data_parallel("data"))
    >>> w, x = fp.abstract((torch.zeros(4, 2), torch.zeros(8, 4)), "cuda")
    >>> w.device, "ones([2], device=cuda" in str(train.lower(w, x))
    (device(type='cuda', index=0), True)

    Args:
        tree: a pytree of tensors on any device, or a function that makes one. The function runs without memory.
        device: the device of all tensors.
        dtype: dtype of the floating-point tensors. By default each keeps its dtype.

    Returns:
        The tree, with other leaves unchanged. A call with such tensors raises an error, because it needs values.

    Raises:
        TypeError: if a leaf is a module. `fp.functional(module)` returns its parameters.
    """
    if callable(tree) and not isinstance(tree, torch.nn.Module):
        with _mode(), torch.no_grad():
            tree = tree()
    register_dataclasses(tree)

    def one(leaf: T) -> T | torch.Tensor:
        if isinstance(leaf, torch.nn.Module):
            raise TypeError("fp.abstract takes tensors: of a module, `fn, params = fp.functional(module)` has them")
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with _mode():
            chosen = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
            return torch.empty(leaf.shape, dtype=chosen, device=device)

    found: Tree = optree.tree_map(one, tree)
    return found


def without_values(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor with any values. It has no memory if this machine lacks the device."""
    if not _torch.is_missing(device.type):
        return torch.empty(shape, dtype=dtype, device=device)
    with _mode():
        return torch.empty(shape, dtype=dtype, device=device)


def refuse_abstract(tree: Tree, where: str) -> None:
    """Raise `ValueError`, with their paths, for leaves from `abstract`. A call that computes needs values."""
    leaves = optree.tree_leaves(tree)
    if not any(map(is_abstract, leaves)):
        return
    found = [path or "the argument" for path, leaf in zip(tree_paths(tree), leaves, strict=True) if is_abstract(leaf)]
    raise ValueError(
        f"{where}: {', '.join(found[:3])}{', and more,' if len(found) > 3 else ''} have no values (fp.abstract), and a "
        "call computes values: `.lower(…)` takes the same arguments and returns the program without running it"
    )


def is_abstract(leaf: Tree) -> bool:
    return isinstance(leaf, _torch.FakeTensor) and leaf.fake_mode is _mode()


@cache
def _mode() -> _torch.FakeTensorMode:
    return _torch.FakeTensorMode(allow_non_fake_inputs=True)
