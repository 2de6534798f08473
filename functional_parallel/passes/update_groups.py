"""Update state that is not on the device in groups of bounded bytes: fetch, update and store one group after another.

Without it a step would fetch all state first and store it last, so that the memory of the update would hold all of it
(the optimizer of ZeRO-Infinity, arXiv 2104.07857 §5.2.2, swaps one group of parameters after another). State in the
memory of the update is not fetched. Its groups let the new parameters of one move while others are computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sharding_specs import Mesh

from ..ir import Role, Traced, info, operands_of, primitive_name, reached, topological_order, update_info
from ..ops import PACK, TO_MEMORY, is_move, is_number, moved_value
from ..program import aliases_of
from .gathers import only_rearranges
from .program_pass import Phase, ProgramPass, Scope

_OpsOf = Mapping[fx.Node, Sequence[fx.Node]]  # the late ops of each store, or other last op of an update


@dataclass(frozen=True)
class UpdateGroups(ProgramPass):
    """Place fetches and stores of state around the updates of groups of parameters.

    A group has at most `size` bytes of state, or one parameter, and runs as soon as its gradients are known. The state
    of `ahead` more groups is fetched before. State that is not fetched is updated after the gradients of the next group
    are known, so that its own have the time to move.
    """

    size: int
    ahead: int = 1
    name: ClassVar[str] = "update groups"
    phase: ClassVar[Phase] = Phase.MOVES
    scope: ClassVar[Scope] = Scope.STAGE

    def run(self, traced: Traced, mesh: Mesh) -> None:
        stores, gradients = _stores(traced) or _kept(traced), list(filter(is_gradient_fetch, traced.nodes))
        nodes = list(traced.nodes)
        position = {node: index for index, node in enumerate(nodes)}
        fetches = {*stores.values(), *gradients}
        late = set(reached(fetches, lambda node: [user for user in node.users if user in position]))
        late.update(_waiting_inputs(nodes, late))
        for node in late:
            update_info(node, phase="update")
        ops = {store: _late_ops(store, late) for store in stores}
        grouped = set().union(*ops.values())
        alone = [each for each in gradients if each not in grouped]  # of state on the device, or without state
        ops.update((last, _late_ops(last, late)) for last in _last_ops(alone, late))
        cones = [_Cone(unit, ops, late, position) for unit in _units(fetches, ops)]
        groups = list(_filled(cones, self.size))
        is_fetched = any(fetch.op == "call_function" for fetch in fetches)
        if not is_fetched and len(groups) < 2:
            return
        for node in _Order(nodes, late, cones).with_groups(groups, self.ahead, 0 if is_fetched else 1):
            traced.graph.output_node().prepend(node)


@dataclass(frozen=True)
class _Unit:
    """State that is updated together, usually the state of one parameter."""

    last: tuple[fx.Node, ...]
    fetches: tuple[fx.Node, ...]


class _Cone:
    """The late ops of a unit, in order, and the position of the last other op that they need."""

    def __init__(self, unit: _Unit, ops_of: _OpsOf, late: Collection[fx.Node], position: Mapping[fx.Node, int]) -> None:
        ops = {op: None for last in unit.last for op in ops_of[last]}
        read = {value: None for op in ops for value in operands_of(op) if value not in late}
        inputs = (alias for value in read if value.op == "placeholder" for alias in aliases_of(value))
        others = (user for value in inputs for user in value.users if user not in late)
        self.ops = [op for op in ops if op.op == "call_function"]
        self.ready = max((position.get(each, 0) for each in (*read, *others)), default=0)  # later, inputs are written
        old = (op for op in self.ops if is_gradient_fetch(op) or (is_move(op) and moved_value(op).op == "placeholder"))
        self.fetches, self.bytes = dict.fromkeys(old), sum(info(fetch).nbytes for fetch in unit.fetches)


def _stores(traced: Traced) -> dict[fx.Node, fx.Node]:
    """Map the op that stores each new value of the state to the op that fetches the old one."""
    found = {}
    for old in traced.inputs:
        index = info(old).updated_output
        new = traced.outputs[index] if index is not None else None
        fetches = [user for user in old.users if user.target is TO_MEMORY and moved_value(user) is old]
        if info(old).is_parameter or not isinstance(new, fx.Node) or new.target is not TO_MEMORY:
            continue  # what fetches a parameter computes the gradients too
        if len(fetches) == len(old.users) == 1 and fetches[0].args[1] != new.args[1]:
            found[new] = fetches[0]
    return found


def _kept(traced: Traced) -> dict[fx.Node, fx.Node]:
    """Map the op that computes each new value of the state that is where it is updated, on the host, to the old one."""
    found = {}
    for old in traced.inputs:
        index, spec = info(old).updated_output, info(old).spec
        new = traced.outputs[index] if index is not None else None
        is_kept = spec is not None and spec.memory == "host" and not (info(old).is_parameter or is_number(old))
        if is_kept and isinstance(new, fx.Node) and new.op == "call_function":
            found[new] = old
    return found


def is_gradient_fetch(node: fx.Node) -> bool:
    """Whether an op moves a gradient to the device for the update."""
    return node.target is TO_MEMORY and node.args[1] == "device" and info(node).role is Role.GRADIENT


def _last_ops(gradients: Collection[fx.Node], late: Collection[fx.Node]) -> Iterator[fx.Node]:
    """Yield the last ops of updates by these gradients, before new parameters are packed or gathered."""
    ends = [node for node in late if node.target is PACK or primitive_name(node) == "all_gather"]
    after = set(reached(ends, lambda node: [user for user in node.users if user in late]))
    for node in reached(gradients, lambda node: [user for user in node.users if user in late]):
        is_last = any(user in after or user.op == "output" for user in node.users)
        if is_last and node not in after and not is_number(node):
            yield node


def _waiting_inputs(nodes: Sequence[fx.Node], late: Collection[fx.Node]) -> set[fx.Node]:
    """Return the ops that only late ones read, if they are views and casts, or cheap ops on inputs, such as moves."""
    of_inputs, found = set[fx.Node](), set[fx.Node]()
    for node in nodes:
        known = all(value in of_inputs or value.op != "call_function" for value in operands_of(node))
        is_cheap = is_move(node) or only_rearranges(node) or is_number(node) or primitive_name(node) == "pscatter"
        if known and is_cheap:
            of_inputs.add(node)
    for node in reversed(nodes):
        if (node in of_inputs or only_rearranges(node)) and all(
            user in late or user in found or user.op == "output" for user in node.users
        ):
            found.add(node)
    return found - set(late)


def _late_ops(node: fx.Node, late: Collection[fx.Node]) -> list[fx.Node]:
    done = dict[fx.Node, None]()
    for each in topological_order(node, lambda op: [value for value in operands_of(op) if value in late], done):
        done[each] = None
    return list(done)


def _units(fetches: Collection[fx.Node], ops_of: _OpsOf) -> list[_Unit]:
    """Join the last ops if their ops have a fetch in common."""
    units = dict[fx.Node, _Unit]()  # by each of its fetches
    for last, ops in ops_of.items():
        read = {op: None for op in ops if op in fetches}
        joined = list({id(units[op]): units[op] for op in read if op in units}.values())
        read.update((op, None) for unit in joined for op in unit.fetches)
        merged = _Unit((*(each for unit in joined for each in unit.last), last), tuple(read))
        units.update(dict.fromkeys(read, merged))
    return list({id(unit): unit for unit in units.values()}.values())


def _filled(cones: Iterable[_Cone], size: int) -> Iterator[list[_Cone]]:
    """Yield groups of units, in the order of their known gradients."""
    group, filled = list[_Cone](), 0
    for cone in sorted(cones, key=lambda each: each.ready):
        if group and filled + cone.bytes > size:
            yield group
            group, filled = [], 0
        group.append(cone)
        filled += cone.bytes
    yield group


class _Order:
    """The ops of a program, with the ops of some groups later."""

    def __init__(self, nodes: Sequence[fx.Node], late: Collection[fx.Node], cones: Iterable[_Cone]) -> None:
        self.nodes, self.late = nodes, late
        grouped = {op for cone in cones for op in cone.ops}
        self.waiting = [node for node in nodes if node in late and node not in grouped]
        self.found = dict[fx.Node, None]()

    def with_groups(self, groups: Sequence[Sequence[_Cone]], ahead: int, behind: int) -> Iterable[fx.Node]:
        at = 0
        for number, group in enumerate(groups):
            ready = max(cone.ready for each in groups[number : number + behind + 1] for cone in each) + 1
            self._add(node for node in self.nodes[at:ready] if node not in self.late)
            at = max(at, ready)
            for later in groups[number : number + ahead + 1]:
                self._add(each for cone in later for each in cone.fetches if self._is_known(each))
            self._add(op for cone in group for op in cone.ops)
            self._release()
        self._add(node for node in self.nodes[at:] if node not in self.late)
        self._release()
        return self.found

    def _add(self, nodes: Iterable[fx.Node]) -> None:
        self.found.update(dict.fromkeys(nodes))

    def _is_known(self, op: fx.Node) -> bool:
        return all(value in self.found for value in operands_of(op) if value.op == "call_function")

    def _release(self) -> None:
        """Add the late ops with known operands."""
        left = []
        for op in self.waiting:
            if op in self.found or self._is_known(op):
                self._add([op])
            else:
                left.append(op)
        self.waiting = left
