"""Construction of a pipeline's programs from the graph of a step over microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from sharding_specs import Mesh

from ..collectives import DimSplit
from ..errors import PipelineError
from ..functions import Applied, Request
from ..ir import first_operand, info, operands_of, reached, source_of
from ..passes import Settings, StagedOps, Unit, microbatch_dim
from ..program import Program
from ..schedules import Schedule
from .assign import assign_stages
from .cut import CutSpec, cut_of, finest
from .epilogue import EpilogueBuilder, EpiloguePlacement
from .epilogue_graph import EpilogueGraph
from .extract import Extractor
from .pipeline_program import PipelineProgram
from .prologue import Prologue, PrologueBuilder, PrologueOutput
from .roles import OpRole, OpRoles
from .stages import StageBuilder
from .structure import parts_of_rank, updates_of
from .written_state import write_in_place


@dataclass(frozen=True)
class PipelineRequest(Request):
    axis: str
    virtual: str  # the axis of microbatches
    schedule: Callable[[int], Schedule]  # for a number of ranks of the axis
    cut: CutSpec

    def on(self, mesh: Mesh) -> Schedule:
        if self.axis not in mesh.axis_names:
            raise PipelineError(
                f"{mesh!r} has no axis {self.axis!r} for the pipeline; its axes are {', '.join(mesh.axis_names)}"
            )
        return self.schedule(mesh.axis_size(self.axis))

    def without_schedule(self) -> None:
        return None

    def for_layers(self, layers: Mapping[str, int]) -> PipelineRequest:
        return replace(self, cut=replace(self.cut, lengths=layers))

    def __str__(self) -> str:
        return f"pipeline over {self.axis!r}"

    def summed_together(self, mesh: Mesh) -> int:
        schedule = self.on(mesh)
        return schedule.microbatches // updates_of(schedule)


def pipeline_of(applied: Applied) -> PipelineRequest | None:
    return applied.last(PipelineRequest)


@dataclass(frozen=True, eq=False)
class StagedStep:
    program: Program
    roles: OpRoles
    stage: dict[fx.Node, int]
    count: int  # number of stages

    def unit(self, settings: Settings) -> Unit:
        """Return the step for passes that read the stages of ops."""
        staged = StagedOps(self.stage, self.roles.backward, self._is_held, self.roles.is_inline)
        return Unit([self.program], settings, staged)

    def _is_held(self, maker: fx.Node) -> bool:
        once = maker.op != "call_function" or self.roles.of[maker] is OpRole.ONCE
        return once and not self.roles.is_inline(maker)

    def builder(self) -> StageBuilder:
        program, roles, stage = self.program, self.roles, self.stage
        nodes = dict.fromkeys(program.traced.nodes)
        for copy in [node for node in nodes if node not in roles.of]:
            roles.of[copy], stage[copy] = OpRole.STAGED, stage[info(copy).forward_node]
            roles.backward.add(copy)
            roles.varying.add(copy)
        for gone in [node for node in roles.of if node not in nodes]:
            del roles.of[gone]
            stage.pop(gone, None)
        extractor = Extractor(program.traced, program.mesh, program.in_specs, roles.is_inline, roles.axis)
        return StageBuilder(roles, stage, extractor, self.count, program.name)


def finest_stages(program: Program, axis: str, inlined: set[fx.Node]) -> StagedStep:
    roles = OpRoles(program.traced, axis, program.in_specs, inlined)
    cut, count = finest(program.traced, roles, program.mesh)
    return StagedStep(program, roles, assign_stages(program.traced, roles, cut, count - 1), count)


def stages_of(program: Program, plan: PipelineRequest, inlined: set[fx.Node]) -> StagedStep:
    roles = OpRoles(program.traced, plan.virtual, program.in_specs, inlined)
    count = plan.on(program.mesh).depth
    cut = cut_of(program.traced, roles, plan.cut, count, program.mesh)
    return StagedStep(program, roles, assign_stages(program.traced, roles, cut, count - 1), count)


def build(staged: StagedStep, plan: PipelineRequest, parts: DimSplit) -> PipelineProgram:
    """Build the programs of a pipeline. No pass has run on them."""
    return _PipelineBuilder(staged.program, plan, parts, staged.roles, staged.builder()).result()


class _PipelineBuilder:
    def __init__(
        self, program: Program, plan: PipelineRequest, parts: DimSplit, roles: OpRoles, builder: StageBuilder
    ) -> None:
        self.program, self.plan, self.parts, self.roles, self.builder = program, plan, parts, roles, builder
        self.traced, self.extractor = program.traced, builder.extractor
        self.schedule = plan.on(program.mesh)
        self.cut_dims = {
            node: microbatch_dim(spec, plan.virtual, str(info(node).path))
            for node, spec in zip(self.traced.inputs, program.in_specs, strict=True)
            if node in self.roles.varying
        }
        self.written: dict[fx.Node, fx.Node] = {}
        if not self.builder.has_backward:
            self.schedule = _forward_only(self.schedule)
            if parts.is_even and self.schedule.chains == 1:
                self.written = write_in_place(roles, builder.stage)
                builder.collected -= self.written.keys()

    def result(self) -> PipelineProgram:
        stages = self.builder.build({action.kind for action in self.schedule})
        ranks = range(self.schedule.ranks)
        parts = [list(parts_of_rank(stages, self.schedule, rank)) for rank in ranks]
        taken = [{node for part in each for node in part.inputs} for each in parts]
        graph = EpilogueGraph(self.roles, self.extractor, self.program, self.parts, self.schedule.chains, self.written)
        used, apart = [self._inputs_below(each) for each in taken], self.schedule.versions is not None
        placing = EpiloguePlacement(graph, self._ranks_of_total, self._rank_of_collected, used, apart)
        epilogue = EpilogueBuilder(graph, placing, self.program.name).build()
        late = [given.node for given in epilogue.given.values() if given.kind == "once"]
        prologues = [self._prologue(rank, {*taken[rank], *late}) for rank in ranks]
        hidden = {self.plan.virtual}
        result = PipelineProgram(
            self.plan.axis,
            self.schedule,
            stages,
            prologues,
            epilogue,
            list(self.traced.inputs),
            frozenset(self.builder.collected),
            self.cut_dims,
            mesh=self.program.mesh,
            in_specs=[spec.without(hidden) for spec in self.program.in_specs],
            out_specs=[spec.without(hidden) for spec in self.program.out_specs],
            in_paths=self.program.in_paths,
            out_paths=self.program.out_paths,
            name=self.program.name,
            passes=self.program.passes,
            notes=(*self.program.notes, *self._notes()),
            lowering=self.program.lowering,
        )
        result.notes += self._moved(result)
        if self.schedule.versions is not None:
            _check_stream(result)
            self._check_means(result)
        return result

    def _moved(self, result: PipelineProgram) -> tuple[str, ...]:
        """Return a note of the parameters that no rank of their stage in `stages=` of `fp.pipeline` uses."""
        wanted = {node: self.plan.cut.stage_of(info(node).param_path) for node in result.inputs}
        moved = [
            f"{info(node).param_path} (stage {stage})"
            for node, stage in wanted.items()
            if stage is not None and info(node).is_parameter
            if result.holders(node).isdisjoint(self._ranks_of_stage(stage))
        ]
        return (f"used on other stages than theirs: {', '.join(moved)}",) if moved else ()

    def _check_means(self, result: PipelineProgram) -> None:
        """Check that results of an asynchronous pipeline have a mean, because it returns means over its updates."""
        epilogue = result.epilogue
        for node, spec, path in zip(epilogue.outputs, self.program.out_specs, self.program.out_paths, strict=True):
            if not isinstance(node, fx.Node) or node in epilogue.replaces:
                continue
            per_sample, dtype = self.plan.virtual in spec.axes, info(node).aval.dtype
            if per_sample or not (dtype.is_floating_point or dtype.is_complex):
                why = "has a value per sample" if per_sample else f"is of {dtype}, which has no mean"
                raise PipelineError(
                    f"{source_of(node)}: {result.schedule.name} reports means over its updates, but {path!r} {why}: "
                    "return a floating mean of it, or take a synchronous schedule"
                )

    def _notes(self) -> tuple[str, ...]:
        mesh, axis = self.program.mesh, self.plan.virtual
        for node, spec in zip(self.traced.inputs, self.program.in_specs, strict=True):
            if node in self.cut_dims:
                dim = self.cut_dims[node]
                ranks = mesh.axis_size(tuple(each for each in spec.dim_axes()[dim] if each != axis))
                each, count = info(node).aval.shape[dim], self.schedule.microbatches
                whole = self.parts.whole(each) * (count // self.parts.ranks) * ranks
                return (
                    f"a batch of {whole} = {_lengths(self.parts, each)} per microbatch · {count} microbatches · "
                    f"{ranks} data rank{'s' if ranks > 1 else ''}",
                )
        return ()

    def _ranks_of_total(self, total: fx.Node) -> list[int]:
        return self._ranks_of_stage(self.builder.stage[first_operand(total)])

    def _ranks_of_stage(self, stage: int) -> list[int]:
        depth = self.schedule.depth
        return [self.schedule.rank_of_stage[chain * depth + stage] for chain in range(self.schedule.chains)]

    def _rank_of_collected(self, node: fx.Node, microbatch: int) -> int:
        chain = microbatch // self.schedule.microbatches_of_chain
        return self._ranks_of_stage(self.builder.stage[node])[chain]

    def _prologue(self, rank: int, taken: set[fx.Node]) -> Prologue:
        wanted: list[PrologueOutput] = []
        for node in sorted(taken, key=self.extractor.position.__getitem__):
            scope = self.roles.scope(node)
            if scope == "once":
                wanted.append((node, None))
            elif scope == "microbatch":
                wanted += [(node, microbatch) for microbatch in self._microbatches_of(rank)]
        inputs, in_specs = self._inputs_below({node for node, _ in wanted}), self.program.in_specs
        builder = PrologueBuilder(self.roles, self.extractor, in_specs, self.parts, inputs, wanted)
        return builder.build(f"{self.program.name}: before the pipeline, rank {rank}")

    def _microbatches_of(self, rank: int) -> list[int]:
        depth, each = self.schedule.depth, self.schedule.microbatches_of_chain
        chains = sorted({action.stage // depth for action in self.schedule.actions[rank]})
        return [chain * each + microbatch for chain in chains for microbatch in range(each)]

    def _inputs_below(self, taken: set[fx.Node]) -> set[fx.Node]:
        outside = (node for node in taken if self.roles.scope(node) != "stage")
        return {node for node in reached(outside, operands_of) if node.op == "placeholder"}


def _lengths(parts: DimSplit, each: int) -> str:
    if parts.is_even:
        return f"{each}"
    sample, short = each // parts.rows, parts.ranks - parts.full
    return f"{each} ({(parts.rows - 1) * sample} in the last {short if short > 1 else 'one'})"


def _check_stream(program: PipelineProgram) -> None:
    crossing = next((exchange.node for level in program.epilogue.exchanges for exchange in level), None)
    if crossing is not None or len(program.epilogue.parts) > 1:
        where = "" if crossing is None else f"{source_of(crossing)}: "
        raise PipelineError(
            f"{where}{program.schedule.name} updates each stage by itself, but this update needs several: a global "
            "gradient norm (clip, a loss scale) or a shared weight; leave it out, or take a synchronous schedule"
        )


def _forward_only(schedule: Schedule) -> Schedule:
    rows = tuple(tuple(action for action in row if action.kind == "F") for row in schedule.actions)
    return replace(schedule, actions=rows, pairs=frozenset(), name=f"{schedule.name}, forward only")
