"""Fake tensors on a device that this machine lacks, such as CUDA: indices of torch's meta device stand in for it.

On torch without CUDA a fake CUDA tensor that needs a gradient ends the process, because autograd calls the guard of its
device. Autograd runs a backward of meta tensors in the caller's thread, as for the CPU. A fake tensor on meta with an
index reports the missing device as `x.device`. Only torch's code below the fake mode sees the stand-in. That code finds
the device of results and refuses to mix devices.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode

_wished: list[torch.device] = []  # the device of each index of the stand-in, from index 1
_below = threading.local()  # `.mode` is true while this thread runs torch's code below a fake mode


@cache
def is_missing(kind: str) -> bool:
    if kind in ("cpu", "meta"):
        return False
    module = getattr(torch, kind, None)
    return module is None or not module.is_available()


def wished_device(device: torch.device) -> torch.device:
    return _wished[device.index - 1] if device.type == "meta" and device.index else device


def device_for_trace(device: torch.device | str | int) -> torch.device:
    """Return the stand-in for a device that this machine lacks, and any other device unchanged."""
    wished = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if not is_missing(wished.type):
        return wished
    wished = torch.device(wished.type, wished.index or 0)
    if wished not in _wished:
        _show_wished_devices()
        _wished.append(wished)
    return torch.device("meta", 1 + _wished.index(wished))


@cache
def _show_wished_devices() -> None:
    own: Any = FakeTensor.device
    is_meta: Any = torch.Tensor.is_meta  # true of fake tensors on all other devices
    device = property(lambda x: own.fget(x) if _is_below() else wished_device(own.fget(x)), own.fset)
    FakeTensor.device = device  # type: ignore[assignment, method-assign]
    FakeTensor.is_cuda = property(lambda x: x.device.type == "cuda")  # type: ignore[assignment]
    FakeTensor.is_meta = property(lambda x: is_meta.__get__(x) and not own.fget(x).index)  # type: ignore[assignment]


def _is_below() -> bool:
    return getattr(_below, "mode", False)


@cache
def _make_first_mode() -> None:
    """Make the first fake mode in a thread. It imports modules, which keeps the frames of all callers in a cycle.

    The full parameters of a call of `train.init` would stay allocated until Python's collector runs.
    """
    thread = threading.Thread(target=_FakeTensorMode)
    thread.start()
    thread.join()


# without the wrappers of torch that count calls and turn its compiler off, as for the method below
_dispatch = inspect.unwrap(_FakeTensorMode.__torch_dispatch__)


class FakeTensorMode(_FakeTensorMode):
    """Mode of fake tensors that may be on devices that this machine lacks."""

    def __init__(self, **options: Any) -> None:
        _make_first_mode()
        super().__init__(**options)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": device_for_trace(kwargs["device"])}
        if not _wished or _is_below():
            return _dispatch(self, func, types, args, kwargs)
        _below.mode = True
        try:
            return _dispatch(self, func, types, args, kwargs)
        finally:
            _below.mode = False
