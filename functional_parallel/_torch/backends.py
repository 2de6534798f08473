"""Private torch APIs of kernels, the compiler and process groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .transforms import disable_functorch


def has_fused_adamw(parameter: torch.Tensor, lr: torch.Tensor) -> bool:
    """Whether torch's fused AdamW kernel supports this parameter and rate. It reads a rate on a device as float32."""
    return (
        hasattr(torch, "_fused_adamw_")
        and parameter.device.type in ("cpu", "cuda")
        and (lr.device.type == "cpu" or parameter.dtype != torch.float64)
        and parameter.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    )


def fused_adamw_(
    p: list[torch.Tensor],
    g: list[torch.Tensor],
    m: list[torch.Tensor],
    v: list[torch.Tensor],
    step: torch.Tensor,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    skip: torch.Tensor | None = None,
) -> None:
    """Update many parameters in place by torch's fused AdamW, unless `skip`. `step` includes this update."""
    # `Tensor.to` waits for the device where it copies a number to it, and `float` where it reads one from it.
    device, is_number = p[0].device, step.device.type == "cpu"
    like = {"dtype": torch.float32, "device": device}
    count = torch.full((), float(step), **like) if is_number else step.to(**like)  # type: ignore[call-overload]
    options: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
    options["lr"] = float(lr) if "cpu" in (lr.device.type, device.type) else lr.to(device, torch.float32)
    if skip is not None:
        options["found_inf"] = skip.to(**like)  # type: ignore[call-overload]
    torch._fused_adamw_(p, g, m, v, [], [count] * len(p), amsgrad=False, maximize=False, **options)


def timeout_of_all_ranks() -> timedelta | None:
    """Return the timeout of collectives of the default process group; None if its backend does not report one."""
    world = torch.distributed.group.WORLD
    assert world is not None, "torch.distributed is not initialised"
    for device in ("cpu", "cuda"):
        with suppress(
            RuntimeError, AttributeError
        ):  # no backend for this device, or a backend without options, e.g. mpi
            return world._get_backend(torch.device(device)).options._timeout
    return None


def store_of_all_ranks() -> torch.distributed.Store | None:
    """Return the rendezvous store of the default process group; None if the backend, such as mpi, does not use one."""
    # `init_process_group` does not return it, and torch has no public API for the store of a group of a script.
    if torch.distributed.get_backend() in ("mpi", "fake"):
        return None
    return torch.distributed.distributed_c10d._get_default_store()


def compile_by_inductor(
    module: torch.fx.GraphModule, operands: Sequence[torch.Tensor]
) -> Callable[..., Sequence[torch.Tensor]]:
    """Compile a graph of aten ops for these shapes and strides. It must not write to memory or be differentiated."""
    # `torch.compile` would retrace it with dynamo and add guards on values that cannot change.
    import torch._inductor as inductor  # takes a second, and few programs need it

    with disable_functorch(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised by torch's modules at import
        with FakeTensorMode():  # separate fakes: a tensor passed twice would be compiled as always aliased
            like: list[Any] = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in operands
            ]
        return inductor.compile(module, like)  # type: ignore[no-any-return]
