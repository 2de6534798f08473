"""Merge many small collectives of gradients and parameters into few large ones, called buckets.

A collective has a latency in addition to the time for its bytes. Values are added to a bucket as they
become ready. A bucket is sent when it is full, or when an op needs one of its values (PyTorch DDP's buckets, arXiv
2006.15704 §3.2.3). The size depends on the model: one bucket for all values would be sent when no computation is left
to overlap with it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ..collectives import CollectiveCall
from ..ir import (
    Args,
    Aval,
    Role,
    Traced,
    collective_call,
    first_operand,
    info,
    operands_of,
    primitive_name,
    the_call,
)
from ..ops import PACK, TO_MEMORY, UNPACK
from .gathers import layer_of_gather
from .program_pass import Phase, ProgramPass, Scope, Settings
from .swap import is_view

aten = torch.ops.aten

_BUCKETS, _LEAST, _MOST = 4, 1 << 20, 25 << 20


@dataclass(frozen=True)
class Buckets(ProgramPass):
    """Merge reductions of gradients, and gathers of parameters, with nothing between them that needs their results.

    A bucket is sent when it has `size` bytes. "auto" for gradients is a quarter of all gradients, between 1 MiB and 25
    MiB; for parameters it is full layers of up to 25 MiB.
    """

    size: int | str = "auto"
    name: ClassVar[str] = "buckets"
    phase: ClassVar[Phase] = Phase.BUCKETS
    scope: ClassVar[Scope] = Scope.STAGE

    @classmethod
    def implied(cls, settings: Settings) -> Iterable[ProgramPass]:
        return [] if settings.options.bucket is None else [cls(settings.options.bucket)]

    def __post_init__(self) -> None:
        if self.size != "auto" and not (isinstance(self.size, int) and self.size > 0):
            raise ValueError(f"bucket={self.size!r}: it is a number of bytes, 'auto', or None for no buckets")

    def run(self, traced: Traced, mesh: Mesh) -> None:
        with traced.without_output() as new:
            self._merge(traced, mesh, new)

    def _merge(self, traced: Traced, mesh: Mesh, new: dict[fx.Node, fx.Node]) -> None:
        returned = traced.returned()
        full = _MOST if self.size == "auto" else int(self.size)
        full_of_gradients = _auto_size(traced, returned) if self.size == "auto" else full
        open_: dict[Hashable, _Bucket] = {}
        following: set[fx.Node] = set()
        for node in list(traced.nodes):
            if node in following or _is_alias_of_waiting(node, open_):
                continue
            key = _key(node)
            computes = key is None and not is_view(node)
            for other, bucket in list(open_.items()):
                asked = any(operand in bucket.waiting for operand in operands_of(node))
                if asked or (computes and bucket.is_of_a_layer):
                    open_.pop(other).send(traced, mesh, new, before=node)
            if key is None:
                continue
            bucket = open_.setdefault(key, _Bucket())
            following.update(bucket.add(node, _following(node, returned)))
            if bucket.bytes >= (full if bucket.is_of_a_layer else full_of_gradients):
                open_.pop(key).send(traced, mesh, new, before=node.next)
        for bucket in open_.values():
            bucket.send(traced, mesh, new)


def _auto_size(traced: Traced, returned: set[fx.Node]) -> int:
    """Bucket size for "auto": a quarter of the bytes of all gradients, at least 1 MiB and at most 25 MiB."""
    sums = [node for node in traced.nodes if _sum_of_gradient(node)]
    following = {each for node in sums for each in _following(node, returned)}
    gradients = [info(first_operand(node)).nbytes for node in sums if node not in following]
    return min(max(sum(gradients) // _BUCKETS, _LEAST), _MOST)


def _sum_of_gradient(node: fx.Node) -> CollectiveCall | None:
    return collective_call(node, "psum", "psum_scatter") if info(node).role is Role.GRADIENT else None


def _following(node: fx.Node, returned: set[fx.Node]) -> list[fx.Node]:
    found: list[fx.Node] = []
    while _sum_of_gradient(node) and len(node.users) == 1 and node not in returned:
        (node,) = node.users
        if primitive_name(node) != "psum":
            break
        found.append(node)
    return found


def _key(node: fx.Node) -> Hashable | None:
    """Key that collectives must share to be merged; None for a collective that is not merged."""
    known = info(node)
    gathers = known.role in (Role.PARAMETER, Role.NEW_PARAMETER)
    call = collective_call(node, "all_gather") if gathers else _sum_of_gradient(node)
    if call is None:
        return None
    layer = layer_of_gather(node) if known.role is Role.PARAMETER else None
    return (_of_bucket(call), known.aval.dtype, known.aval.device, known.role, layer, known.no_grad)


def _of_bucket(call: CollectiveCall, packed: fx.Node | None = None) -> CollectiveCall:
    return replace(call.with_dims(lambda dim: 0), operand=packed)


def _is_alias_of_waiting(node: fx.Node, open_: dict[Hashable, _Bucket]) -> bool:
    """Whether `node` is a cast, view or move of a value in an open bucket. If it is, add it to the bucket.

    It must run after the bucket is sent. Linear layers transpose parameters and gradients in this way.
    """
    if not (is_view(node) or node.target is TO_MEMORY):
        return False
    for bucket in open_.values():
        if first_operand(node) in bucket.waiting:
            bucket.waiting.add(node)
            bucket.aliases.append(node)
            return True
    return False


@dataclass
class _Bucket:
    members: list[fx.Node] = field(default_factory=list)
    aliases: list[fx.Node] = field(default_factory=list)
    waiting: set[fx.Node] = field(default_factory=set)
    following: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    bytes: int = 0

    @property
    def is_of_a_layer(self) -> bool:
        """Whether it gathers parameters of a layer. Such gathers precede their use and are sent at their position."""
        return info(self.members[0]).role is Role.PARAMETER

    def add(self, node: fx.Node, following: list[fx.Node]) -> list[fx.Node]:
        """Add a collective. Return the sums over other axes that follow it; they are merged and sent afterwards."""
        self.members.append(node)
        self.following[node] = following
        self.waiting.update((node, *following))
        self.bytes += info(first_operand(node)).nbytes
        return following

    def send(self, traced: Traced, mesh: Mesh, new: dict[fx.Node, fx.Node], before: fx.Node | None = None) -> None:
        """Replace the members by one collective, before an op or at the end, and their results by slices of it."""
        if len(self.members) < 2:
            return
        call = the_call(self.members[0])
        kind, ranks = call.kind, mesh.axis_size(call.axes)
        groups = self._groups()
        self.members = [member for group in groups for member in group]
        with traced.graph.inserting_before(before) if before is not None else traced.graph.inserting_after():
            whole = self._collective(traced, call, ranks)
            offset = 0
            for group in groups:
                sent, begin = self._sums_over_further_axes(traced, group, whole, offset)
                for member in group:
                    shape = list(
                        info(first_operand(member) if kind == "all_gather" else member).aval.shape
                    )  # of one rank
                    last = [member, *self.following[member]][-1]
                    part = _part(traced, last, sent, kind, ranks, offset - begin, shape)
                    last.replace_all_uses_with(part)
                    new[last] = part
                    for each in reversed([member, *self.following[member]]):
                        traced.graph.erase_node(each)
                    offset += torch.Size(shape).numel()
        for alias in reversed(self.aliases):
            part.append(alias)

    def _groups(self) -> list[list[fx.Node]]:
        found: dict[Hashable, list[fx.Node]] = {}
        for member in self.members:
            key = tuple(replace(the_call(each), operand=None) for each in self.following[member])
            found.setdefault(key, []).append(member)
        return list(found.values())

    def _sums_over_further_axes(
        self, traced: Traced, group: list[fx.Node], sent: fx.Node, offset: int
    ) -> tuple[fx.Node, int]:
        """Return the sent value, or a group's slice of it after these sums, and its offset in the sent value."""
        following = self.following[group[0]]
        if not following:
            return sent, 0
        aval, length = info(sent).aval, sum(info(member).aval.numel for member in group)
        own, runs = replace(aval, shape=(length,)), tuple(info(member).aval.numel for member in group)
        if length < aval.numel:
            sent = _write(traced, aten.slice.Tensor, (sent, 0, offset, offset + length), group[0], own)
        for each in following:
            sent = traced.emit(replace(the_call(each), operand=sent), info(each)._replace(val=own, runs=runs))
        return sent, offset

    def _collective(self, traced: Traced, call: CollectiveCall, ranks: int) -> fx.Node:
        first, calls = self.members[0], [the_call(member) for member in self.members]
        parts = ranks if call.kind == "psum_scatter" else 1
        values = [each.operand for each in calls]
        aval = info(values[0]).aval
        total = sum(info(value).aval.numel for value in values)
        dims = [each.dim if call.kind == "psum_scatter" else 0 for each in calls]
        packed = _write(traced, PACK, (values, parts, dims), values[0], replace(aval, shape=(total,)))
        size = {"psum": total, "psum_scatter": total // ranks, "all_gather": total * ranks}[call.kind]
        paths = dict.fromkeys(path for member in self.members for path in info(member).parameters)
        runs = tuple(info(value).aval.numel // parts for value in values)
        known = info(first)._replace(val=replace(aval, shape=(size,)), parameters=tuple(paths), runs=runs)
        return traced.emit(_of_bucket(call, packed), known)


def _part(
    traced: Traced, member: fx.Node, sent: fx.Node, kind: str, ranks: int, offset: int, shape: list[int]
) -> fx.Node:
    aval, length = info(member).aval, torch.Size(shape).numel()
    if kind == "all_gather":
        return _write(traced, UNPACK, (sent, ranks, offset, shape, the_call(member).dim), member, aval)
    own = replace(aval, shape=(length,))
    piece = _write(traced, aten.slice.Tensor, (sent, 0, offset, offset + length), member, own)
    return _write(traced, aten.view.default, (piece, list(aval.shape)), member, aval)


def _write(traced: Traced, target: fx.node.Target, args: Args, like: fx.Node, val: Aval) -> fx.Node:
    return traced.call(target, args, info(like)._replace(val=val))
