"""Ranks with unequal numbers of samples: batches are padded to one size, with a mask of the real samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import optree
import torch

from sharding_specs import Mesh, register_dataclasses, tree_paths
from sharding_specs.pytree import Tree

from ..errors import UnevenBatchError
from ..functions import PyTree
from ..runtime import Runtime, default_runtime, rank_name


def pad_batch(batch: PyTree, rows: int, *, like: PyTree = None) -> tuple[PyTree, torch.Tensor]:
    """Pad a batch to a number of rows with copies of its first row, and return a mask of the real rows.

    >>> import torch, functional_parallel as fp
    >>> fp.pad_batch({"x": torch.tensor([[1, 2], [3, 4]])}, 3)
    ({'x': tensor([[1, 2],
            [3, 4],
            [1, 2]])}, tensor([ True,  True, False]))

    Args:
        batch: a pytree of tensors with the samples in dim 0. Scalars and leaves that are not tensors are unchanged.
        rows: number of rows of the padded batch.
        like: a batch with a row to copy, for a batch without rows.

    Returns:
        The padded batch, and a mask of `rows` booleans. The mean over the real samples is the sum of the masked losses
        per sample, divided by the sum of the mask.

    Raises:
        UnevenBatchError: if the batch has more than `rows` rows, tensors of different lengths, or no row to copy.
    """
    register_dataclasses(batch, like)
    count = _rows_that_fit(batch, rows)
    source = batch if count else like
    if count < rows and (source is None or not _rows(source)):
        raise UnevenBatchError("a batch without rows has none to copy: give pad_batch(like=…), a batch that has one")
    present = torch.arange(rows, device=_with_rows(batch)[0][1].device) < count
    if count == rows:
        return batch, present

    def filled(leaf: Tree, other: torch.Tensor) -> Tree:
        if not _has_rows(leaf):
            return leaf
        return torch.cat([leaf, other[:1].to(leaf.device).expand(rows - count, *other.shape[1:])])

    return optree.tree_map(filled, batch, source), present


def even_batches(batches: Iterable[PyTree], rows: int, mesh: Mesh) -> Iterator[tuple[PyTree, torch.Tensor]]:
    """Iterate over the batches of a rank, padded to one size. The rank with the most batches sets the number.

    All ranks iterate at the same time. Before each batch they exchange whether they have one. A rank without batches
    left, or without any batch, gets copies of a sample of another rank, all masked.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> for x, present in fp.even_batches(torch.arange(5).split(2), rows=2, mesh=Mesh(data=1)):
    ...     print(x.tolist(), present.tolist())
    [0, 1] [True, True]
    [2, 3] [True, True]
    [4, 4] [True, False]

    Args:
        batches: the batches of this rank, as for `pad_batch`. Batches without rows are skipped.
        rows: number of rows of every padded batch, on every rank.
        mesh: the mesh. If one process simulates its ranks, `batches` are global batches and `rows` is their size.

    Returns:
        Pairs of a batch and its mask. The number of pairs is the same on every rank.

    Raises:
        UnevenBatchError: on every rank, if a batch of any rank cannot be padded, the iterable of any rank raises, or
            samples of two ranks differ in signature. The rank with the faulty batch or iterable raises its original
            exception.
        CallMismatchError: on every rank, if a rank stops before all ranks have finished.
    """
    runtime, own = default_runtime(mesh), _Own(batches, rows, mesh)
    name, advice = f"fp.even_batches(rows={rows})", "Every rank must iterate to the end, or all must stop at one batch"
    batch, number = own.take(), 0
    runtime.agree(f"begins {name}", advice)
    first = optree.tree_map(lambda leaf: leaf[:1].detach().cpu().clone() if _has_rows(leaf) else leaf, batch)
    sample = _common_sample(runtime.exchange(first, "to compare samples"), mesh)
    while True:
        status = _PROBLEM if own.problem is not None else _NOTHING if batch is None else _BATCH
        worst = runtime.agree(f"requests batch {number} of {name}", advice, status)
        if worst == _PROBLEM:
            own.fail(runtime.exchange(repr(own.problem) if own.problem else None, "to report a problem"))
        if worst == _NOTHING:
            return
        if batch is None:
            batch = optree.tree_map(lambda leaf: leaf[:0] if _has_rows(leaf) else leaf, sample)
        yield pad_batch(batch, rows, like=sample)
        batch, number = own.take(), number + 1


def check_same_call(runtime: Runtime[Any, Any], doing: str) -> None:
    advice = (
        "With batch='own' every rank must take the same number of steps, on batches of one shape. Iterate over "
        "fp.even_batches(batches, rows, mesh), which pads and masks batches, so that all ranks end together"
    )
    runtime.agree(doing, advice)


_NOTHING, _BATCH, _PROBLEM = range(3)


class _Own:
    def __init__(self, batches: Iterable[PyTree], rows: int, mesh: Mesh) -> None:
        self.batches, self.rows, self.mesh = iter(batches), rows, mesh
        self.problem: Exception | None = None

    def take(self) -> PyTree | None:
        try:
            for batch in self.batches:
                if _rows_that_fit(batch, self.rows):
                    return batch
        except Exception as error:
            self.problem = error
        return None

    def fail(self, problems: list[str | None]) -> None:
        if self.problem is not None:
            raise self.problem
        told = "; ".join(f"{rank_name(self.mesh, rank)}: {problem}" for rank, problem in enumerate(problems) if problem)
        raise UnevenBatchError(f"the batches of other ranks end with an error, so all stop here. {told}")


def _has_rows(leaf: Tree) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0


def _with_rows(batch: PyTree) -> list[tuple[str, torch.Tensor]]:
    leaves = zip(tree_paths(batch), optree.tree_leaves(batch), strict=True)
    return [(path or "the batch", leaf) for path, leaf in leaves if _has_rows(leaf)]


def _rows(batch: PyTree) -> int:
    found = {path: leaf.shape[0] for path, leaf in _with_rows(batch)}
    if len(set(found.values())) != 1:
        told = ", ".join(f"{path} has {rows}" for path, rows in found.items()) or "there is no tensor"
        raise UnevenBatchError(f"the tensors of a batch have the samples in dim 0, equally many: {told}")
    return next(iter(found.values()))


def _rows_that_fit(batch: PyTree, rows: int) -> int:
    count = _rows(batch)
    if count > rows:
        raise UnevenBatchError(f"a batch has {count} rows, more than the {rows} of rows={rows}: give a larger rows=")
    return count


def _common_sample(samples: list[PyTree | None], mesh: Mesh) -> PyTree | None:
    signatures = {rank: batch_signature(sample, begin=1) for rank, sample in enumerate(samples) if sample is not None}
    if len(set(signatures.values())) > 1:
        first = {look: rank for rank, look in reversed(signatures.items())}
        ranks = sorted(first.items(), key=lambda pair: pair[1])
        told = "; ".join(f"{rank_name(mesh, rank)} has {look}" for look, rank in ranks)
        raise UnevenBatchError(f"ranks have different samples: {told}")
    return samples[min(signatures)] if signatures else None


def batch_signature(batch: PyTree, begin: int = 0) -> str:
    def look(leaf: Tree) -> str:
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape[begin:])}"

    leaves = zip(tree_paths(batch), optree.tree_leaves(batch), strict=True)
    return ", ".join(f"{path}: {look(leaf)}".removeprefix(": ") for path, leaf in leaves)
