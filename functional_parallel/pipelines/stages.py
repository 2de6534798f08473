"""Programs of a stage: forward, input gradient, weight gradient, and both gradients in one program.

All values that pass between programs are explicit. If a distant stage needs a value, the stages between forward it, so
a skip connection may cross any number of stages.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from ..errors import PipelineError
from ..ir import Aval, collective_call, first_operand, info, operands_of, reached
from ..passes import combine_op
from ..program import view_base
from .extract import Extractor, Subprogram
from .roles import OpRole, OpRoles

_FOLLOWING = {"F": "IW", "I": "W", "W": "", "B": ""}  # for each kind of work, the later kinds of the same stage


@dataclass(frozen=True, eq=False)
class ActionPrograms:
    first: Subprogram  # its last outputs are the summands of `totals`
    following: Subprogram  # also reads the running sums and adds to them; equal to `first` without sums
    totals: dict[fx.Node, Subprogram]  # the sums of the last outputs, in order, each with a program that only adds

    @property
    def parts(self) -> tuple[Subprogram, ...]:
        return tuple(dict.fromkeys((self.first, self.following, *self.totals.values())))


@dataclass(frozen=True)
class Stage:
    index: int
    works: dict[str, ActionPrograms]  # by kind of action: "F", "I", "W" and "B"
    sends_forward: tuple[fx.Node, ...]  # to the next stage after a forward
    sends_backward: tuple[fx.Node, ...]  # to the previous stage after a backward
    after_forward: frozenset[fx.Node]  # saved for the backward
    after_input: frozenset[fx.Node]  # saved for the weight gradient after the input gradient

    def sends(self, kind: str) -> tuple[fx.Node, ...]:
        return {"F": self.sends_forward, "W": ()}.get(kind, self.sends_backward)

    def kept_after(self, kind: str) -> frozenset[fx.Node]:
        return {"F": self.after_forward, "I": self.after_input}.get(kind, frozenset())


class StageBuilder:
    def __init__(self, roles: OpRoles, stage: dict[fx.Node, int], extractor: Extractor, count: int, name: str) -> None:
        self.roles, self.extractor, self.count, self.name = roles, extractor, count, name
        self.stage = dict(stage)
        self.collected = self._collected()
        self._place_the_rest()
        self.members = [[n for n in self.roles.of if self.stage.get(n) == index] for index in range(count)]
        self.weight = {node for index in range(count) for node in self._weight_gradients(index)}
        self.needed = self._needed()

    def build(self, kinds: Collection[str]) -> list[Stage]:
        return [self._build(index, kinds) for index in range(self.count)]

    @property
    def has_backward(self) -> bool:
        return any(node in self.roles.backward for node in self.stage)

    def _collected(self) -> set[fx.Node]:
        outputs = {
            node for node in self.roles.traced.outputs if isinstance(node, fx.Node) and node in self.roles.varying
        }
        gathered = {call.operand for node in self.roles.totals if (call := collective_call(node, "all_gather"))}
        return outputs | gathered

    def _place_the_rest(self) -> None:
        """Assign summands and collected values without a stage to the last stage: only one stage may compute them."""
        for node in (*map(first_operand, self.roles.totals), *self.collected):
            if node.op == "call_function":
                self.stage.setdefault(node, self.count - 1)

    def summed(self, index: int, kind: str) -> list[tuple[fx.Node, fx.Node]]:
        found = zip(self.roles.totals, map(first_operand, self.roles.totals), strict=True)
        own = [(total, value) for total, value in found if value not in self.collected]
        return [(total, value) for total, value in own if self.stage.get(value) == index and self._kind(value) == kind]

    def _kind(self, node: fx.Node) -> str:
        if node not in self.roles.backward:
            return "F"
        return "W" if node in self.weight else "I"

    def _weight_gradients(self, index: int) -> set[fx.Node]:
        """Return the backward ops of a stage that no other stage waits for.

        No stage waits for the first stage. There, the set contains the ops that lead to at most one sum. Cheap
        recomputed values belong to the input gradient, because their operands may be freed before the weight gradient.
        """
        backward = [node for node in self.members[index] if node in self.roles.backward]
        leads_to: dict[fx.Node, set[object]] = {}
        for node in reversed(backward):
            found: set[object] = set()
            for user in node.users:
                if self.stage.get(user, index) < index:
                    found |= {"another stage", "waits"}
                elif user in leads_to:
                    found |= leads_to[user]
                elif self.roles.of.get(user) is OpRole.TOTAL:
                    found.add(user)
            if info(node).is_cheap_copy:
                found |= {"another stage", "waits"}
            leads_to[node] = found
        if index:
            return {node for node in backward if "waits" not in leads_to[node]}
        return {node for node in backward if len(leads_to[node]) < 2}

    def _needed(self) -> dict[fx.Node, dict[int, set[str]]]:
        found: dict[fx.Node, dict[int, set[str]]] = {}
        for node, index in self.stage.items():
            for operand in self._operands(node):
                if operand in self.stage:
                    found.setdefault(operand, {}).setdefault(index, set()).add(self._kind(node))
        for node, users in found.items():
            if node in self.roles.backward and max(users) > self.stage[node] and not info(node).recomputed:
                raise PipelineError(
                    f"{info(node).source}: stage {max(users)} needs what the backward of stage {self.stage[node]} "
                    "makes; put fp.stage_boundary() elsewhere, or leave the cut to fp.pipeline"
                )
        return found

    def _operands(self, node: fx.Node) -> Collection[fx.Node]:
        def operands_of_repeated(value: fx.Node) -> list[fx.Node]:
            is_repeated = value not in self.stage and value.op == "call_function" and self.extractor.inline(value)
            return operands_of(value) if is_repeated else []

        return reached(operands_of(node), operands_of_repeated)

    def _build(self, index: int, kinds: Collection[str]) -> Stage:
        beside = self._residuals_beside(index, self._of_kind(index, "F"))
        works = {kind: self._work(index, kind, beside) for kind in "FBIW" if kind == "F" or kind in kinds}
        forward, backward = self._crossing(index, index + 1, up=True), self._crossing(index, index - 1, up=False)
        saved = {
            kind: frozenset(value for value in work.first.inputs if value in self.stage or value in beside)
            for kind, work in works.items()
            if kind != "F"
        }
        after_forward = frozenset(backward).union(*saved.values())
        return Stage(index, works, forward, backward, after_forward, saved.get("W", frozenset()))

    def _of_kind(self, index: int, kind: str) -> list[fx.Node]:
        return [node for node in self.members[index] if self._kind(node) == kind]

    def _residuals_beside(self, index: int, forward: list[fx.Node]) -> set[fx.Node]:
        made = {n for n in self.extractor.closure(forward) if self.roles.of[n] is OpRole.LOCAL and n not in self.stage}
        taken = {
            operand
            for node in self.members[index]
            if node in self.roles.backward
            for operand in self._operands(node)
            if operand in made
        }
        return {node for node in taken if _is_kept(node)}

    def _leaving(self, index: int, kinds: str, nodes: list[fx.Node]) -> set[fx.Node]:
        found = set()
        for node in nodes:
            for stage, taken in self.needed.get(node, {}).items():
                if stage != index or taken & set(kinds):
                    found.add(node)
        return found | {node for node in nodes if node in self.collected}

    def _work(self, index: int, kind: str, beside: set[fx.Node]) -> ActionPrograms:
        parts = "IW" if kind == "B" else kind
        nodes = [node for each in parts for node in self._of_kind(index, each)]
        sums = [pair for each in parts for pair in self.summed(index, each)]
        leaving, given = self._leaving(index, _FOLLOWING[kind], nodes), beside
        if kind == "F":
            leaving, given = leaving | beside, set()
        order = sorted(leaving, key=self.extractor.position.__getitem__)
        name = f"{self.name}: stage {index}, {kind}"
        values = [value for _, value in sums]
        first = self.extractor.part(nodes, [*order, *values], name, given)
        if not sums:
            return ActionPrograms(first, first, {})
        added = [(total, combine_op(total, self.roles.axis)) for total, _ in sums]
        following = self.extractor.part(nodes, [*order, *values], f"{name}, adding", given, added)
        adding = {}
        for number, ((total, value), added_to) in enumerate(zip(sums, added, strict=True)):
            adding[total] = self.extractor.part((), [value], f"{name}, sum {number}", [value], [added_to])
        return ActionPrograms(first, following, adding)

    def _crossing(self, index: int, neighbour: int, up: bool) -> tuple[fx.Node, ...]:
        found = []
        for node, needed in self.needed.items():
            made = self.stage[node]
            if up:
                crosses = node not in self.roles.backward and made <= index and max(needed) >= neighbour
            else:
                crosses = made >= index and min(needed) <= neighbour
            if crosses:
                found.append(node)
        return tuple(sorted(found, key=self.extractor.position.__getitem__))


def _is_kept(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return view_base(node.args[0]) is None
    return isinstance(info(node).val, Aval) and view_base(node) is None
