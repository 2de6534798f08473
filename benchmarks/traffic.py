"""Bytes that a rank sends, counted from the calls that reach torch.distributed, whoever makes them.

Every collective counts as one around a ring does, so that what is compared is what a library asks for, not how gloo
carries it: from S, the bytes of the whole value over n ranks, (n−1)/n · S for a gather, a reduce-scatter or an
exchange, twice that for an all-reduce, S along a chain for a broadcast, and S for a send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

SILENT = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"}


class Traffic(TorchDispatchMode):
    """Counts inside a `with` block, in this thread and the backward's.

    Attributes:
        bytes: that this rank sends, by the name of the operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes again, as the collectives that it is made of
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name not in SILENT:
            if name not in SENT:
                raise LookupError(f"{func} calls torch.distributed and has no row in traffic.SENT")
            self.bytes[name] += SENT[name](*args)
        if func.namespace == "fp" and isinstance(args[0], torch.Tensor):  # an op of ours, that calls what counts
            with self:
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)
        return func(*args, **(kwargs or {}))


def _nbytes(tree: Any) -> int:
    leaves = optree.tree_leaves(tree, namespace="torch")
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))


def _share(group: Any, times: int = 1) -> Callable[[int], int]:
    """What one of n ranks sends of S bytes around a ring."""
    size = (
        dist.distributed_c10d._resolve_process_group(group).size() if isinstance(group, str) else _group(group).size()
    )
    return lambda whole: times * whole * (size - 1) // size


def _group(boxed: Any) -> Any:
    """A process group out of the box in which the dispatcher passes it on."""
    return dist.ProcessGroup.unbox(boxed) if isinstance(boxed, torch.ScriptObject) else boxed


def _broadcast(tensors: Any, boxed: Any, root: int, *_: Any) -> int:
    """Along a chain that begins at the source: all send it on but the last."""
    group = _group(boxed)
    return 0 if (group.rank() + 1) % group.size() == root else _nbytes(tensors)


def _exchange(output: Any, given: Any, boxed: Any, _: Any, splits: list[int], *rest: Any) -> int:
    """All but what a rank keeps for itself."""
    group = _group(boxed)
    kept = splits[group.rank()] / len(given) if splits else 1 / group.size()
    return round(_nbytes(given) * (1 - kept)) if given.numel() else 0


SENT: dict[str, Callable[..., int]] = {  # by operation; arguments as in torch's schemas
    "allreduce_": lambda tensors, group, *_: _share(group, 2)(_nbytes(tensors)),
    "allreduce_coalesced_": lambda tensors, group, *_: _share(group, 2)(_nbytes(tensors)),
    "allgather_": lambda output, given, group, *_: _share(group)(_nbytes(output)),
    "_allgather_base_": lambda output, given, group, *_: _share(group)(_nbytes(output)),
    "allgather_into_tensor_coalesced_": lambda output, given, group: _share(group)(_nbytes(output)),
    "reduce_scatter_": lambda output, given, group, *_: _share(group)(_nbytes(given)),
    "_reduce_scatter_base_": lambda output, given, group, *_: _share(group)(_nbytes(given)),
    "reduce_scatter_tensor_coalesced_": lambda output, given, group, *_: _share(group)(_nbytes(given)),
    "alltoall_": lambda output, given, group, *_: _share(group)(_nbytes(given)),
    "alltoall_base_": _exchange,
    "broadcast_": _broadcast,
    "send": lambda tensors, *_: _nbytes(tensors),
    "all_reduce": lambda given, how, group: _share(group, 2)(_nbytes(given)),
    "all_reduce_coalesced": lambda given, how, group: _share(group, 2)(_nbytes(given)),
    "all_gather_into_tensor": lambda given, size, group: _nbytes(given) * (size - 1),
    "reduce_scatter_tensor": lambda given, how, size, group: _nbytes(given) * (size - 1) // size,
    "all_to_all_single": lambda given, output, splits, group: _share(group)(_nbytes(given)),
}
