"""Kernels, the compiler and process groups, where torch has no public way to them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .transforms import disable_functorch

__all__ = [
    "compile_by_inductor",
    "fused_adamw_",
    "has_fused_adamw",
    "store_of_all_ranks",
    "timeout_of_all_ranks",
]


def has_fused_adamw(parameter: torch.Tensor) -> bool:
    """Whether torch's fused AdamW kernel serves this parameter."""
    return (
        hasattr(torch, "_fused_adamw_")
        and parameter.device.type in ("cpu", "cuda")
        and parameter.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    )


def fused_adamw_(
    p: list[torch.Tensor],
    g: list[torch.Tensor],
    m: list[torch.Tensor],
    v: list[torch.Tensor],
    step: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
) -> None:
    """torch's fused AdamW on many parameters, in place; `step` counts this update."""
    options: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
    torch._fused_adamw_(p, g, m, v, [], [step] * len(p), lr=lr, amsgrad=False, maximize=False, **options)


def timeout_of_all_ranks() -> timedelta | None:
    """After how long collectives of the process group of all ranks fail; None where its backend does not say."""
    world = torch.distributed.group.WORLD
    assert world is not None, "nobody has initialised torch.distributed"
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):  # no backend for this device, or one without options, as mpi
            return world._get_backend(torch.device(device)).options._timeout  # type: ignore[no-any-return]
    return None


def store_of_all_ranks() -> torch.distributed.Store | None:
    """The store by which the ranks of torch.distributed found each other; None where the backend has none, as mpi.

    `init_process_group` returns nothing, and the store of a script's own group is nowhere else.
    """
    if torch.distributed.get_backend() in ("mpi", "fake"):
        return None
    return torch.distributed.distributed_c10d._get_default_store()


def compile_by_inductor(
    module: torch.fx.GraphModule, operands: Sequence[torch.Tensor]
) -> Callable[..., Sequence[torch.Tensor]]:
    """Compile a graph of aten ops that writes nothing and that nothing differentiates, for these shapes and strides.

    `torch.compile` would trace it once more, by dynamo, and guard on what cannot change.
    """
    import torch._inductor as inductor  # takes a second, and few programs need it

    with disable_functorch(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own modules, when they are imported
        with FakeTensorMode():  # of each its own: where one tensor comes twice, inductor would take that for a rule
            like: list[Any] = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in operands
            ]
        return inductor.compile(module, like)  # type: ignore[no-any-return]
