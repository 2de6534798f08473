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

from ..ir import Traced, info, operands_of, primitive_name, reached, topological_order, update_info
from ..ops import TO_MEMORY, is_move, is_number, moved_value
from .gathers import only_rearranges
from .program_pass import Phase, ProgramPass, Scope

_OpsOf = Mapping[fx.Node, Sequence[fx.Node]]  # the late ops of each store


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
        stores = _stores(traced) or _kept(traced)
        nodes = list(traced.nodes)
        position = {node: index for index, node in enumerate(nodes)}
        fetches = set(stores.values())
        late = set(reached(fetches, lambda node: [user for user in node.users if user in position]))
        late.update(_waiting_inputs(nodes, late))
        for node in late:
            update_info(node, phase="update")
        ops = {store: _late_ops(store, late) for store in stores}
        cones = [_Cone(unit, ops, late, position) for unit in _units(stores, ops)]
        groups = list(_filled(cones, self.size))
        is_fetched = any(fetch.op == "call_function" for fetch in fetches)
        if not is_fetched and len(groups) < 2:
            return
        for node in _Order(nodes, late, cones).with_groups(groups, self.ahead, 0 if is_fetched else 1):
            traced.graph.output_node().prepend(node)


@dataclass(frozen=True)
class _Unit:
    """State that is updated together, usually that of one parameter."""

    stores: tuple[fx.Node, ...]
    fetches: tuple[fx.Node, ...]


class _Cone:
    """The late ops of a unit, in order, and the position of the last other op that they need."""

    def __init__(self, unit: _Unit, ops_of: _OpsOf, late: Collection[fx.Node], position: Mapping[fx.Node, int]) -> None:
        ops = {op: None for store in unit.stores for op in ops_of[store]}
        read = {value: None for op in ops for value in operands_of(op) if value not in late}
        others = (user for value in read if value.op == "placeholder" for user in value.users if user not in late)
        self.ops = [op for op in ops if op.op == "call_function"]
        self.ready = max((position.get(each, 0) for each in (*read, *others)), default=0)  # later, inputs are written
        old = (op for op in self.ops if is_move(op) and moved_value(op).op == "placeholder")
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


def _units(stores: Mapping[fx.Node, fx.Node], ops_of: _OpsOf) -> list[_Unit]:
    """Join the stores whose ops have a fetch in common."""
    fetches, units = set(stores.values()), dict[fx.Node, _Unit]()  # by each of its fetches
    for store in stores:
        read = {op: None for op in ops_of[store] if op in fetches}
        joined = list({id(units[op]): units[op] for op in read if op in units}.values())
        read.update((op, None) for unit in joined for op in unit.fetches)
        merged = _Unit((*(each for unit in joined for each in unit.stores), store), tuple(read))
        units.update(dict.fromkeys(read, merged))
    return list({id(unit): unit for unit in units.values()}.values())


def _filled(cones: Iterable[_Cone], size: int) -> Iterator[list[_Cone]]:
    """Yield groups of units, in the order in which their gradients are known."""
    group, filled = list[_Cone](), 0
    for cone in sorted(cones, key=lambda each: each.ready):
        if group and filled + cone.bytes > size:
            yield group
            group, filled = [], 0
        group.append(cone)
        filled += cone.bytes
    yield group


class _Order:
    """The ops of a program with those of some groups later."""

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
                self._add(fetch for cone in later for fetch in cone.fetches)
            self._add(op for cone in group for op in cone.ops)
            self._release()
        self._add(node for node in self.nodes[at:] if node not in self.late)
        self._release()
        return self.found

    def _add(self, nodes: Iterable[fx.Node]) -> None:
        self.found.update(dict.fromkeys(nodes))

    def _release(self) -> None:
        """Add the late ops whose operands are known."""
        left = []
        for op in self.waiting:
            if op in self.found or all(value in self.found for value in operands_of(op) if value.op == "call_function"):
                self._add([op])
            else:
                left.append(op)
        self.waiting = left
