"""Devices in a trace: arguments that name a device which this machine lacks, and ops on two devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import fx

from .. import _torch
from ..errors import TracingError
from ..ir import VIEWS, Args, Kwargs, current_source, info, primitive_name
from .closed_over import closed_over
from .interception import Replaced, intercept

if TYPE_CHECKING:
    from .writer import TraceWriter

Device = torch.device | str | int


def _missing(device: Device | None) -> torch.device | None:
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device) if device else None
    return None if found is None or not _torch.is_missing(found.type) else torch.device(found.type, found.index or 0)


@intercept(torch.Tensor.device.__get__, always=True, same_strides=True)
def _device(x: torch.Tensor) -> torch.device:
    return _torch.wished_device(x.device)  # torch returns the stand-in for a tensor inside torch.func's wrappers


@intercept(torch.Tensor.is_cuda.__get__, always=True, same_strides=True)  # type: ignore[attr-defined]
def _is_cuda(x: torch.Tensor) -> bool:
    return _torch.wished_device(x.device).type == "cuda"


@intercept(torch.Tensor.is_meta.__get__, always=True, same_strides=True)  # type: ignore[attr-defined]
def _is_meta(x: torch.Tensor) -> bool:
    return _torch.wished_device(x.device).type == "meta"


@intercept(torch.Tensor.to, always=True, same_strides=True)
def _to(x: torch.Tensor, *args: Any, **kwargs: Any) -> Replaced:
    named = kwargs.get("device", args[0] if args and isinstance(args[0], Device) else None)
    device = _missing(named)
    if device is None:
        return NotImplemented
    rest = {name: value for name, value in kwargs.items() if name != "device"}
    moved: torch.Tensor = x.to(device, *(args if "device" in kwargs else args[1:]), **rest)
    return moved


@intercept(torch.Tensor.cuda, always=True, same_strides=True)
def _cuda(x: torch.Tensor, device: Device | None = None, *rest: Any, **kwargs: Any) -> Replaced:
    found = _missing("cuda" if device is None else device)
    return x.to(found) if found is not None else NotImplemented


def _from_values(make: Callable[..., torch.Tensor]) -> None:
    @intercept(make, always=True, same_strides=True)
    def made(*args: Any, device: Device | None = None, **kwargs: Any) -> Replaced:
        found = _missing(device)
        if found is None:
            return NotImplemented
        if args and isinstance(args[0], torch.Tensor):  # it may be on the missing device
            return make(args[0].to(found), *args[1:], **kwargs)
        return make(*args, device="cpu", **kwargs).to(found)


for _make in (torch.tensor, torch.as_tensor, torch.asarray):
    _from_values(_make)


@intercept(torch.Tensor.new_tensor, always=True, same_strides=True)
def _new_tensor(
    x: torch.Tensor, data: Any, *, dtype: torch.dtype | None = None, device: Device | None = None, **kwargs: Any
) -> Replaced:
    found = _missing(x.device if device is None else device)
    return NotImplemented if found is None else torch.tensor(data, dtype=dtype or x.dtype, **kwargs).to(found)


# --- Operands on two devices ---


def require_one_device(recording: TraceWriter, func: _torch.Op, args: Args, kwargs: Kwargs) -> None:
    tensors = [leaf for leaf in optree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    found = sorted(devices_of(tensors).items(), key=lambda each: each[0].type == "cpu")
    if len(found) < 2:
        return
    (there, held), (here, strange) = found[:2]
    raise TracingError(
        f"{current_source() or 'the function'}: the operands of {func} are on two devices: "
        f"{_named(recording, strange)} is on {here}, {_named(recording, held)} is on {there}. Move one before the "
        "function, or inside it by `x.to(other.device)`. Only numbers, 0-dim tensors on the CPU, fit every device"
    )


def devices_of(tensors: Iterable[Any]) -> dict[torch.device, Any]:
    """Return the devices of operands, each with its first operand. 0-dim tensors on the CPU count as numbers."""
    found: dict[torch.device, Any] = {}
    for x in tensors:
        if x.ndim or x.device.type != "cpu":
            found.setdefault(x.device, x)
    return found


def _named(recording: TraceWriter | None, x: torch.Tensor) -> str:
    while recording is not None:
        node = recording.value(x)
        while node is not None and node.target in VIEWS:
            node = node.args[0]
        if node is not None and node.op == "get_attr":
            return str(closed_over(recording.traced.constants[str(node.target)]))
        if node is not None and node not in recording.traced.captured_inputs:
            return _described(node)
        recording = recording.outer
    return str(closed_over(x))


def _described(node: fx.Node) -> str:
    shape = f"of shape {info(node).aval.shape}"
    if node.op == "placeholder":
        return f"argument {info(node).path or node.name} {shape}"
    return f"the result of {primitive_name(node) or node.target} {shape}, computed at {info(node).source}"
