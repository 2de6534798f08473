"""Training step that is sharded by a plan: gradient, clipping and optimizer in one program."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields, replace
from typing import Any

import torch

from sharding_specs import Mesh

from .. import random
from ..functions import PyTree, applied_to, explain_keywords
from ..ir import with_short_tracebacks
from ..lowering import Lowered
from ..optim import Optimizer, counted_on_host, rates
from ..passes import pass_names
from ..pipelines import PipelineProgram
from ..program import Explanation, Memory, PassTable, Program
from ..requests import flat_update
from ..runtime import Origin, check_backend, device_of, moved_to, note_step, to_device
from ..stateful import StaticLeaf, copied, tensors, tensors_of
from ..tracing import disable_ambient_modes
from .finite import require_finite, require_finite_inputs
from .kept_states import KeptStates
from .local_step import Metrics
from .on_state import StateFunction
from .states import States
from .step_options import StepOptions, require_arguments, with_buffers
from .step_programs import StepPrograms
from .train_state import StateLayout, TrainState, recorded_steps
from .update import require_declared
from .weight_versions import is_asynchronous


@explain_keywords
def train_step(
    loss: Callable[..., Any],
    optimizer: Optimizer,
    mesh: Mesh,
    plan: Callable[..., Any] | None = None,
    *,
    clip: float | None = None,
    seed: int | None = None,
    has_aux: bool = False,
    batch: str = "global",
    bucket: int | str | None = "auto",
    reduction: str = "fast",
    donate: bool = True,
    nonfinite: str = "error",
    without: Collection[str] = (),
    backend: str = "eager",
    buffers: dict[str, PyTree] | None = None,
    memory: Memory | None = None,
) -> TrainStep:
    """Build a training step with gradient, clipping and optimizer, sharded by the plan.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh, P
    >>> def loss(w, x):
    ...     return ((x @ w - 1) ** 2).mean()
    >>> train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), fp.zero(3, "data"))
    >>> state = train.init(torch.zeros(2))
    >>> for _ in range(50):
    ...     state, metrics = train(state, torch.eye(2))
    >>> train.params(state).round(decimals=1)
    tensor([1., 1.])

    Args:
        loss: `loss(params, *batch) -> scalar`, the mean over the global batch; or `(scalar, aux)` with `has_aux`.
        optimizer: from `fp.optim`, or another `fp.optim.Optimizer`, elementwise or with `specs`.
        mesh: the mesh.
        plan: a transform or a chain of transforms. Without it nothing is sharded.
        clip: bound on the gradient's global norm.
        seed: seed of the key for `fp.random` and dropout. Each step uses a different key.
        has_aux: whether the loss returns `(scalar, aux)`.
        batch: "global" if every rank passes the full batch and slices its shard, "own" if each process passes the batch
            of its own ranks, as `fp.Sampler` reads it. That is one rank's shard on a real process, and the global
            batch in a simulated run. `even_batches` makes unequal shards equal.
        bucket: bytes of gradients, or of gathered parameters of a layer, per collective. "auto" sends a quarter of all
            gradients, between 1 and 25 MiB, and gathers the parameters of one layer. None uses one collective per
            tensor.
        reduction: on real processes, "fast" for sums in any order, "ordered" for sums in rank order. Ordered sums
            are bitwise equal to the sums of simulated ranks and of every ZeRO stage.
        donate: whether a step may write the new state into the memory of the old one. Use of the old state then raises
            an error; `train.copy(state)` keeps a copy. Without donation a step holds both states.
        nonfinite: "error" raises after a step with a NaN or infinite loss or gradient norm. If the values are in main
            memory, that step raises. On a device the next step raises, so the host does not wait. A step that a
            loss scale skips is legal. "continue" trains on.
        without: passes to switch off, one name or several, as listed by `program.passes`.
        backend: backend of the computation between collectives, "eager" or "inductor", as for `fp.compile`.
        buffers: the first buffers, such as the running statistics of batch norms; a dict of tensors. They become a part
            of the state, replicated: `loss(params, buffers, *batch) -> (scalar, new_buffers)`, or
            `(scalar, (new_buffers, aux))` with `has_aux`. A step that a loss scale skips keeps the new ones.
        memory: budget of each memory of a rank. A step with a predicted peak above it is refused by a
            `BudgetError` before it runs. By default there is none.

    Returns:
        The step: `state = train.init(params)`, `state, metrics = train(state, *batch)`, `train.params(state)`.
    """
    check_backend(backend)
    require_arguments(loss, optimizer, mesh, plan)
    options = StepOptions(
        *(bucket, pass_names(without), backend, donate, reduction, memory, clip, seed, has_aux),
        batch=batch,
        nonfinite=nonfinite,
    )
    f = plan(loss) if plan is not None else loss
    return TrainStep(f if buffers is None else with_buffers(f, buffers, mesh), optimizer, mesh, options)


_DEFAULTS = StepOptions(bucket="auto", donate=True)


class TrainStep(KeptStates):
    """Compiled training step; see `train_step`."""

    def __init__(self, f: Callable[..., Any], optimizer: Optimizer, mesh: Mesh, options: StepOptions) -> None:
        if is_asynchronous(applied_to(f), mesh):  # its weights have versions
            options = replace(options, donate=False)
        self.programs = StepPrograms(f, optimizer, mesh, options)
        super().__init__(States(self.programs))
        self.f, self.optimizer, self.mesh, self.options = self.programs.f, optimizer, mesh, options
        if flat_update(self.f.applied):
            require_declared(optimizer)

    @property
    def program(self) -> Program | PipelineProgram | None:
        """The last program used or lowered; None before."""
        return self.programs.compiled.program

    def __repr__(self) -> str:
        chosen = [
            f"{each.name}={getattr(self.options, each.name)!r}"
            for each in fields(self.options)
            if getattr(self.options, each.name) != getattr(_DEFAULTS, each.name)
        ]
        return f"train_step({', '.join((str(self.f), repr(self.optimizer), repr(self.mesh), *chosen))})"

    # --- stepping ---

    @with_short_tracebacks
    def __call__(self, state: TrainState, *batch: PyTree, **named: PyTree) -> tuple[TrainState, Metrics]:
        """Run one step.

        Args:
            state: state from `init`, `load` or the previous step. It is donated, unless the step was built with
                `donate=False`.
            batch, named: arguments of the loss after the parameters, by position or keyword.

        Returns:
            The new state, and the metrics.

        Raises:
            TypeError: if the first argument is not a state.
            ValueError: if another step made the state, with a different layout.
            DonatedStateError: if the state was donated to an earlier step.
            NothingToTrainError: if no parameter has a path to the loss.
            NonFiniteError: for a loss or gradient norm that is not finite, on every rank in the same step.
            LossScaleError: if gradients overflow at the lowest loss scale.
        """
        layout, runtime = self.states.known_layout(state), self.states.runtime_for(state)
        batches = self.programs.batches
        batch = batches.positional(batch, named)
        note_step(state.step)
        batches.stay_in_step(runtime, f"takes step {state.step}", batch)
        lowered = self._lower(layout, state, moved_to(runtime.device, batch))
        count = len(tensors(state.without_values))
        lowered.require_layouts(tensors_of(batch), count)
        extra, shown = batches.entered(runtime, lowered.program, "train_step", batch, *self._key(state))
        runtime.agree_on(lowered.program)
        held = state.give() if self.options.donate else state.handles
        run, counts = self.programs.compiled.run, self._counts(state)
        with state.used(held), counted_on_host(counts):
            results = run(runtime, lowered, [*tensors(held), *extra], shown, state.whose, staying=slice(count))
        _, metrics = lowered.unflatten(results)
        metrics = metrics._replace(lr=rates(self.optimizer, metrics.lr))
        new = iter(results)
        kept = tuple(handle if isinstance(handle, StaticLeaf) else next(new) for handle in held)
        recorded = recorded_steps(state.recorded, metrics.loss)
        note_step(None)
        after = TrainState(state.step + 1, kept, layout, state.whose, recorded)
        after.counts = None if counts is None else {name: count + 1 for name, count in counts.items()}
        if self.options.nonfinite == "error":
            require_finite(self.states, state, after, metrics)
        return after, metrics

    def replay(self, state: TrainState, *batch: PyTree, **named: PyTree) -> Origin | None:
        """Run a step op by op and find the op that computes non-finite values from finite ones.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh, P
        >>> def loss(w, x):
        ...     return (x * w).sqrt().mean()
        >>> plan = fp.data_parallel("data")
        >>> train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), plan, donate=False)
        >>> state, batch = train.init(torch.ones(())), torch.tensor([4.0, -1.0])
        >>> try:
        ...     state, metrics = train(state, batch)
        ... except fp.NonFiniteError as error:
        ...     origin = train.replay(state, batch)
        >>> origin.op, origin.values, origin.rank
        ('aten.sqrt.default', '1 NaN of 1 values', 1)

        Args:
            state: the state before the step. It is not donated.
            batch, named: arguments of the loss after the parameters, by position or keyword.

        Returns:
            The first such op that the results of the step depend on, with its source line. None if all values are
            finite. An infinite constant of the model, such as in an attention mask, counts as finite. On real processes
            this is a collective: every process must call it, and all return the same op.

        Raises:
            ValueError: if a parameter is not finite before the step, or the batch has a NaN.
        """
        layout, runtime = self.states.known_layout(state), self.states.runtime_for(state)
        batches = self.programs.batches
        batch = batches.positional(batch, named)
        batches.stay_in_step(runtime, f"replays step {state.step}", batch)
        require_finite_inputs(self.states, state, batch)
        lowered = self._lower(layout, state, moved_to(runtime.device, batch))
        extra, _ = batches.entered(runtime, lowered.program, "train_step", batch, *self._key(state))
        with disable_ambient_modes():
            return runtime.replay(lowered.program, [*tensors(copied(state.handles)), *extra])

    def _counts(self, state: TrainState) -> dict[str, int] | None:
        """Return the update counts known on the host. None if a step may make no update or several."""
        may_differ = any(each.may_skip for each in self.programs.requests) or self.programs.is_asynchronous
        return None if may_differ or state.counts is None else dict(state.counts)

    def _key(self, state: TrainState) -> list[torch.Tensor]:
        seed = self.options.seed
        if seed is None:
            return []
        key, device = random.fold_in(random.key(seed), state.step), device_of(state.without_values)
        return [key if device is None else to_device(key, device)]

    def compile(self, f: Callable[..., Any], *, batch: str | None = None, ema: bool = False) -> StateFunction:
        """Compile another function of the parameters, to be called on a state. The layout of the parameters stays.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh, P
        >>> plan = fp.zero(3, "data")
        >>> train = fp.train_step(lambda w, x: ((x @ w - 1) ** 2).mean(), fp.optim.sgd(0.1), Mesh(data=2), plan)
        >>> predict = train.compile(plan(lambda w, x: x @ w))
        >>> predict(train.init(torch.ones(2)), torch.eye(2))
        tensor([1., 1.])

        Args:
            f: the function, transformed by the step's plan, or by a plan with the same layout of the parameters.
            batch: "global" if every rank passes the full batch, such as a test set that all ranks load. "own" if each
                process passes the batch of its own ranks. By default like the step.
            ema: whether to call `f` on the average of the parameters that `fp.optim.ema` computes.

        Returns:
            The function, `result = predict(state, *batch)`. Results are full tensors. The state is not donated.

        Raises:
            TypeError, ValueError: when called, if the argument is not a state, or if `f` has another layout of the
                parameters.
        """
        return StateFunction(self.states, f, batch, ema)

    def explain(self, *, group: str = "line", casts: bool = False) -> Explanation | PassTable:
        """Return every collective of the step: kind, axis, count, bytes, source line."""
        return self.programs.compiled.explain(group, casts)

    @with_short_tracebacks
    def lower(self, state: TrainState | PyTree, *batch: PyTree, **named: PyTree) -> Program | PipelineProgram:
        """Return the program of a step for these arguments, without running it.

        Args:
            state: a state, or full parameters, which may be on the meta device. With parameters no state is created.
                With replicas it is the program of a step that exchanges.
            batch, named: arguments of the loss after the parameters, by position or keyword.
        """
        batch = self.programs.batches.positional(batch, named)
        if isinstance(state, TrainState):
            return self._lower(self.states.known_layout(state), state, batch).program
        layout, leaves = self.states.place(*self.states.begun(state))
        return self.programs.lower(layout, batch, lambda: layout.trees(leaves)).program

    def _lower(self, layout: StateLayout, state: TrainState, batch: tuple[PyTree, ...]) -> Lowered:
        return self.programs.lower(layout, batch, lambda: self.states.shapes(layout, state), state.step)
