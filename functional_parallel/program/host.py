"""Find the ops of a program that involve the host: it waits for the device there, or computes in main memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from ..errors import BackendError
from ..ir import Aval, Traced, in_main_memory, info, operands_of, primitive_name, source_of, tensor_operands

aten = torch.ops.aten

_MOST_NAMED = 5
_BYTES_OF_ROWS = 16  # torch's grouped product takes rows that begin at multiples
_OURS = ("aten", "prims", "fp")
# kernels of torch for CUDA that read values on the host, though no tag of their op tells it
_READERS = frozenset(
    {"_ctc_loss", "_linalg_check_errors", "_linalg_eigh", "_linalg_eigvals", "_linalg_svd", "embedding_renorm_"}
    | {"histc", "is_nonzero", "linalg_eig", "linalg_lstsq"}
)


@dataclass(frozen=True)
class HostOp:
    """Op or input of a program that involves the host."""

    op: str  # name of the op, or path of the input
    source: str  # the source line; "" for an input
    why: str  # what the host does
    waits: bool  # whether the host waits for the device

    def __str__(self) -> str:
        return f"{self.op}{f' at {self.source}' if self.source else ''}: {self.why}"


def host_ops(traced: Traced) -> list[HostOp]:
    return list(_Search(traced).found())


def require_capturable(name: str, traced: Traced) -> None:
    devices = {each.device.type for node in traced.inputs for each in info(node).results if each is not None}
    if devices == {"cpu"}:
        raise BackendError(
            f"backend='cudagraphs' records the kernels of a CUDA device, and {name} runs on the CPU: give it tensors "
            "on CUDA, or use backend='eager' or backend='inductor'"
        )
    if found := host_ops(traced):
        lines = "\n  ".join(map(str, found[:_MOST_NAMED]))
        more = f"\n  and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise BackendError(
            f"backend='cudagraphs' cannot capture {name}, because the host takes part in it:\n  {lines}{more}\n"
            "A CUDA graph repeats kernels on fixed memory. Compute these values on the device, without reading them, "
            "or use backend='eager' or backend='inductor'; program.host_ops() lists all of them"
        )


class _Search:
    """Search of a graph. `moving` has the values in main memory that differ from step to step."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.moving: set[fx.Node] = set()

    def found(self) -> Iterator[HostOp]:
        for node in self.traced.graph.nodes:
            if node.op == "placeholder" and node.users and _is_here(node):
                self.moving.add(node)
                yield HostOp(info(node).path or node.name, "", "an input in main memory", False)
            elif node.op == "call_function" and node.target is not operator.getitem:
                yield from self._of(node)
            elif node.op == "call_function" and node.args[0] in self.moving:
                self.moving.add(node)

    def _of(self, node: fx.Node) -> Iterator[HostOp]:
        makes_here = _is_here(node)
        if primitive_name(node) is not None:  # `axis_index` is a constant of the rank
            why, waits = "", False
        elif makes_here and any(not in_main_memory(each) for each in _avals(node)):
            why, waits = "the host reads a value of the device", True
        elif makes_here:
            why, waits = "computes in main memory", False
            if self.moving.isdisjoint(operands_of(node)):  # a constant
                return
        elif any(map(self._is_copied, operands_of(node))):  # the runtime copies without a wait, other ops do not
            why, waits = "copies from main memory to the device", node.target is not aten._to_copy.default
        else:
            why, waits = self._read(node)
        if makes_here and why:
            self.moving.add(node)
        if why:
            yield HostOp(str(node.target), str(source_of(node) or ""), why, waits)

    def _read(self, node: fx.Node) -> tuple[str, bool]:
        """Return why the kernels of an op on the device involve the host, and whether it waits; "" if they do not."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _OURS:
            tags = getattr(target, "tags", ())
            if torch.Tag.pt2_compliant_tag in tags and torch.Tag.cudagraph_unsafe not in tags:
                return "", False
            return "its kernel is not known, and has no torch.Tag.pt2_compliant_tag", False
        name = target._schema.name.partition("::")[2]
        if name in _SPECIAL:
            return ("the host reads a value of the device", True) if _SPECIAL[name](self.traced, node) else ("", False)
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        reads = name in _READERS or (name != "index" and not tags.isdisjoint(target.tags))  # masks are traced otherwise
        return ("the host reads a value of the device", True) if reads else ("", False)

    def _is_copied(self, operand: fx.Node) -> bool:
        known = info(operand).val
        return isinstance(known, Aval) and in_main_memory(known) and known.ndim > 0 and operand.op != "get_attr"


def _is_here(node: fx.Node) -> bool:
    return any(each is not None and in_main_memory(each) for each in info(node).results)


def _avals(node: fx.Node) -> list[Aval]:
    return [found for each in tensor_operands(node) if isinstance(found := info(each).val, Aval)]


# --- Ops of the library ---


def _reads_count(traced: Traced, node: fx.Node) -> bool:
    """Whether a rate on the host needs the number of updates from the device: a step may skip one."""
    count = node.args[0]
    while count.op == "call_function" and len(operands_of(count)) == 1:
        count = operands_of(count)[0]
    index = info(count).updated_output
    after = None if index is None else traced.outputs[index]
    return isinstance(after, fx.Node) and not (after.target is aten.add.Tensor and after.args == (count, 1))


def _lacks_alignment(traced: Traced, node: fx.Node) -> bool:
    """Whether torch's kernel for grouped products refuses the operands, so that the host reads the groups' sizes."""
    left, right = _avals(node)[:2]
    is_outer = node.target._schema.name.endswith("outer")
    sizes = (left.shape[-1], right.shape[-1]) if is_outer else (left.shape[-1], *right.shape[-2:])
    wide = left.dtype not in (torch.float32, torch.bfloat16, torch.float16)
    return wide or any(size * left.dtype.itemsize % _BYTES_OF_ROWS for size in sizes)


_SPECIAL: dict[str, Callable[[Traced, fx.Node], bool]] = {
    "ctc": lambda traced, node: True,
    "rate_on_host": _reads_count,
    "grouped_mm": _lacks_alignment,
    "grouped_outer": _lacks_alignment,
}
