"""Batches of sequences, padded to one of a few lengths, so that a function needs few programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeGuard

import optree
import torch

from sharding_specs import Mesh, register_dataclasses, tree_paths
from sharding_specs.pytree import Tree

from ..errors import UnevenBatchError
from ..functions import PyTree
from ..quantities import is_positive_int
from ..runtime import default_runtime

Values = Mapping[str, float | None] | Callable[[str, torch.Tensor], float | None]

_IGNORED = {"labels": -100}  # the `ignore_index` of torch's cross entropy


def pad_to(
    batch: PyTree, lengths: Iterable[int], *, dim: int = 1, values: Values | None = None, mesh: Mesh | None = None
) -> tuple[PyTree, torch.Tensor]:
    """Pad the sequences of a batch to the smallest of a few lengths, and return a mask of the real positions.

    A function is traced once per shape of its arguments, so batches of a few lengths need a few programs.

    >>> import torch, functional_parallel as fp
    >>> batch = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, 7]])}
    >>> padded, present = fp.pad_to(batch, [4, 8])
    >>> padded
    {'input_ids': tensor([[5, 6, 7, 0]]), 'labels': tensor([[   5,    6,    7, -100]])}
    >>> present
    tensor([ True,  True,  True, False])
    >>> fp.pad_to(batch, range(2, 9, 2), values={"input_ids": 1})[0]["input_ids"]
    tensor([[5, 6, 7, 1]])

    Args:
        batch: a pytree of tensors, such as a dict of Hugging Face. A tensor that has the dim `dim` is a sequence along
            it. Other leaves are unchanged.
        lengths: the lengths of padded batches, in any order.
        dim: the dim of the positions. A negative dim counts from the end.
        values: the value that pads a leaf: a mapping by path or by its last part, or a function of path and leaf. None
            leaves a leaf unchanged. Leaves that a mapping omits are padded with -100 if they are named `labels`, and
            with 0 otherwise: an `attention_mask` then excludes the padding.
        mesh: the mesh, if each rank pads a separate batch. The longest batch of all ranks determines the length, and
            every rank must call this.

    Returns:
        The padded batch, and a mask of booleans, one per position. The mean over the real positions is the sum of the
        masked losses, divided by the number of real positions.

    Raises:
        UnevenBatchError: if the batch is longer than all `lengths`, or sequences of different lengths; with `mesh` on
            every rank, if a batch of any rank is.
        ValueError: if a length is not a positive integer, or `values` names a leaf that does not exist.
    """
    register_dataclasses(batch)
    chosen = sorted(lengths)
    if not chosen or not all(map(is_positive_int, chosen)):
        raise ValueError(f"pad_to(lengths={chosen}): give positive integers, as in pad_to(batch, [128, 512])")
    leaves, tree = optree.tree_flatten(batch)
    paths = tree_paths(batch)
    fills = _fills(paths, leaves, dim, values)
    rows = zip(paths, leaves, fills, strict=True)
    sequences = {path or "the batch": leaf for path, leaf, fill in rows if fill is not None and _has_dim(leaf, dim)}
    found = {path: leaf.shape[dim] for path, leaf in sequences.items()}
    count, problem = max(found.values(), default=0), _problem(found, dim, chosen[-1])
    every = [(count, problem)]
    if mesh is not None:
        every = default_runtime(mesh).exchange(every[0], "to agree on the length of fp.pad_to")
    problem = problem or next((f"the batch of another rank: {told}" for _, told in every if told), "")
    if problem:
        raise UnevenBatchError(problem)
    longest = max(length for length, _ in every)
    length = next(each for each in chosen if each >= longest)
    padded = [_padded(leaf, dim, length, fill) for leaf, fill in zip(leaves, fills, strict=True)]
    device = next(iter(sequences.values())).device
    return tree.unflatten(padded), torch.arange(length, device=device) < count


def _fills(paths: list[str], leaves: list[Tree], dim: int, values: Values | None) -> list[float | None]:
    """Return the value that pads each leaf; None for a leaf that is not padded."""
    names = {path: path.rpartition("/")[2] for path in paths}
    if isinstance(values, Mapping) and (unknown := sorted({*values} - {*names, *names.values()})):
        raise ValueError(f"pad_to(values=…) names {', '.join(unknown)}; the leaves are {', '.join(paths)}")

    def fill(path: str, leaf: torch.Tensor) -> float | None:
        if values is not None and not isinstance(values, Mapping):
            return values(path, leaf)
        given = {names[path]: _IGNORED.get(names[path], 0), **(values or {})}
        return given.get(path, given[names[path]])

    return [fill(path, leaf) if _has_dim(leaf, dim) else None for path, leaf in zip(paths, leaves, strict=True)]


def _has_dim(leaf: Tree, dim: int) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and -leaf.ndim <= dim < leaf.ndim


def _problem(lengths: Mapping[str, int], dim: int, most: int) -> str:
    listed = ", ".join(f"{path} has {length}" for path, length in lengths.items())
    if len(set(lengths.values())) != 1:
        return (
            f"pad_to(dim={dim}) pads sequences of one length: {listed or 'no tensor has this dim'}; give dim= of the "
            "positions, or values={'name': None} for a leaf that is not a sequence"
        )
    if max(lengths.values()) > most:
        return f"pad_to: a batch is longer than {most}, the largest of lengths=: {listed}; add a length, or truncate it"
    return ""


def _padded(leaf: Tree, dim: int, length: int, value: float | None) -> Tree:
    if value is None or not isinstance(leaf, torch.Tensor) or leaf.shape[dim] == length:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = length - shape[dim]
    return torch.cat([leaf, leaf.new_full(shape, value)], dim)
