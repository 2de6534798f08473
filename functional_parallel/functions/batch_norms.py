"""Batch norm modules inside `fp.functional` with a forward that cannot be traced, or with statistics of groups.

`nn.SyncBatchNorm` would communicate outside of the program. Here statistics are over the global batch. With
`momentum=None`, torch's forward reads the number of batches as a Python number, which a trace does not have.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .. import _torch
from ..rules import batch_norm
from ..tracing import recorder
from .batch_groups import BatchSplit, batch_norm_of_groups

_CLASSES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
_torchs = nn.BatchNorm1d.forward  # inherited by all of them except SyncBatchNorm
_synchronised = nn.SyncBatchNorm.forward


def holds_batch_norms(module: nn.Module) -> bool:
    norms = (each for each in module.modules() if isinstance(each, _CLASSES))
    return any(each.momentum is None or isinstance(each, nn.SyncBatchNorm) for each in norms)


def require_no_group(module: nn.Module) -> None:
    wrong = [
        path or "the module"
        for path, each in module.named_modules()
        if isinstance(each, nn.SyncBatchNorm) and each.process_group not in (None, torch.distributed.group.WORLD)
    ]
    if wrong:
        raise ValueError(
            f"fp.functional: SyncBatchNorm with process_group=, but a function has no ranks: "
            f"{', '.join(wrong)}. Leave it out for the global batch; for groups of it, see docs/how_do_i.md"
        )


@contextmanager
def as_batch_norms(split: BatchSplit | None = None) -> Iterator[None]:
    """Run the batch norms that this thread calls inside as plain ones over their input batch, or over its groups."""
    # Threads that are not inside still get torch's behaviour.
    has_groups = split is not None and not split.is_whole
    with _forwards.active(), _torch.pushed(_inside(), split), _OfGroups() if has_groups else nullcontext():
        yield


def _inside() -> list[BatchSplit | None]:
    return _torch.of_thread("batch norms", list)


class _OfGroups(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        split, given = _inside()[-1], kwargs or {}
        if func is functional.batch_norm and split is not None and not split.is_whole:
            given = dict(zip(_ARGUMENTS, args, strict=False)) | given
            if given.pop("training", False):
                return batch_norm_of_groups(split, **given)
            args = ()
        return func(*args, **given)


_ARGUMENTS = tuple(inspect.signature(functional.batch_norm).parameters)


def _forward(module: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    if not _inside():
        return _synchronised(module, input) if isinstance(module, nn.SyncBatchNorm) else _torchs(module, input)
    split = _inside()[-1] if module.training else None
    if split is not None and isinstance(module, nn.SyncBatchNorm):
        split = split.synchronised()
    with _torch.pushed(_inside(), split):
        tracks = module.training and module.track_running_stats
        if tracks and module.momentum is None and (recorder() is not None or split is not None):
            return _averaged(module, input, split)
        if tracks and split is not None and split.microbatches > 1 and module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(split.microbatches - 1)
        return _torchs(module, input)


def _averaged(module: _BatchNorm, input: torch.Tensor, split: BatchSplit | None) -> torch.Tensor:
    module._check_input_dim(input)
    assert module.num_batches_tracked is not None and module.running_mean is not None
    module.num_batches_tracked.add_(1 if split is None else split.microbatches)
    factor: Any = 1 / module.num_batches_tracked.to(module.running_mean.dtype)
    statistics, scales = (module.running_mean, module.running_var), (module.weight, module.bias)
    if split is None or split.is_whole:
        result: torch.Tensor = batch_norm(input, *statistics, *scales, True, factor, module.eps)
        return result
    return batch_norm_of_groups(split, input, *statistics, *scales, factor, module.eps)


_forwards = _torch.Replacement(*((each, "forward", _forward) for each in _CLASSES))
