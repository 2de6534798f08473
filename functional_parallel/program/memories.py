"""Memory of every value of a program: of inputs by their specs, of moves by their argument, else the operands' memory.

An op takes operands in one memory, and numbers of the host beside values of the device, as in torch. What is computed
from nothing, such as zeros, is in the memory of the ops that read it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..errors import MemoriesError
from ..ir import Traced, info, operands_of, primitive_name, source_of
from ..ops import is_move, is_number, kind_of_memory, memory_after
from .aliasing import view_base


def memories_of(traced: Traced, outputs: Sequence[str] | None = None) -> dict[fx.Node, str]:
    """Return the memory of each value. `outputs` has the memories of results, for results computed from nothing.

    Raises:
        MemoriesError: if the operands of an op are in different memories.
    """
    nodes = [node for node in traced.graph.nodes if node.op != "output"]
    if not any(is_move(node) or _memory_of_input(node) != "device" for node in nodes):
        return dict.fromkeys(nodes, "device")
    known: dict[fx.Node, str | None] = {}
    for node in nodes:
        known[node] = memory_after(node, known.__getitem__)
        if not is_move(node):
            _require_one(node, known)
    found: dict[fx.Node, str] = {}
    devices = {node: each.device.type for node in nodes for each in info(node).results if each is not None}
    if set(devices.values()) != {"cpu"}:
        known |= {node: _by_device(devices.get(node)) for node, memory in known.items() if memory is None}
    returned = zip(traced.outputs, outputs or (), strict=False)
    wanted = {node: memory for node, memory in returned if isinstance(node, fx.Node)}
    for node in reversed(known):
        readers = {
            found[user] if known[user] is None else _read_in(user, known) for user in node.users if user in known
        }
        readers |= {wanted[node]} if node in wanted else set()
        choose = max if is_number(node) else min  # the device reads numbers of the host
        found[node] = known[node] or (choose(readers) if readers else "device")
    return found


def _memory_of_input(node: fx.Node) -> str:
    spec = info(node).spec if node.op == "placeholder" else None
    return "device" if spec is None else spec.memory


def _by_device(kind: str | None) -> str:
    return "host" if kind == "cpu" else "device"


def _read_in(user: fx.Node, known: dict[fx.Node, str | None]) -> str:
    """Return the memory where an op reads values that are computed from nothing."""
    return "device" if is_move(user) else known[user] or "device"


def _require_one(node: fx.Node, known: dict[fx.Node, str | None]) -> None:
    memory = known[node]
    if memory is not None and kind_of_memory(memory) == "disk" and operands_of(node) and view_base(node) is None:
        raise MemoriesError(
            f"{source_of(node) or 'an op'}: {_name(node)} reads {_described(operands_of(node)[0])} on disk. Read it "
            "first, as fp.to_memory(x, 'device')"
        )
    wrong = [
        each
        for each in operands_of(node)
        if known[each] not in (memory, None) and not (memory == "device" and is_number(each))
    ]
    if wrong:
        other = next(each for each in operands_of(node) if known[each] == memory)
        raise MemoriesError(
            f"{source_of(node) or 'an op'}: {_name(node)} reads {_described(other)} in the memory {memory!r} and "
            f"{_described(wrong[0])} in {known[wrong[0]]!r}. Move one of them first, as fp.to_memory(x, 'device'). "
            "Of the host's values, an op on the device reads only numbers, 0-dim tensors"
        )


def _name(node: fx.Node) -> str:
    return str(primitive_name(node) or node.target)


def _described(node: fx.Node) -> str:
    shape = f"of shape {info(node).aval.shape}"
    if node.op == "placeholder":
        return f"argument {info(node).path or node.name} {shape}"
    source = source_of(node)
    return f"the result of {_name(node)} {shape}{f' at {source}' if source else ''}"
