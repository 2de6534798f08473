"""Functions of the parameters of a training state, such as evaluation and generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from sharding_specs import P, SpecError, tree_paths

from ..functions import LocalFunction, PyTree, Resolved, SpecTree, as_local_function, relayout_leaf
from ..ir import with_short_tracebacks
from ..lowering import Lowered, lower
from ..passes import Options
from ..pipelines import PipelineProgram, pipeline_of
from ..program import Explanation, PassTable, Program
from ..runtime import moved_to, refuse_asynchronous, storages
from ..stateful import StatefulProgram, StaticLeaf, at_rest, listed, structure_as_text, tensors_of
from .batches import BatchInputs
from .states import States
from .train_state import StateLayout, TrainState
from .update import as_trained


class StateFunction:
    """Function compiled for the states of a step; see `TrainStep.compile`."""

    def __init__(self, states: States, f: Callable[..., Any], batch: str | None = None, ema: bool = False) -> None:
        batch = states.options.batch if batch is None else batch
        if batch not in ("global", "own"):
            raise ValueError(f"train_step.compile(batch={batch!r}): it is 'global' or 'own', by default the step's")
        self.states, self.f, self.ema = states, as_local_function(f), ema
        self.f.applied.mesh(states.mesh)
        refuse_asynchronous(self.f, states.mesh)
        _require_alike_pipelines(self.f, states.f)
        self.batches = BatchInputs(self.f, states.mesh, batch == "own", states.programs.passed)
        self.compiled = StatefulProgram(self.f.name, "call it, or call .lower(state, batch), first")

    @property
    def program(self) -> Program | PipelineProgram | None:
        """The last program used; None before the first call."""
        return self.compiled.program

    @with_short_tracebacks
    def __call__(self, state: TrainState, *batch: PyTree, **named: PyTree) -> PyTree:
        """Call the function on a state's parameters and a batch. Return full tensors. Every process must call it."""
        layout, runtime = self.states.known_layout(state), self.states.runtime_for(state)
        batch = self.batches.positional(batch, named)
        self.batches.stay_in_step(runtime, f"calls {self.f.name} on the state of step {state.step}", batch)
        taken = optree.tree_leaves(self._taken(layout, range(len(state.handles))))
        handles = [state.handles[index] for index in taken if not isinstance(state.handles[index], StaticLeaf)]
        lowered = self._lower(layout, state, moved_to(runtime.device, batch))
        lowered.require_layouts(tensors_of(batch), len(handles))
        extra, shown = self.batches.entered(runtime, lowered.program, self.f.name, batch)
        kept = storages(*handles)
        return lowered.result(self.compiled.run(runtime, lowered, [*handles, *extra], shown, state.whose, kept=kept))

    @with_short_tracebacks
    def lower(self, state: TrainState, *batch: PyTree, **named: PyTree) -> Program | PipelineProgram:
        """Return the program for these arguments, without running it."""
        return self._lower(self.states.known_layout(state), state, self.batches.positional(batch, named)).program

    def explain(self, *, group: str = "line", casts: bool = False) -> Explanation | PassTable:
        """Return every collective of the program used last: kind, axis, count, bytes, source line."""
        return self.compiled.explain(group, casts)

    def __repr__(self) -> str:
        return f"compile({self.f}, {self.states.mesh!r})"

    # --- the program ---

    def _lower(self, layout: StateLayout, state: TrainState, batch: tuple[PyTree, ...]) -> Lowered:
        return self.compiled.lower(batch, layout, lambda: self._trace(layout, state, batch))

    def _taken(self, layout: StateLayout, leaves: Sequence[Any]) -> tuple[PyTree, ...]:
        """Return the arguments before the batch, from the leaves of a state: parameters, or averages, and buffers."""
        params, state = layout.trees(list(leaves))
        params, *more = self.states.arguments(params, state)
        return (self.states.average(self.states.split(state)[0]) if self.ema else params, *more)

    def _trace(self, layout: StateLayout, state: TrainState, batch: tuple[PyTree, ...]) -> Lowered:
        held, layouts = self.states.shapes(layout, state), layout.layouts.entered()
        params, *more = self._taken(layout, optree.tree_leaves(held))
        resolved = self.f.resolve((layouts.as_given(held[0]), *more, *batch), self.states.mesh)
        compute = optree.tree_map(P.in_compute, self._compute_specs(resolved, held[0], layout))
        specs = resolved.arguments[1 + len(more) :]
        args = (params, *more, *self.batches.whole(batch, specs))
        kept, *_ = self._taken(layout, list(layout.specs))
        outer = resolved.around(args, (kept, *resolved.arguments[1:]))

        def call(resolved: Resolved, taken: PyTree, *batch: PyTree) -> tuple[PyTree, SpecTree]:
            if self.ema:  # lies like the state of the update
                taken = layouts.packing.unpack(optree.tree_map(relayout_leaf, taken, layouts.update, layouts.whole))
            reduced = optree.tree_map(relayout_leaf, taken, optree.tree_map(at_rest, compute), compute)
            return self.f.run(resolved.inside, optree.tree_map(as_trained, reduced, layouts.params), *batch)

        given = self.states.options
        backend = "inductor" if given.backend.startswith("inductor") else "eager"  # a graph would copy the parameters
        options = Options(bucket=given.bucket, without=given.without, backend=backend)
        return lower(self.f.then(call), self.states.mesh, args, outer, name=self.f.name, options=options)

    def _compute_specs(self, resolved: Resolved, params: PyTree, layout: StateLayout) -> SpecTree:
        """Return the function's compute layout of the parameters, after a check that it matches the state's."""
        trees = [optree.tree_structure(each) for each in (params, resolved.args[0])]
        if trees[0] != trees[1]:
            held, taken = map(structure_as_text, trees)
            raise ValueError(
                f"train_step.compile: parameters lie as {held} in the state, as {taken} for {self.f}: of a pipeline "
                "take the step's own plan, or one with the same stacks of layers"
            )
        found = zip(tree_paths(params), optree.tree_leaves(params), layout.specs, resolved.specs, strict=False)
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
    plans = [pipeline_of(each.applied) for each in (loss, f)]
    axes = [None if plan is None else plan.axis for plan in plans]
    if axes[0] != axes[1]:
        of_loss, of_f = ("no pipeline" if axis is None else f"a pipeline over {axis!r}" for axis in axes)
        raise ValueError(
            f"train_step.compile: the step's plan has {of_loss}, that of {f} has {of_f}: give what the step's plan "
            f"makes of the function, as train.compile(plan({f.name}))"
        )
