"""Rejection of calls that are silently wrong: torch.distributed's collectives, and modules that communicate in hooks.

Under torch.func an in-place `dist.all_reduce` is differentiated like the identity. A functional collective has a zero
tangent and a meaningless vmap. A DDP module returns gradients that were never synchronised (torch 2.13).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ..errors import ForeignCollectiveError

_NAMESPACES = {"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor"}

# First match wins: the op's name without underscores contains the key.
_FIXES = {
    "reducescatter": "fp.psum_scatter(x, axis, dim)",
    "allreduce": "fp.psum(x, axis)",
    "allgather": "fp.all_gather(x, axis, dim)",
    "alltoall": "fp.all_to_all(x, axis, split_dim, concat_dim)",
    "broadcast": "fp.broadcast(x, axis, source)",
    "scatter": "fp.scatter(x, axis, source, dim)",
    "gather": "fp.gather(x, axis, root, dim)",
    "reduce": "fp.reduce(x, axis, root)",
    "send": "fp.send(x, axis, source, target)",
    "recv": "fp.recv(fp.send(x, axis, source, target))",
    "permute": "fp.ppermute(x, axis, pairs)",
    "barrier": "nothing: a program's collectives keep the ranks in step",
    "wait": "nothing: collectives here return finished values",
}

_PARALLEL_MODULES = {
    "DistributedDataParallel": "fp.data_parallel",
    "DataParallel": "fp.data_parallel",
    "FullyShardedDataParallel": "fp.zero(3, axis)",
    "FSDPModule": "fp.zero(3, axis)",
}


def check_op(op: torch._ops.OpOverload) -> None:
    """Raise if `op` is an op of torch.distributed. The message names the function to call instead."""
    namespace = getattr(op, "namespace", None)
    if namespace not in _NAMESPACES:
        return
    name = op._schema.name.split("::")[-1].replace("_", "")
    fix = next((fix for key, fix in _FIXES.items() if key in name), "a collective of this library")
    raise ForeignCollectiveError(
        f"{op} is a collective of torch.distributed, which gives wrong derivatives under function transforms without "
        f"saying so; write {fix} instead"
    )


def check_callable(fn: Callable[..., Any]) -> None:
    """Raise if a function is or holds a DDP or FSDP module: bound, in a partial, a closure, or a global."""
    for module in _held_modules(fn):
        for part in module.modules():
            _check_module(part)


def _check_module(module: nn.Module) -> None:
    # By name, because importing torch.distributed.fsdp is slow and not every build of torch has it.
    for base in type(module).__mro__:
        if base.__name__ in _PARALLEL_MODULES and base.__module__.startswith("torch."):
            raise ForeignCollectiveError(
                f"the function holds a {base.__name__} module, whose hooks transforms never run: gradients stay local. "
                f"Pass the module inside it to fp.functional and use {_PARALLEL_MODULES[base.__name__]}"
            )


def _held_modules(fn: Callable[..., Any]) -> Iterator[nn.Module]:
    pending, seen = [fn], set[int]()
    while pending:
        held = pending.pop(0)
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, nn.Module):
            yield held
        elif isinstance(held, functools.partial):
            pending += [held.func, *held.args, *held.keywords.values()]
        else:
            pending += _held_by_function(held)


def _held_by_function(fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, nn.Module):
        yield owner
    for cell in getattr(fn, "__closure__", None) or ():
        with suppress(ValueError):  # a name that the enclosing function has not assigned yet
            if callable(cell.cell_contents):
                yield cell.cell_contents
    code, names = getattr(fn, "__code__", None), getattr(fn, "__globals__", {})
    reached = (names.get(name) for name in code.co_names) if code is not None else ()
    yield from (value for value in reached if isinstance(value, nn.Module))
