"""Programs of a stage: forward, input gradient, weight gradient, and both gradients in one program.

All values that pass between programs are explicit. If a distant stage needs a value, the stages between forward it, so
a skip connection may cross any number of stages.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import TypeAlias

from torch import fx

from ..errors import PipelineError
from ..ir import Aval, NodeInfo, collective_call, first_operand, info, operands_of, reached
from ..passes import combine_op, lying_by_themselves
from ..program import Program, view_base
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


Work: TypeAlias = tuple[int, str]  # a stage and a kind of its work


class StageBuilder:
    def __init__(self, roles: OpRoles, stage: dict[fx.Node, int], extractor: Extractor, count: int, name: str) -> None:
        self.roles, self.extractor, self.count, self.name = roles, extractor, count, name
        self.stage = dict(stage)
        self.collected = self._collected()
        self._place_the_rest()
        self.weight = self._weight_gradients()
        # by stage and kind of work: the ops, and the sums over microbatches with their summands
        self.ops = defaultdict[Work, list[fx.Node]](list)
        self.sums = defaultdict[Work, list[tuple[fx.Node, fx.Node]]](list)
        for node in filter(self.stage.__contains__, roles.of):
            self.ops[self._work_of(node)].append(node)
        for total in roles.totals:
            if (value := first_operand(total)) in self.stage and value not in self.collected:
                self.sums[self._work_of(value)].append((total, value))
        self._adding: dict[Hashable, Program] = {}
        self.needed = self._needed()
        self.sent_forward, self.sent_backward = self._crossings()

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

    def _work_of(self, node: fx.Node) -> Work:
        return self.stage[node], self._kind(node)

    def _kind(self, node: fx.Node) -> str:
        if node not in self.roles.backward:
            return "F"
        return "W" if node in self.weight else "I"

    def _weight_gradients(self) -> set[fx.Node]:
        """Return the backward ops that no other stage waits for.

        No stage waits for the first stage. There, the set contains the ops that lead to at most one sum. Cheap
        recomputed values belong to the input gradient, because their operands may be freed before the weight gradient.
        """
        leads_to: dict[fx.Node, set[object]] = {}
        for node in reversed([node for node in self.roles.of if node in self.stage and node in self.roles.backward]):
            index, found = self.stage[node], set[object]()  # two of what it leads to are enough
            for user in node.users:
                there = self.stage.get(user, index)
                if there < index:
                    found |= {"another stage", "waits"}
                elif user in leads_to and there == index:
                    found |= leads_to[user]
                elif self.roles.of.get(user) is OpRole.TOTAL:
                    found.add(user)
            if info(node).is_cheap_copy:
                found |= {"another stage", "waits"}
            leads_to[node] = found & {"another stage", "waits"} or set(itertools.islice(found, 2))
        return {node for node, led in leads_to.items() if ("waits" not in led if self.stage[node] else len(led) < 2)}

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
        """Return the operands of an op, and what the repeated ones are computed from."""
        operands = operands_of(node)
        return reached(operands, self._operands_of_repeated) if self.extractor.repeats[node] else operands

    def _operands_of_repeated(self, value: fx.Node) -> list[fx.Node]:
        return operands_of(value) if value in self.extractor.repeated and value not in self.stage else []

    def _build(self, index: int, kinds: Collection[str]) -> Stage:
        beside = self._residuals_beside(index)
        works = {kind: self._work(index, kind, beside) for kind in "FBIW" if kind == "F" or kind in kinds}
        forward, backward = tuple(self.sent_forward[index]), tuple(self.sent_backward[index])
        saved = {
            kind: frozenset(value for value in work.first.inputs if value in self.stage or value in beside)
            for kind, work in works.items()
            if kind != "F"
        }
        after_forward = frozenset(backward).union(*saved.values())
        return Stage(index, works, forward, backward, after_forward, saved.get("W", frozenset()))

    def _residuals_beside(self, index: int) -> set[fx.Node]:
        made = self.extractor.closure(self.ops[index, "F"]) & self.extractor.repeated
        made = {node for node in made if self.roles.of[node] is OpRole.LOCAL and node not in self.stage}
        backward = [*self.ops[index, "I"], *self.ops[index, "W"]] if made else []
        return {value for node in backward for value in self._operands(node) if value in made and _is_kept(value)}

    def _leaving(self, index: int, kinds: str, nodes: list[fx.Node]) -> set[fx.Node]:
        found, later = set(), set(kinds)
        for node in nodes:
            users = self.needed.get(node, {})
            if node in self.collected or any(stage != index or taken & later for stage, taken in users.items()):
                found.add(node)
        return found

    def _work(self, index: int, kind: str, beside: set[fx.Node]) -> ActionPrograms:
        parts = "IW" if kind == "B" else kind
        nodes = [node for each in parts for node in self.ops[index, each]]
        sums = [pair for each in parts for pair in self.sums.get((index, each), ())]
        leaving, given = self._leaving(index, _FOLLOWING[kind], nodes), beside
        if kind == "F":
            leaving, given = leaving | beside, set()
        outputs = sorted(leaving, key=self.extractor.position.__getitem__)
        outputs += (value for _, value in sums)
        name = f"{self.name}: stage {index}, {kind}"
        chosen = self.extractor.select(nodes, outputs, given)
        first = self.extractor.write(chosen, outputs, name)
        if not sums:
            return ActionPrograms(first, first, {})
        added = [(total, combine_op(total, self.roles.axis)) for total, _ in sums]
        following = self.extractor.write(chosen, outputs, f"{name}, adding", added)
        own, totals = lying_by_themselves(first.program), {}
        for place, (total, value) in enumerate(sums, len(outputs) - len(sums)):
            totals[total] = self._only_adding(index, total, value, place in own)
        return ActionPrograms(first, following, totals)

    def _only_adding(self, index: int, total: fx.Node, value: fx.Node, is_own: bool) -> Subprogram:
        """Return a program of a stage that adds a summand to a running sum. Equal ones are one program.

        `is_own` is whether the memory of the running sum is separate, so that it can be written in place.
        """
        add, axes = combine_op(total, self.roles.axis), self.extractor.axes
        key = (index, is_own, add, *((_without_names(each), axes.get(each)) for each in (value, total)))
        if key not in self._adding:
            name = f"{self.name}: stage {index}, sum of {info(value).aval} of {info(value).source}"
            self._adding[key] = self.extractor.write(([], [value]), [value], name, [(total, add)]).program
        return Subprogram(self._adding[key], (value, total), (value,))

    def _crossings(self) -> tuple[list[list[fx.Node]], list[list[fx.Node]]]:
        """Return, for each stage, the values that it sends to the next stage, and to the previous one."""
        forward: list[list[fx.Node]] = [[] for _ in range(self.count)]
        backward: list[list[fx.Node]] = [[] for _ in range(self.count)]
        for node in sorted(self.needed, key=self.extractor.position.__getitem__):
            made, needed = self.stage[node], self.needed[node]
            if node not in self.roles.backward:
                for index in range(made, max(needed)):
                    forward[index].append(node)
            for index in range(min(needed) + 1, made + 1):
                backward[index].append(node)
        return forward, backward


def _without_names(value: fx.Node) -> NodeInfo:
    return info(value)._replace(forward_node=None, replaced_by=None, parameters=(), used_at=None, copy=None)


def _is_kept(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return view_base(node.args[0]) is None
    return isinstance(info(node).val, Aval) and view_base(node) is None
