"""Lower a function on shards to a program: trace at local shapes, type, check the results, run the passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import optree
import torch

from sharding_specs import Mesh, P, broadcast_specs, require_dims, tree_paths

from ..checker import Typing, is_zero, mismatch, record_input_specs, type_of, type_of_spec, warn_of_equal_copies
from ..collectives import State, Type, bind
from ..errors import BackendError, LayoutError, OutSpecError
from ..functions import Applied, LocalFunction, PyTree, Resolved, SpecTree, as_local_function, filled, specs_per_leaf
from ..ir import Traced, forget_rewrites, hollow, info, refuse_abstract, update_info, without_repeats
from ..ops import memory_now, refuse_idle, to_memory
from ..passes import REPEATS, Options, Settings, microbatch_splits, shard_aval
from ..pipelines import PipelineMemory, PipelineProgram, pipeline_of
from ..program import Program, RoleFinder, Watch, keep_phases, require_capturable
from ..requests import owners_of, requested_passes
from ..tracing import (
    Assumption,
    LayoutRead,
    assume,
    autocast_dtypes,
    collect_assumptions,
    require_contiguous,
    trace,
    valueless,
)
from .constants import check_static_leaves
from .host_collectives import run_on_device
from .leftovers import traced_in
from .rewrite import Rewrite

_DEFAULTS = Options()
_V, _I, _U, _O = State.VARYING, State.INVARIANT, State.UNREDUCED, State.OWNED

T = TypeVar("T")


@dataclass(frozen=True)
class ArgumentPaths:
    """Pytree paths of the arguments of a function that are parameters and state."""

    parameters: str = "0"
    state: str | None = None  # the argument that a result replaces: parameters and optimizer state
    new_state: str | None = None  # this result; by default the one at the path of the argument


@dataclass
class Lowered:
    """Lowered program, with the data that is needed to unflatten its results."""

    program: Program | PipelineProgram
    out_tree: optree.PyTreeSpec
    outputs: list[PyTree]
    assumptions: list[Assumption] = field(default_factory=list)
    layout_reads: dict[int, tuple[LayoutRead, str]] = field(default_factory=dict)  # by argument, with its path
    valueless: str = ""  # why it cannot run
    resolved: Resolved | None = None  # of a local function

    def entered(self, args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """Return the arguments as the program takes them."""
        return args if self.resolved is None else self.resolved.entered(args)

    def leaves(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the leaves of the result, with these for its tensors."""
        remaining = iter(tensors)
        return [next(remaining) if x is _TENSOR else x for x in self.outputs]

    def tensors_before(self, leaf: int) -> int:
        """Return the number of tensors among the first leaves of the result."""
        return sum(map(self.is_tensor, self.outputs[:leaf]))

    @staticmethod
    def is_tensor(output: PyTree) -> bool:
        """Return whether an entry of `outputs` represents a tensor."""
        return output is _TENSOR

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> PyTree:
        return optree.tree_unflatten(self.out_tree, self.leaves(tensors))

    def result(self, tensors: Sequence[torch.Tensor]) -> PyTree:
        """Return the result as the user takes it, with layers as stacks."""
        found = self.unflatten(tensors)
        return found if self.resolved is None else self.resolved.restacked(found)

    def require_layouts(self, tensors: Sequence[torch.Tensor], first: int = 0) -> None:
        """Check that arguments have values, and are contiguous if strides affect the function; the first is `first`.

        Also refuse a program that can be lowered but not run.
        """
        refuse_abstract(list(tensors), self.program.name)
        if self.valueless:
            raise ValueError(self.valueless)
        for index, (read, path) in self.layout_reads.items():
            if 0 <= index - first < len(tensors):
                require_contiguous(tensors[index - first], read, path)


_TENSOR = object()
UNCHECKED = object()  # for out_specs: return the results of each rank, regardless of their types


@traced_in()
def lower(
    f: Callable[..., PyTree],
    mesh: Mesh,
    args: tuple[PyTree, ...],
    specs: Resolved | tuple[SpecTree, SpecTree],
    *,
    name: str,
    options: Options = _DEFAULTS,
    paths: ArgumentPaths = ArgumentPaths(),
    watch: Watch | None = None,
) -> Lowered:
    """Trace a function on shards, type its values, check the layouts of its results and run its passes.

    `f` is a local function with its resolved layouts, or a bare function on shards with specs of its arguments and
    results. Only the shapes and dtypes of `args` are used. `watch` is told of the program after each pass.
    """
    step = _trace_step(f, mesh, args, specs, name, options, paths)
    rewritten = Rewrite(step.settings, pipeline_of(step.applied), watch).run(step.program)
    rewritten.notes += step.notes
    rewritten.requests = tuple(map(str, step.applied.requests))
    for part in rewritten.every_program() if isinstance(rewritten, PipelineProgram) else [rewritten]:
        forget_rewrites(part.traced.graph)
    if options.memory is not None:
        used = rewritten.memory()
        for rank in used.ranks if isinstance(used, PipelineMemory) else [used]:
            options.memory.require(rank)
    if isinstance(rewritten, Program) and rewritten.is_captured:
        require_capturable(name, rewritten.traced)
    return step.lowered(rewritten)


def lower_uncut(f: LocalFunction, mesh: Mesh, args: tuple[PyTree, ...], resolved: Resolved) -> tuple[Program, Settings]:
    """Lower a local function up to the cut into the stages of its pipeline."""
    step = _trace_step(f, mesh, args, resolved, f.name, _DEFAULTS, ArgumentPaths())
    Rewrite(step.settings, pipeline_of(step.applied)).on_step(step.program)
    return step.program, step.settings


@dataclass
class _TracedStep:
    """Traced and typed function, before its passes."""

    program: Program
    settings: Settings
    flat: _Flat
    assumptions: list[Assumption]
    notes: tuple[str, ...]
    why: str  # why it cannot run
    layout_reads: dict[int, tuple[LayoutRead, str]]
    applied: Applied
    resolved: Resolved | None

    def lowered(self, program: Program | PipelineProgram) -> Lowered:
        flat, reads = self.flat, self.layout_reads
        return Lowered(program, flat.out_tree, flat.outputs, self.assumptions, reads, self.why, self.resolved)


def _trace_step(
    f: Callable[..., PyTree],
    mesh: Mesh,
    args: tuple[PyTree, ...],
    specs: Resolved | tuple[SpecTree, SpecTree],
    name: str,
    options: Options,
    paths: ArgumentPaths,
) -> _TracedStep:
    check_static_leaves(args, f"{name}, arguments")
    local, in_specs, out_specs = as_local_function(f), None, None
    applied = local.applied
    wide = applied.mesh(mesh)
    if options.backend != "eager" and owners_of(applied):
        raise ValueError(
            f"{name}: in {local} one rank runs ops that the others leave out, and a compiled region has ops of both "
            "kinds; use backend='eager', or leave master= out of the plan"
        )
    if options.backend.endswith("cudagraphs") and pipeline_of(applied) is not None:
        raise BackendError(
            f"{name}: the ranks of a pipeline run several programs per step, with messages in between, and "
            "backend='cudagraphs' captures one program; use backend='eager' or backend='inductor'"
        )
    if isinstance(specs, Resolved):
        resolved = specs
        applied = replace(applied, requests=tuple(each.for_layers(specs.layers()) for each in applied.requests))
    else:
        in_specs, out_specs = specs
        leaves = optree.tree_leaves(per_argument(in_specs, args, name))
        resolved = Resolved.of(args, wide, leaves)
    splits = microbatch_splits(args, resolved.arguments, wide, applied.virtual_sizes(mesh))
    pipeline = pipeline_of(applied)
    virtual, stage_axis = (None, None) if pipeline is None else (pipeline.virtual, pipeline.axis)
    settings = Settings(wide, splits, virtual, requested_passes(applied), options, stage_axis)
    flat = _Flat(local, resolved, args, out_specs, name)
    traced, types, assumptions = _traced(flat, mesh, settings, applied)
    why = valueless(traced)
    layout_reads = {index: (read, flat.in_paths[index]) for index, read in traced.layout_reads.items()}
    _mark_inputs(traced, flat, paths, options.donate)
    flat.roles.record(traced)
    keep_phases(traced)
    run_on_device(traced)
    shapes = optree.tree_map(hollow, args)
    program = Program(
        traced,
        mesh=mesh,
        in_specs=flat.in_specs,
        out_specs=flat.out_specs,
        in_paths=flat.in_paths,
        out_paths=flat.out_paths,
        name=name,
        backend=options.backend,
        lowering=partial(lower, f, mesh, shapes, specs, name=name, options=options, paths=paths),
    )
    if out_specs is not UNCHECKED:
        _check_results(program, types, applied.axes if isinstance(specs, Resolved) else wide.axis_names)
    known = specs if isinstance(specs, Resolved) else None
    return _TracedStep(program, settings, flat, assumptions, _untrained(traced), why, layout_reads, applied, known)


class _Flat:
    """Flattened function, from a list of tensors to a list of tensors. A call stores the structure of the result.

    In `outputs`, the leaves of the result, a marker stands for each tensor. Specs and paths belong to the tensors.
    """

    out_tree: optree.PyTreeSpec
    outputs: list[PyTree]
    out_specs: list[P]
    out_paths: list[str]

    def __init__(
        self, f: LocalFunction, resolved: Resolved, args: tuple[PyTree, ...], out_specs: SpecTree, name: str
    ) -> None:
        self._f, self._resolved, self._name, self.roles = f, resolved, name, RoleFinder()
        self._out_specs = P() if out_specs is UNCHECKED else out_specs
        self._leaves, self._tree = optree.tree_flatten(args)
        self._chosen = [index for index, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors: list[torch.Tensor] = _of(self._chosen, self._leaves)
        self.in_specs: list[P] = _of(self._chosen, resolved.specs)
        self.in_paths: list[str] = _of(self._chosen, tree_paths(args))

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        record_input_specs(self.in_specs)
        entered = zip(values, self.in_specs, strict=True)
        inputs = [self.roles.moved(partial(spec.fetch, until=spec.entered()), value) for value, spec in entered]
        result, specs = self._f.run(self._resolved, *filled(self._leaves, self._chosen, inputs, self._tree))
        check_static_leaves(result, f"{self._name}, results")
        specs = specs if self._out_specs is None else self._out_specs
        leaves, self.out_tree = optree.tree_flatten(result)
        self.outputs = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        kept = [index for index, output in enumerate(self.outputs) if output is _TENSOR]
        full = broadcast_specs(specs, result, name=f"out_specs of {self._name}", what="what it returned")
        require_dims(result, full, f"the results of {self._name} (out_specs)")
        self.out_specs = _of(kept, optree.tree_leaves(full))
        self.out_paths = _of(kept, tree_paths(result))
        held = {(id(x), spec): value for x, spec, value in zip(inputs, self.in_specs, values, strict=True)}
        outputs = zip(_of(kept, leaves), self.out_specs, strict=True)
        return [
            held[id(x), spec] if (id(x), spec) in held else self.roles.moved(partial(_returned, spec), x)
            for x, spec in outputs
        ]


def _returned(spec: P, x: torch.Tensor) -> torch.Tensor:
    """Return a result as its spec says that it is stored, in the memory of its spec."""
    inside = spec.entered()
    if (memory_now(x) or inside.memory) != inside.memory:
        x = to_memory(x, inside.memory)
    return spec.store(x, since=inside)


def _of(chosen: Sequence[int], values: Sequence[T]) -> list[T]:
    return [values[index] for index in chosen]


def _traced(
    flat: _Flat, mesh: Mesh, settings: Settings, applied: Applied
) -> tuple[Traced, list[Type], list[Assumption]]:
    wide, splits = settings.mesh, settings.splits

    def checked(*values: torch.Tensor) -> list[torch.Tensor]:
        results = flat(*values)
        transforms = [words for words in applied.describe if words not in _DERIVATIVES]
        if transforms or applied.requests:  # there is a plan; it must split every axis that its constraints name
            refuse_idle(applied.axes, mesh, transforms)
        return results

    avals = [shard_aval(leaf, spec, wide, splits) for leaf, spec in zip(flat.tensors, flat.in_specs, strict=True)]
    types = [type_of_spec(spec) for spec in flat.in_specs]
    with (
        bind(wide.shape, None, {axis: each.samples for axis, each in splits.items()}),
        collect_assumptions() as assumptions,
        without_repeats() if REPEATS in settings.options.without else nullcontext(),
    ):
        assume(autocast_dtypes)
        traced = trace(checked, avals, types=types, on_node=Typing(wide.shape, flat.roles), paths=flat.in_paths)
    warn_of_equal_copies(traced, wide.shape)
    return traced, [type_of(output) for output in traced.outputs], assumptions


_DERIVATIVES = {"grad", "grad_and_value", "hessian", "vmap"}  # described in a layout, but not transforms of a plan


def _mark_inputs(traced: Traced, flat: _Flat, paths: ArgumentPaths, donate: bool) -> None:
    """Store in the info of every input whether it is a parameter, state or donated, and the result that replaces it."""
    returned = {path: index for index, path in enumerate(flat.out_paths)}
    for node, path in zip(traced.inputs, flat.in_paths, strict=True):
        is_state = paths.state is not None and _is_in(path, paths.state)
        is_parameter, new = _is_in(path, paths.parameters), paths.new_state
        update_info(
            node,
            path=path,
            is_parameter=is_parameter,
            param_path=path[len(paths.parameters) + 1 :] if is_parameter else "",
            is_state=is_state,
            donated=donate and is_state,
            updated_output=returned.get(path if not is_state or new is None else new + path[len(paths.state or "") :]),
        )


def _untrained(traced: Traced) -> tuple[str, ...]:
    untrained = [info(node) for node in traced.inputs if info(node).trained is False]
    paths = [known.param_path or known.path or "" for known in untrained]
    return (f"no gradient reaches {', '.join(paths)}",) if paths else ()


def _is_in(path: str, parent: str) -> bool:
    return f"{path}/".startswith(f"{parent}/")


def _check_results(program: Program, types: list[Type], known: Collection[str]) -> None:
    """Check that the type of every result is the type of its spec.

    Otherwise ranks would disagree on a value, or copies would be treated as shards.
    """
    wrong = []
    outputs = program.traced.outputs
    for held, spec, path, output in zip(types, program.out_specs, program.out_paths, outputs, strict=True):
        wanted = type_of_spec(spec)
        zero = is_zero(output)
        for axis in sorted({*held, *wanted}):
            if zero and wanted[axis] is _U and held[axis] is not _V:
                continue  # tangent of the gradient of an unused parameter: zeros are partial sums of zeros
            if (held[axis], wanted[axis]) == (_I, _O):
                continue  # the owner holds what all ranks hold
            if held[axis] is not wanted[axis]:
                wrong.append(f"  {path or 'the result'}: {mismatch(axis, held[axis], wanted[axis], spec, output)}")
                if (held[axis], wanted[axis]) == (_V, _I) and axis not in known:
                    wrong.append(_BY_HAND.format(axis=axis))
    if wrong:
        raise OutSpecError(f"{program.name}: results do not lie as out_specs say:\n" + "\n".join(wrong))


_BY_HAND = (
    "    no transform splits over {axis!r}, so collectives over it were written by hand; what a gradient lacks then "
    "is fp.pvary(x, {axis!r}) on what meets a value that varies; in an fp.shard_map that the plan calls it is implied"
)


def per_argument(specs: SpecTree, args: tuple[PyTree, ...], name: str) -> tuple[SpecTree, ...]:
    """Return a spec for every leaf of each argument. Specs that are not a tuple are the specs of one argument."""
    given = specs if isinstance(specs, tuple) else (specs,)
    if len(given) != len(args):
        listed = (
            "; a list is the specs of one argument that is a list: write a tuple" if isinstance(specs, list) else ""
        )
        raise LayoutError(f"in_specs has {len(given)} entries for {len(args)} arguments; give one per argument{listed}")
    return specs_per_leaf(given, args, f"in_specs of {name}")
