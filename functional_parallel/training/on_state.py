"""Functions of the parameters of a training state, such as evaluation and generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from sharding_specs import P, SpecError, tree_paths

from ..functions import LocalFunction, PyTree, Resolved, SpecTree, as_local_function, relayout_leaf
from ..ir import leaf_signature, with_short_tracebacks
from ..lowering import Lowered, lower
from ..passes import Options
from ..pipelines import PipelineProgram, pipeline_of
from ..program import Explanation, PassTable, Program
from ..runtime import copy_if_aliased, moved_to, refuse_asynchronous, storages
from ..tracing import ProgramCache, disable_ambient_modes
from .batches import BatchInputs, tensors_of
from .signatures import listed, structure_as_text
from .state import StateLayout, StaticLeaf, TrainState
from .states import StateManager
from .update import as_trained, at_rest


class StateFunction:
    """Function compiled for the states of a step; see `TrainStep.compile`. `program` is the last one used."""

    def __init__(self, train: StateManager, f: Callable[..., Any], batch: str | None = None, ema: bool = False) -> None:
        batch = train.options.batch if batch is None else batch
        if batch not in ("global", "own"):
            raise ValueError(f"train_step.compile(batch={batch!r}): it is 'global' or 'own', by default the step's")
        self.train, self.f, self.ema = train, as_local_function(f), ema
        self.f.layout.mesh(train.mesh)
        refuse_asynchronous(self.f, train.mesh)
        _require_alike_pipelines(self.f, train.f)
        self.batches = BatchInputs(self.f, train.mesh, batch == "own", train.passed)
        self.program: Program | PipelineProgram | None = None
        self._lowered: dict[StateLayout, ProgramCache[Lowered]] = {}

    @with_short_tracebacks
    def __call__(self, state: TrainState, *batch: PyTree, **named: PyTree) -> PyTree:
        """Call the function on a state's parameters and a batch. Return full tensors. Every process must call it."""
        form, runtime = self.train.known_form(state), self.train.runtime_for(state)
        batch = self.batches.by_place(batch, named)
        self.batches.stay_in_step(runtime, f"calls {self.f.name} on the state of step {state.step}", batch)
        taken = optree.tree_leaves(self._taken(form, range(len(state.handles))))
        handles = [state.handles[index] for index in taken if not isinstance(state.handles[index], StaticLeaf)]
        lowered = self._lower(form, state, moved_to(runtime.device, batch))
        lowered.require_layouts(tensors_of(batch), len(handles))
        extra, shown = self.batches.entered(runtime, lowered.program, self.f.name, batch)
        held, specs = storages(*handles), lowered.program.out_specs  # a later step writes into the state's memory
        with disable_ambient_modes():
            results = runtime.run(lowered.program, [*handles, *extra], shown, state.whose)
        whole = [copy_if_aliased(runtime.whole(x, spec), held) for x, spec in zip(results, specs, strict=True)]
        return lowered.result(whole)

    @with_short_tracebacks
    def lower(self, state: TrainState, *batch: PyTree, **named: PyTree) -> Program | PipelineProgram:
        """Return the program for these arguments, without running it."""
        return self._lower(self.train.known_form(state), state, self.batches.by_place(batch, named)).program

    def explain(self, *, group: str = "line", casts: bool = False) -> Explanation | PassTable:
        """Return every collective of the program used last: kind, axis, count, bytes, source line."""
        if self.program is None:
            raise ValueError(f"{self.f.name} has not run yet: call it, or call .lower(state, batch), first")
        return self.program.explain(group=group, casts=casts)

    def __repr__(self) -> str:
        return f"compile({self.f}, {self.train.mesh!r})"

    # --- the program ---

    def _lower(self, form: StateLayout, state: TrainState, batch: tuple[PyTree, ...]) -> Lowered:
        leaves, tree = optree.tree_flatten(batch)
        programs = self._lowered.setdefault(form, ProgramCache(self.f.name))
        lowered = programs.get((tree, tuple(map(leaf_signature, leaves))), lambda: self._trace(form, state, batch))
        self.program = lowered.program
        return lowered

    def _taken(self, form: StateLayout, leaves: Sequence[Any]) -> tuple[PyTree, ...]:
        """Return the arguments before the batch, from the leaves of a state: parameters, or averages, and buffers."""
        params, state = form.trees(list(leaves))
        params, *more = self.train.arguments(params, state)
        return (self.train.average(self.train.split(state)[0]) if self.ema else params, *more)

    def _trace(self, form: StateLayout, state: TrainState, batch: tuple[PyTree, ...]) -> Lowered:
        held, places = self.train.shapes(form, state), form.places.in_compute()
        params, *more = self._taken(form, optree.tree_leaves(held))
        resolved = self.f.resolve((places.as_given(held[0]), *more, *batch), self.train.mesh)
        compute = optree.tree_map(P.in_compute, self._compute_specs(resolved, held[0], form))
        specs = resolved.arguments[1 + len(more) :]
        args = (params, *more, *self.batches.whole(batch, specs))
        kept, *_ = self._taken(form, list(form.specs))
        layouts = resolved.around(args, (kept, *resolved.arguments[1:]))

        def call(resolved: Resolved, taken: PyTree, *batch: PyTree) -> tuple[PyTree, SpecTree]:
            if self.ema:  # lies like the state of the update
                taken = places.packing.unpack(optree.tree_map(relayout_leaf, taken, places.update, places.whole))
            reduced = optree.tree_map(relayout_leaf, taken, optree.tree_map(at_rest, compute), compute)
            return self.f.run(resolved.inside, optree.tree_map(as_trained, reduced, places.params), *batch)

        given = self.train.options
        backend = "inductor" if given.backend.startswith("inductor") else "eager"  # a graph would copy the parameters
        options = Options(bucket=given.bucket, without=given.without, backend=backend)
        return lower(self.f.then(call), self.train.mesh, args, layouts, name=self.f.name, options=options)

    def _compute_specs(self, resolved: Resolved, params: PyTree, form: StateLayout) -> SpecTree:
        """Return the function's compute layout of the parameters, after a check that it matches the state's."""
        trees = [optree.tree_structure(each) for each in (params, resolved.args[0])]
        if trees[0] != trees[1]:
            held, taken = map(structure_as_text, trees)
            raise ValueError(
                f"train_step.compile: parameters lie as {held} in the state, as {taken} for {self.f}: of a pipeline "
                "take the step's own plan, or one with the same stacks of layers"
            )
        found = zip(tree_paths(params), optree.tree_leaves(params), form.specs, resolved.specs, strict=False)
        wrong = [
            f"{path or 'the parameters'}: {lies!r} in the state, {at_rest(taken)!r} for {self.f.name}"
            for path, leaf, lies, taken in found
            if isinstance(leaf, torch.Tensor) and at_rest(taken) != lies
        ]
        if wrong:
            raise SpecError(
                f"{self.f} takes parameters that lie otherwise than the state's do:\n  "
                + "\n  ".join(listed(wrong))
                + f"\nGive what the step's plan makes of the function, as train.compile(plan({self.f.name}))"
            )
        return resolved.arguments[0]


def _require_alike_pipelines(f: LocalFunction, loss: LocalFunction) -> None:
    plans = [pipeline_of(each.layout) for each in (loss, f)]
    axes = [None if plan is None else plan.axis for plan in plans]
    if axes[0] != axes[1]:
        of_loss, of_f = ("no pipeline" if axis is None else f"a pipeline over {axis!r}" for axis in axes)
        raise ValueError(
            f"train_step.compile: the step's plan has {of_loss}, that of {f} has {of_f}: give what the step's plan "
            f"makes of the function, as train.compile(plan({f.name}))"
        )
