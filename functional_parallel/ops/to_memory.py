"""`to_memory(x, memory)`: move a value to another memory: the device's, the host's, or a disk.

On an accelerator, the host's memory is main memory, pinned, and the device's is the accelerator's. On a CPU machine
both are main memory, and a move is a copy, so that a program needs as much of each memory as it does elsewhere. The
memory of a value is not stored: it follows from the specs of inputs, the moves, and the operands of each op.

A value on disk is in a file (`disk_blocks`). Programs read it into the memory of the host, and write new values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx

from sharding_specs import register_storage

from .. import _torch
from ..errors import MemoriesError
from ..ir import define_op, info, operands_of, topological_order
from ..tracing import recorder
from .disk_blocks import empty_on_disk, folder_of, is_on_disk, read, require_folder, write

MEMORIES = ("device", "host", "disk")
_CPU = torch.device("cpu")
T = TypeVar("T")


def to_memory(x: Tensor, memory: str) -> Tensor:
    """Return a copy of a value in a memory: "device", "host", or the memory of `disk(folder)`.

    A derivative moves back: the gradient of `x` is in the memory of `x`. Sharding and results do not change.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh, P
    >>> double = fp.compile(
    ...     lambda x: fp.to_memory(x, "device") * 2, Mesh(), in_specs=P(memory="host"), out_specs=P()
    ... )
    >>> double(torch.ones(2)), double.program.memory().peaks     # x on the host; its copy and the result
    (tensor([2., 2.]), {'device': 16, 'host': 8})

    Args:
        x: the value. An op takes operands in one memory, and numbers (0-dim tensors) of the host.
        memory: the memory of the copy. On a machine without an accelerator, both are main memory.

    Raises:
        MemoriesError: for another memory.
    """
    require_memory(memory, f"to_memory(x, {memory!r})")
    source = memory_now(x) or memory, _torch.wished_device(x.device)
    return _move(x, memory, _memory_device(x, memory), *source)


def disk(folder: str | Path) -> str:
    """Return the memory of a folder on a disk, for `P(…, memory=…)` and `to_memory`.

    Values are in files without names, which end with the values or the process: nothing is left behind. A program reads
    them into the memory of the host.

    >>> import tempfile, torch, functional_parallel as fp
    >>> from sharding_specs import Mesh, P
    >>> on_disk = P(memory=fp.disk(tempfile.gettempdir()))
    >>> add = fp.compile(lambda x: x + 1, Mesh(), in_specs=on_disk, out_specs=on_disk)
    >>> add(torch.ones(2)), add.program.bytes_moved()
    (tensor([2., 2.]), {('disk', 'host'): 8, ('host', 'disk'): 8})

    Args:
        folder: an existing folder. It has the same name on all ranks, and may be a disk of each host.

    Raises:
        DiskError: if there is no such folder, or it cannot be written.
    """
    word = f"disk:{require_folder(folder)}"
    register_storage("memory", word, _moved(word), _moved("host"), inside="host")
    return word


def kind_of_memory(memory: str) -> str:
    return memory.partition(":")[0]


def require_memory(memory: str, where: str) -> None:
    if kind_of_memory(memory) not in MEMORIES or memory == "disk":
        raise MemoriesError(f"{where}: the memories are 'device', 'host' and fp.disk(folder)")


def room_for(x: Tensor, memory: str, *, device: torch.device) -> Tensor:
    """Return an empty tensor for a copy of `x` in a memory."""
    if x.is_meta:  # of another rank
        return torch.empty_like(x)
    kind, _, folder = memory.partition(":")
    if kind == "disk":
        return empty_on_disk(x.shape, x.dtype, folder)
    is_pinned = kind == "host" and x.device.type == "cuda"
    return torch.empty(x.shape, dtype=x.dtype, device=device, pin_memory=is_pinned)


def copy_into(target: Tensor, x: Tensor) -> Tensor:
    """Copy a tensor into one of another memory, and return that."""
    if x.is_meta:
        return target
    if is_on_disk(target):
        return write(target, x.cpu())
    if not is_on_disk(x):
        return target.copy_(x)
    if target.device.type == "cpu":
        return read(x, target)
    return target.copy_(read(x, torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)))


def copy_beside(x: Tensor) -> Tensor:
    """Return a dense copy of a tensor outside programs, in the memory that it is in."""
    if is_on_disk(x):
        return write(empty_on_disk(x.shape, x.dtype, folder_of(x)), x)
    if x.device.type == "cpu" and x.is_pinned():
        return torch.empty_like(x, memory_format=torch.contiguous_format, pin_memory=True).copy_(x)
    return x.clone(memory_format=torch.contiguous_format)


_Parameter = str | torch.device


class _MoveContext(Protocol):
    memory: str
    device: torch.device
    source: tuple[str, torch.device]


@_torch.without_zeros
class _ToMemory(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, memory: str, device: torch.device, *_: _Parameter) -> Tensor:
        return TO_MEMORY(x, memory, device=device)

    @staticmethod
    def setup_context(ctx: _MoveContext, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.memory, ctx.device, *source = inputs
        ctx.source = source[0], source[1]

    @staticmethod
    def jvp(ctx: _MoveContext, tangent: Tensor, *_: None) -> Tensor:
        return _move(tangent, ctx.memory, ctx.device, *ctx.source)

    @staticmethod
    def backward(ctx: _MoveContext, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        memory, device = ctx.source
        memory = "host" if kind_of_memory(memory) == "disk" else memory  # ops add gradients there
        return _move(cotangent, memory, device, ctx.memory, ctx.device), None, None, None, None

    @staticmethod
    def vmap(info: _torch.VmapInfo, in_dims: _torch.InDims, x: Tensor, *rest: _Parameter) -> tuple[Tensor, int | None]:
        return _move(x, *rest), in_dims[0]


_move: Callable[..., Tensor] = _ToMemory.apply

TO_MEMORY: Callable[..., Tensor] = define_op(
    "to_memory(Tensor x, str memory, *, Device device) -> Tensor",
    lambda x, memory, *, device: copy_into(room_for(x, memory, device=device), x),
    lambda x, memory, *, device: x.new_empty(x.shape, device=device),
    lambda x, memory, *, device: to_memory(x, memory),
    merges=False,  # what the update fetches is not kept from the forward
)


MOVE_INTO: Callable[..., Tensor] = define_op(  # a move in place of a value that is not needed any more
    "move_into_(Tensor(a!) target, Tensor x, str memory, *, Device device) -> Tensor(a!)",
    lambda target, x, memory, *, device: copy_into(target, x),
    lambda target, x, memory, *, device: target,
    lambda target, x, memory, *, device: to_memory(x, memory),
)


# --- The memory of a value ---


def memory_now(x: Tensor) -> str | None:
    """Return the memory of a value while it is recorded. None if it could be in any: it is computed from nothing."""
    active: Any = recorder()
    plain, node = _torch.unwrap(x), None
    while active is not None and (node := active.value(plain)) is None:
        active = active.outer
    if active is None or node is None:
        return "device" if _is_elsewhere(plain.device) or not _is_elsewhere(_device_now()) else "host"
    known: dict[fx.Node, str | None] = active.notes.setdefault(memory_now, {})
    for each in topological_order(node, operands_of, known):
        known[each] = memory_after(each, known.__getitem__)
    return known[node]


def to_device(leaf: T) -> T | Tensor:
    """Return a recorded value on the device: moved, if it is elsewhere. Other leaves stay."""
    is_elsewhere = isinstance(leaf, Tensor) and memory_now(leaf) not in ("device", None)
    return to_memory(leaf, "device") if is_elsewhere else leaf  # type: ignore[arg-type]


class NumberBeside:
    """A number (0-dim tensor), in the memory of each value that it meets. It moves once to each."""

    def __init__(self, number: Tensor) -> None:
        self._known = {memory_now(number) or "device": number}

    def __call__(self, like: Tensor) -> Tensor:
        """Return the number as an op on `like` takes it. The device reads numbers of the host."""
        memory = memory_now(like) or "device"
        first = next(iter(self._known.values()))
        if memory not in self._known:
            self._known[memory] = first if memory == "device" else to_memory(first, memory)
        return self._known[memory]


def memory_after(node: fx.Node, memory: Callable[[fx.Node], str | None]) -> str | None:
    """Return the memory of the result of an op, from its operands' memories, or of an input or a constant."""
    if is_move(node):
        return str(node.args[-1])
    if node.op == "placeholder":
        spec = info(node).spec
        return "device" if spec is None else spec.memory
    found = [memory(each) for each in operands_of(node)]
    return next(_by_weight(node, found), None)


def _by_weight(node: fx.Node, memories: Iterable[str | None]) -> Iterator[str]:
    """Yield the memories of operands, of tensors with dims first, and of numbers the device's first."""
    known = [(memory, each) for memory, each in zip(memories, operands_of(node), strict=True) if memory is not None]
    yield from (memory for memory, each in known if not is_number(each))
    yield from sorted(memory for memory, _ in known)


def is_move(node: fx.Node) -> bool:
    return node.target in (TO_MEMORY, MOVE_INTO)


def moved_value(node: fx.Node) -> fx.Node:
    """Return the operand of a move."""
    value: fx.Node = node.args[-2]
    return value


def is_number(node: fx.Node) -> bool:
    return all(each is None or not each.ndim for each in info(node).results)


def device_of_memory(memory: str, device: torch.device) -> torch.device:
    """Return where a memory of a program for `device` is."""
    return device if memory == "device" else _CPU


def _memory_device(x: Tensor, memory: str) -> torch.device:
    device = _torch.wished_device(x.device)
    return _CPU if memory != "device" else device if _is_elsewhere(device) else _device_now()


def _device_now() -> torch.device:
    """Return the device of the outermost trace: the device of its first input that is not in main memory."""
    active: Any = recorder()
    if active is None:
        return torch.get_default_device()
    while active.outer is not None:
        active = active.outer
    devices = (info(node).aval.device for node in active.traced.inputs)
    return next(filter(_is_elsewhere, devices), _CPU)


def _is_elsewhere(device: torch.device) -> bool:
    return device.type != "cpu"


def _moved(memory: str) -> Callable[[Tensor], Tensor]:
    return lambda x: to_memory(x, memory)


register_storage("memory", "host", _moved("host"), _moved("device"), inside="host")
