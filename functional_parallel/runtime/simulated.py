"""Every rank of a mesh in one process, in lockstep, by the differentiable collectives of `collectives.reference`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from sharding_specs import Mesh, P, shard_leaf, unshard_leaf, whole_shape

from .. import _torch
from ..collectives import CollectiveCall, reference
from ..ir import collective_call, hollow, operands_of
from ..program import Program, mutated_operands
from .classes import Jobs, RankClasses
from .execution import CapturedFunction, Log, Origin, Recorded, Writer, with_regions
from .interface import Runtime, Where

SimulatedValue = list[torch.Tensor]


class SimulatedRuntime(Runtime[SimulatedValue, Program]):
    """Runs programs on simulated ranks. A handle is a list of tensors, one per class of ranks."""

    holders = "simulated ranks"
    is_simulated = True

    def __init__(self, mesh: Mesh, *, deduplicate: bool = True) -> None:
        self.mesh = mesh
        self.classes = RankClasses(mesh, deduplicate)

    def shard(self, x: torch.Tensor, spec: P) -> SimulatedValue:
        ranks = self.classes.representatives(self.classes.of_spec(spec))
        everywhere = spec.replace(owner={})  # a value of one rank is computed once, like one that all ranks hold
        return [shard_leaf(x, everywhere, self.mesh, rank) for rank in ranks]

    def whole(self, handle: SimulatedValue, spec: P, whose: str = "") -> torch.Tensor:
        axes = self.classes.of_spec(spec)
        return unshard_leaf([handle[self.classes.index(rank, axes)] for rank in self.mesh.ranks], spec, self.mesh)

    def shard_of(self, handle: SimulatedValue, spec: P, rank: int) -> torch.Tensor:
        return spec.fetch(handle[self.classes.index(rank, self.classes.of_spec(spec))])

    def assemble(self, spec: P, where: Where, shard: Callable[[int], torch.Tensor]) -> SimulatedValue:
        ranks = self.classes.representatives(self.classes.of_spec(spec))
        return [shard(self.mesh.rank({**self.mesh.coordinates(rank), **spec.owner})) for rank in ranks]

    def like(self, handle: SimulatedValue, spec: P) -> torch.Tensor:
        return hollow(handle[0], whole_shape(handle[0].shape, spec, self.mesh))

    def declared(self, handle: SimulatedValue, made: P, spec: P) -> SimulatedValue:
        wanted, held = self.classes.of_spec(spec), self.classes.of_spec(made)
        return handle if wanted == held else [handle[index] for index in self.classes.picks(wanted, held)]

    def run(
        self, program: Program, handles: list[SimulatedValue], batch: Sequence[torch.Tensor] = (), whose: str = ""
    ) -> list[SimulatedValue]:
        may_be = torch.is_grad_enabled() or _torch.is_inside_transform()
        differentiable = may_be and any(_torch.has_functorch_level(handle) for handle in handles)
        key = f"simulated {self.classes.deduplicate} {differentiable}"
        if key not in program.cache:
            with _torch.disable_functorch():  # else constants would belong to the transform, in later calls too
                function = _Lockstep(program, self.classes, differentiable).function()
            is_captured = program.is_captured and not differentiable
            program.cache[key] = CapturedFunction(program, function) if is_captured else function
        run: Callable[[list[SimulatedValue]], list[SimulatedValue]] = program.cache[key]
        if differentiable:
            return run(handles)
        with torch.no_grad():
            return run(handles)

    def replay(self, program: Program, handles: list[SimulatedValue]) -> Origin | None:
        log = Log()
        self.run_recorded(log, program, handles)
        return log.first

    def run_recorded(self, log: Log, program: Program, handles: list[SimulatedValue]) -> list[SimulatedValue]:
        lockstep = _Lockstep(program, self.classes, differentiable=False, record=True)
        assert lockstep.record is not None
        return lockstep.record.run(lockstep.function(), handles, log)

    def run_whole(self, program: Program, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        handles = [self.shard(x, spec) for x, spec in zip(tensors, program.in_specs, strict=True)]
        results = self.run(program, handles)
        return [self.whole(handle, spec) for handle, spec in zip(results, program.out_specs, strict=True)]


class _Lockstep:
    def __init__(self, program: Program, classes: RankClasses, differentiable: bool, record: bool = False) -> None:
        self.program, self.classes, self.mesh = program, classes, classes.mesh
        self.axes: dict[fx.Node, frozenset[str]] = {}
        self.traced = program.traced
        self.record = Recorded(program.traced, self._ranks) if record else None
        if program.is_compiled and not differentiable and not record:
            self.traced = with_regions(program).traced
        self.writer = Writer(self.traced, self.line, differentiable, record=self.record, recorded=program.is_captured)
        for node, spec in zip(self.traced.inputs, program.in_specs, strict=True):
            self.axes[node] = classes.of_spec(spec)
        for node in self.traced.graph.nodes:
            if node.op == "get_attr":
                self.axes[node] = classes.of_spec(P())
            elif node.op == "call_function":
                # A mutated operand is overwritten once per class.
                decisive = mutated_operands(node) or operands_of(node)
                self.axes[node] = classes.of_node(node, (self.axes[operand] for operand in decisive))

    def function(self) -> Callable[..., Any]:
        copies = len(self.classes.representatives(self.classes.of_spec(P())))
        run = self.writer.function(wrap_constant=lambda x: [x] * copies)
        wanted = [self.classes.of_spec(spec) for spec in self.program.out_specs]
        held = [self.axes[out] for out in self.traced.outputs]
        if wanted == held:
            return run
        picks = [self.classes.picks(a, b) for a, b in zip(wanted, held, strict=True)]
        return lambda inputs: [[x[i] for i in pick] for x, pick in zip(run(inputs), picks, strict=True)]

    def line(self, node: fx.Node, writer: Writer) -> str:
        if (call := collective_call(node)) is not None:
            return self._collective(node, call, writer)
        operands = operands_of(node)
        ranks = self._ranks(node)
        if len(ranks) == 1:
            return f"[{self._call(node, writer, lambda n: f'{writer.names[n]}[0]')}]"
        if not operands:
            return f"[{self._call(node, writer, str)} for _ in range({len(ranks)})]"
        aligned = [operand for operand in operands if self.axes[operand] == self.axes[node]]
        if len(aligned) == len(operands) == 1:
            text = self._call(node, writer, lambda n: "a")
            return f"[{text} for a in {writer.names[operands[0]]}]"
        picks = [self.classes.picks(self.axes[node], self.axes[operand]) for operand in operands]
        table = writer.constant(list(zip(*picks, strict=True)))
        letters = {operand: f"{writer.names[operand]}[i{index}]" for index, operand in enumerate(operands)}
        indices = ", ".join(f"i{index}" for index in range(len(operands)))
        comma = "," if len(operands) == 1 else ""
        return f"[{self._call(node, writer, letters.__getitem__)} for {indices}{comma} in {table}]"

    def _call(self, node: fx.Node, writer: Writer, text: Callable[[fx.Node], str]) -> str:
        if node.target is operator.getitem:
            return f"{text(node.args[0])}[{node.args[1]}]"
        return writer.call(node, text)

    def _ranks(self, node: fx.Node) -> list[int]:
        return self.classes.representatives(self.axes[node])

    def _collective(self, node: fx.Node, call: CollectiveCall, writer: Writer) -> str:
        if call.kind == "axis_index":
            indices = [self.mesh.axis_index(rank, call.axes) for rank in self._ranks(node)]
            return writer.constant([torch.tensor(index, device="cpu") for index in indices])
        operand = writer.names[call.operand]
        if call.kind == "pcast":
            return f"[{writer.op(torch.ops.aten.alias.default)}(a) for a in {operand}]"
        if self.mesh.axis_size(call.axes) == 1 and call.kind != "ppermute":  # a ppermute that sends nothing gives zeros
            return f"list({operand})"
        jobs = self.classes.jobs(call.axes, self.axes[node], self.axes[call.operand])
        perform = functools.partial(_perform, replace(call, operand=None), jobs, len(self._ranks(node)))
        return f"{writer.constant(perform)}({operand})"


def _perform(call: CollectiveCall, jobs: Jobs, count: int, x: SimulatedValue) -> SimulatedValue:
    results: list[Any] = [None] * count
    for inputs, outputs in jobs:
        values = reference.apply_reference(call, [x[index] for index in inputs])
        for member, position in outputs:
            results[position] = values[member]
    return results
