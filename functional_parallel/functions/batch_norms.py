"""Batch norm modules inside `fp.functional` with a forward that cannot be traced.

`nn.SyncBatchNorm` looks for a process group. On a CPU it raises if a group exists, and on CUDA it would communicate
outside of the program. Here statistics are those of the global batch, so it is treated as a plain batch norm. With
`momentum=None`, torch's forward reads the number of batches as a Python number, which a trace does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import _torch
from ..rules import batch_norm
from ..tracing import recorder

_CLASSES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
_torchs = nn.BatchNorm1d.forward  # inherited by all of them except SyncBatchNorm
_synchronised = nn.SyncBatchNorm.forward


def holds_batch_norms(module: nn.Module) -> bool:
    """Whether a module has a batch norm with a forward that must be replaced."""
    norms = (each for each in module.modules() if isinstance(each, _CLASSES))
    return any(each.momentum is None or isinstance(each, nn.SyncBatchNorm) for each in norms)


def require_no_group(module: nn.Module) -> None:
    """Refuse batch norms that synchronise only some ranks."""
    wrong = [
        path or "the module"
        for path, each in module.named_modules()
        if isinstance(each, nn.SyncBatchNorm) and each.process_group not in (None, torch.distributed.group.WORLD)
    ]
    if wrong:
        raise ValueError(
            f"fp.functional: SyncBatchNorm with process_group= takes the statistics of that group's ranks, but a "
            f"function has no ranks: {', '.join(wrong)}. Leave process_group out for those of the global batch; for "
            "groups of the batch map the function over them, see docs/how_do_i.md"
        )


@contextmanager
def as_batch_norms() -> Iterator[None]:
    """Run the batch norms that this thread calls inside as plain ones over their input batch."""
    # Threads that are not inside still get torch's behaviour.
    with _forwards.active(), _torch.pushed(_inside(), True):
        yield


def _inside() -> list[bool]:
    return _torch.of_thread("batch norms", list)


def _forward(module: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    if not _inside():
        return _synchronised(module, input) if isinstance(module, nn.SyncBatchNorm) else _torchs(module, input)
    if module.training and module.track_running_stats and module.momentum is None and recorder() is not None:
        return _averaged(module, input)
    return _torchs(module, input)


def _averaged(module: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """Run the training forward that tracks the mean of the statistics of all batches."""
    module._check_input_dim(input)
    assert module.num_batches_tracked is not None and module.running_mean is not None
    module.num_batches_tracked.add_(1)
    factor: Any = 1 / module.num_batches_tracked.to(module.running_mean.dtype)
    statistics = (module.running_mean, module.running_var)
    result: torch.Tensor = batch_norm(input, *statistics, module.weight, module.bias, True, factor, module.eps)
    return result


_forwards = _torch.Replacement(*((each, "forward", _forward) for each in _CLASSES))
