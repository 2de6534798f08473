"""A stage's programs: its forward, the gradient of its input, the gradient of its weights, and both at once.

What one program makes and another takes is explicit: values of the forward that the backward needs (residuals), values
that the gradient of the input leaves for that of the weights, and what travels to the neighbouring stages. A value that
a stage further on needs is handed on by those between, so skip connections cross as many stages as they like.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, field

from torch import fx

from ..ir import Aval, info, operands_of, primitive_name
from ..passes import combine_op
from ..program import Program
from .extract import Extractor, Subprogram
from .roles import OpRole, OpRoles, PipelineError, is_view

__all__ = ["ActionPrograms", "Stage", "StageBuilder"]


_FOLLOWING = {"F": "IW", "I": "W", "W": "", "B": ""}  # per kind of work, the stage's own that comes after it


@dataclass(frozen=True, eq=False)
class ActionPrograms:
    """One kind of a stage's work on a microbatch.

    Attributes:
        first: the program; the last of its outputs are what `totals` add up.
        following: the same, and takes what has been added up so far, and adds to it; where nothing is, that program.
        totals: the sums over microbatches that the last outputs go into, in order, each with a program that only adds.
    """

    first: Subprogram
    following: Subprogram
    totals: dict[fx.Node, Subprogram]

    @property
    def programs(self) -> list[Program]:
        """All programs, each once."""
        parts = (self.first, self.following, *self.totals.values())
        return list(dict.fromkeys(part.program for part in parts))


@dataclass
class Stage:
    """A stage of the model.

    Attributes:
        index: its number.
        works: its programs, by kind of action: "F", and "I" and "W", and "B".
        sends_forward: what goes to the next stage after a forward.
        sends_backward: what goes to the stage before after a backward.
        after_forward, after_input: what is kept for the backward, and of that for the gradient of the weights.
    """

    index: int
    works: dict[str, ActionPrograms] = field(default_factory=dict)
    sends_forward: tuple[fx.Node, ...] = ()
    sends_backward: tuple[fx.Node, ...] = ()
    after_forward: frozenset[fx.Node] = frozenset()
    after_input: frozenset[fx.Node] = frozenset()

    def sends(self, kind: str) -> tuple[fx.Node, ...]:
        """What goes to a neighbour after this kind of action."""
        return {"F": self.sends_forward, "W": ()}.get(kind, self.sends_backward)

    def kept_after(self, kind: str) -> frozenset[fx.Node]:
        """What is kept of a microbatch after this kind of action."""
        return {"F": self.after_forward, "I": self.after_input}.get(kind, frozenset())


class StageBuilder:
    """Cuts the programs of every stage out of the graph of a step.

    Args:
        roles: the roles of its ops.
        stage: per staged op its stage.
        extractor: for the graph.
        count: how many stages there are.
        name: of the function, for messages.
    """

    def __init__(self, roles: OpRoles, stage: dict[fx.Node, int], extractor: Extractor, count: int, name: str) -> None:
        self.roles, self.extractor, self.count, self.name = roles, extractor, count, name
        self.stage = dict(stage)
        self.collected = self._collected()
        self._place_the_rest()
        self.members = [[n for n in self.roles.of if self.stage.get(n) == index] for index in range(count)]
        self.weight = self._weight_gradients()
        self.needed = self._needed()

    def build(self, kinds: Collection[str]) -> list[Stage]:
        """All stages, in order, with the programs for these kinds of actions."""
        return [self._build(index, kinds) for index in range(self.count)]

    @property
    def has_backward(self) -> bool:
        """Whether there is a backward to pipeline."""
        return any(node in self.roles.backward for node in self.stage)

    # --- who makes and who takes what ---

    def _collected(self) -> set[fx.Node]:
        """Values of every microbatch that are wanted side by side in the end: results per sample."""
        outputs = {
            node for node in self.roles.traced.outputs if isinstance(node, fx.Node) and node in self.roles.varying
        }
        gathered = {node.args[0] for node in self.roles.totals if primitive_name(node) == "all_gather"}
        return outputs | gathered

    def _place_the_rest(self) -> None:
        """Values that any stage could make, but only one shall: the last one adds them up."""
        for node in (*(total.args[0] for total in self.roles.totals), *self.collected):
            if node.op == "call_function":
                self.stage.setdefault(node, self.count - 1)

    def summed(self, index: int, kind: str) -> list[tuple[fx.Node, fx.Node]]:
        """The sums over microbatches that a stage's work adds to, with what it adds."""
        found = [(total, total.args[0]) for total in self.roles.totals if total.args[0] not in self.collected]
        return [(t, v) for t, v in found if self.stage.get(v) == index and self._kind(v) == kind]

    def _kind(self, node: fx.Node) -> str:
        if node not in self.roles.backward:
            return "F"
        return "W" if node in self.weight else "I"

    def _weight_gradients(self) -> set[fx.Node]:
        """Backward ops that no other stage waits for.

        The first stage has nobody to wait for it: there, ops that lead to the gradients of one sum alone. What is cheap
        to compute again belongs to the gradient of the input, which has what it takes; later there may be less.
        """
        return {n for index, members in enumerate(self.members) for n in self._weights_of(index, members)}

    def _weights_of(self, index: int, members: list[fx.Node]) -> set[fx.Node]:
        backward = [node for node in members if node in self.roles.backward]
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
        """Per staged value, per stage the kinds of work that take it."""
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

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        """What an op takes, through the ops that are repeated for it."""
        found: dict[fx.Node, None] = {}
        pending = operands_of(node)
        while pending:
            value = pending.pop()
            found.setdefault(value)
            if value not in self.stage and value.op == "call_function" and self.extractor.inline(value):
                pending += operands_of(value)
        return list(found)

    # --- one stage ---

    def _build(self, index: int, kinds: Collection[str]) -> Stage:
        beside = self._residuals_beside(index, self._of_kind(index, "F"))
        works = {kind: self._work(index, kind, beside) for kind in "FBIW" if kind == "F" or kind in kinds}
        stage = Stage(index, works)
        stage.sends_forward = self._crossing(index, index + 1, up=True)
        stage.sends_backward = self._crossing(index, index - 1, up=False)
        taken = {kind: set(work.first.inputs) for kind, work in works.items() if kind != "F"}
        stage.after_input = frozenset(self._own(taken.get("W", set()), beside))
        stage.after_forward = frozenset(self._own(set().union(*taken.values()), beside) | set(stage.sends_backward))
        return stage

    def _own(self, values: set[fx.Node], beside: set[fx.Node]) -> set[fx.Node]:
        return {value for value in values if value in self.stage or value in beside}

    def _of_kind(self, index: int, kind: str) -> list[fx.Node]:
        return [node for node in self.members[index] if self._kind(node) == kind]

    def _residuals_beside(self, index: int, forward: list[fx.Node]) -> set[fx.Node]:
        """Values of the batch alone, such as dropout's masks, that the forward computes and the backward takes too."""
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
        """What some work makes for other work: of this stage, of others, or for the end of the step."""
        found = set()
        for node in nodes:
            for stage, taken in self.needed.get(node, {}).items():
                if stage != index or taken & set(kinds):
                    found.add(node)
        return found | {node for node in nodes if node in self.collected}

    def _work(self, index: int, kind: str, beside: set[fx.Node]) -> ActionPrograms:
        """The programs of one kind; the forward makes what lies beside it for the backward, which is given it."""
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
        """What this stage hands to a neighbour: its own values and others', for that one and those behind it."""
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
    """Whether a value is worth keeping: no view; of an op with several results the results, not their tuple."""
    if node.target is operator.getitem:
        return not is_view(node.args[0])  # type: ignore[arg-type]
    return isinstance(info(node).val, Aval) and not is_view(node)
