"""Programs of a training step, by the layout of its states and the signature of its batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from sharding_specs import Mesh, P

from ..checkpoint import tree_to_json
from ..functions import LocalFunction, PyTree, SpecTree, as_local_function
from ..ir import scalar_beside
from ..lowering import ArgumentPaths, Lowered, lower
from ..optim import Optimizer
from ..pipelines import PipelineProgram, pipeline_of
from ..requests import loss_arguments, split_state, state_requests
from ..runtime import default_runtime, device_of
from ..stateful import StatefulProgram, hollow_on
from .batches import BatchInputs
from .local_step import LocalTrainStep
from .replicas import on_replicas, replicas_of
from .step_options import StepOptions
from .train_state import StateLayout
from .weight_versions import is_asynchronous, of_one_update


class StepPrograms:
    """Programs of the step of a loss `f`, which the plan has transformed.

    Attributes:
        batch_signature: shapes of the last batch that was traced, as JSON.
    """

    def __init__(self, f: Callable[..., Any], optimizer: Optimizer, mesh: Mesh, options: StepOptions) -> None:
        self.f = as_local_function(f)
        self.optimizer, self.mesh, self.options = optimizer, mesh, options
        self.f.applied.mesh(mesh)  # raises if an axis of the plan is missing
        self.is_asynchronous = is_asynchronous(self.f.applied, mesh)
        self.requests = state_requests(self.f.applied)
        self.passed = loss_arguments(self.requests, [None] * len(self.requests))
        self.batches = BatchInputs(self.f, mesh, options.batch == "own", self.passed)
        self.replicas = replicas_of(self.f.applied, options.has_aux)
        self.compiled = StatefulProgram(
            f"train_step of {self.f.name}", "take one step, or call train.lower(state, batch), first"
        )
        self.batch_signature: Any = None
        self._warned: set[str] = set()  # parameters that are not trained

    def lower(
        self,
        layout: StateLayout,
        batch: tuple[PyTree, ...],
        shapes: Callable[[], tuple[PyTree, PyTree]],
        step: int | None = None,
    ) -> Lowered:
        """Return the program for a state layout and a batch. Replicas exchange if `step` is None, or by its number."""
        exchanges = self.replicas is not None and (step is None or (step + 1) % self.replicas.inner == 0)
        return self.compiled.lower(batch, (layout, exchanges), lambda: self._trace(layout, shapes(), batch, exchanges))

    def holding(self, layout: StateLayout, leaves: Sequence[Any], batch: PyTree) -> PipelineProgram | None:
        """Return the pipeline that determines the ranks of each leaf of a state, for a batch of this signature.

        None if all ranks hold all leaves: there is no pipeline, no batch, or each rank updates several versions.
        """
        if pipeline_of(self.f.applied) is None or batch is None or self.is_asynchronous:
            return None
        device = default_runtime(self.mesh).device or device_of(leaves)
        batch = hollow_on(self.batches.positional(batch if type(batch) is tuple else (batch,), {}), device)
        program = self.lower(layout, batch, lambda: layout.trees(hollow_on(list(leaves), device))).program
        assert isinstance(program, PipelineProgram)
        return program

    def split(self, state: PyTree) -> tuple[PyTree, list[PyTree]]:
        """Return the optimizer's part of a state, or of the replicas' states, and the leaves of each request."""
        return split_state(state if self.replicas is None else state.optimizer, self.requests)

    def _trace(
        self, layout: StateLayout, held: tuple[PyTree, PyTree], batch: tuple[PyTree, ...], exchanges: bool
    ) -> Lowered:
        self.batch_signature = tree_to_json(batch, _signature)
        (params, state), (_, state_specs) = held, layout.trees(list(layout.specs))
        more = loss_arguments(self.requests, self.split(state)[1])
        resolved = self.f.resolve((layout.layouts.as_given(params), *more, *batch), self.mesh)
        specs = resolved.arguments[1 + len(more) :]
        batch = of_one_update(self.f.applied, self.mesh, self.batches.whole(batch, specs), specs)
        key = scalar_beside(params, 0, torch.int64) if self.options.seed is not None else None
        args = (held, batch, key)
        outer = resolved.around(args, (layout.specs, specs, P() if key is not None else None))
        local, paths = self._local(layout, state_specs, exchanges), ArgumentPaths(parameters="0/0", state="0")
        return lower(local, self.mesh, args, outer, name="train_step", options=self.options, paths=paths)

    def _local(self, layout: StateLayout, state_specs: SpecTree, exchanges: bool) -> LocalFunction:
        """Return the step on a rank's shards."""
        f, has_norm = (self.f, not self.is_asynchronous) if self.replicas is None else (self.replicas.loss, False)
        step = LocalTrainStep(f, self.optimizer, self.options, has_norm, self._warned)
        if self.replicas is None:
            return step.on(layout.layouts, state_specs)
        layouts = layout.layouts
        specs = (layouts.kept, state_specs)
        return on_replicas(self.replicas, self.f.applied, layouts, partial(step.on, layouts), specs, exchanges)


def _signature(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        if leaf is None or isinstance(leaf, (bool, int, float, str)):
            return leaf
        raise TypeError("no JSON has it")
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch.")}
