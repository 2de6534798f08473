"""Training step that is sharded by a plan: gradient, clipping and optimizer in one program."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields, replace
from functools import partial
from typing import Any

import optree
import torch

from sharding_specs import Mesh, P

from .. import random
from ..checkpoint import tree_to_json
from ..functions import LocalFunction, PyTree, SpecTree, explain_keywords
from ..ir import leaf_signature, scalar_beside, with_short_tracebacks
from ..lowering import ArgumentPaths, Lowered, lower
from ..optim import Optimizer, counted_on_host, rates
from ..passes import pass_names
from ..pipelines import PipelineProgram
from ..program import Explanation, PassTable, Program
from ..requests import flat_update, loss_arguments
from ..runtime import Origin, check_backend, device_of, moved_to, note_step, to_device
from ..tracing import ProgramCache, disable_ambient_modes
from .asynchronous import is_asynchronous, of_one_update
from .batches import tensors_of
from .finite import require_finite, require_finite_inputs
from .kept_states import KeptStates
from .local_step import LocalTrainStep, Metrics
from .on_state import StateFunction
from .options import StepOptions, require_arguments, with_buffers
from .replicas import on_replicas
from .state import StateLayout, StaticLeaf, TrainState, recorded_steps
from .update import require_declared


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

    Returns:
        The step: `state = train.init(params)`, `state, metrics = train(state, *batch)`, `train.params(state)`.
    """
    check_backend(backend)
    require_arguments(loss, optimizer, mesh, plan)
    options = StepOptions(
        bucket, pass_names(without), backend, donate, reduction, clip, seed, has_aux, batch=batch, nonfinite=nonfinite
    )
    f = plan(loss) if plan is not None else loss
    return TrainStep(f if buffers is None else with_buffers(f, buffers, mesh), optimizer, mesh, options)


_DEFAULTS = StepOptions(bucket="auto", donate=True)


class TrainStep(KeptStates):
    """Compiled training step; see `train_step`."""

    def __init__(self, f: Callable[..., Any], optimizer: Optimizer, mesh: Mesh, options: StepOptions) -> None:
        super().__init__(f, optimizer, mesh, options)
        if flat_update(self.f.layout):
            require_declared(optimizer)
        if is_asynchronous(self.f.layout, mesh):  # its weights have versions
            self.options = replace(options, donate=False)
        self.program: Program | PipelineProgram | None = None
        self._lowered: dict[tuple[StateLayout, bool], ProgramCache[Lowered]] = {}
        self._warned: set[str] = set()  # parameters that are not trained

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
        form, runtime = self.known_form(state), self.runtime_for(state)
        batch = self.batches.by_place(batch, named)
        note_step(state.step)
        self.batches.stay_in_step(runtime, f"takes step {state.step}", batch)
        lowered = self._lower(form, state, moved_to(runtime.device, batch))
        count = sum(not isinstance(handle, StaticLeaf) for handle in state.handles)
        lowered.require_layouts(tensors_of(batch), count)
        extra, shown = self.batches.entered(runtime, lowered.program, "train_step", batch, *self._key(state))
        runtime.agree_on(lowered.program)
        held = state.give() if self.options.donate else state.handles
        handles = [handle for handle in held if not isinstance(handle, StaticLeaf)]
        counts = self._counts(state)
        with state.used_by_a_step(held), disable_ambient_modes(), counted_on_host(counts):
            results = runtime.run(lowered.program, [*handles, *extra], shown, state.whose)
        whole = [
            runtime.whole(x, spec) for x, spec in zip(results[count:], lowered.program.out_specs[count:], strict=True)
        ]
        _, metrics = lowered.unflatten([*results[:count], *whole])
        metrics = metrics._replace(lr=rates(self.optimizer, metrics.lr))
        new = iter(results)
        kept = tuple(handle if isinstance(handle, StaticLeaf) else next(new) for handle in held)
        recorded = recorded_steps(state.recorded, metrics.loss)
        note_step(None)
        after = TrainState(state.step + 1, kept, form, state.whose, recorded)
        after.counts = None if counts is None else {name: count + 1 for name, count in counts.items()}
        if self.options.nonfinite == "error":
            require_finite(self, state, after, metrics)
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
        form, runtime = self.known_form(state), self.runtime_for(state)
        batch = self.batches.by_place(batch, named)
        self.batches.stay_in_step(runtime, f"replays step {state.step}", batch)
        require_finite_inputs(self, state, batch)
        lowered = self._lower(form, state, moved_to(runtime.device, batch))
        extra, _ = self.batches.entered(runtime, lowered.program, "train_step", batch, *self._key(state))
        held = [handle for handle in self.copy(state).handles if not isinstance(handle, StaticLeaf)]
        with disable_ambient_modes():
            return runtime.replay(lowered.program, [*held, *extra])

    def _counts(self, state: TrainState) -> dict[str, int] | None:
        """Return the update counts known on the host. None if a step may make no update or several."""
        may_differ = any(each.may_skip for each in self.requests) or is_asynchronous(self.f.layout, self.mesh)
        return None if may_differ or state.counts is None else dict(state.counts)

    def _key(self, state: TrainState) -> list[torch.Tensor]:
        seed = self.options.seed
        if seed is None:
            return []
        key, device = random.fold_in(random.key(seed), state.step), device_of(state.handles)
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
        return StateFunction(self, f, batch, ema)

    def explain(self, *, group: str = "line", casts: bool = False) -> Explanation | PassTable:
        """Return every collective of the step: kind, axis, count, bytes, source line."""
        if self.program is None:
            raise ValueError("train_step has not run yet: take one step, or call train.lower(state, batch), first")
        return self.program.explain(group=group, casts=casts)

    @with_short_tracebacks
    def lower(self, state: TrainState | PyTree, *batch: PyTree, **named: PyTree) -> Program | PipelineProgram:
        """Return the program of a step for these arguments, without running it.

        Args:
            state: a state, or full parameters, which may be on the meta device. With parameters no state is created.
                If a state is created from such parameters later, each pipeline rank holds only the leaves that its
                own stages read. With replicas it is the program of a step that exchanges.
            batch, named: arguments of the loss after the parameters, by position or keyword.
        """
        batch = self.batches.by_place(batch, named)
        if isinstance(state, TrainState):
            return self._lower(self.known_form(state), state, batch).program
        form, leaves = self.place(*self.begun(state))
        return self._lowered_for(form, batch, lambda: form.trees(leaves), self.replicas is not None).program

    # --- the program ---

    def lower_for(self, form: StateLayout, batch: tuple[PyTree, ...], held: tuple[PyTree, PyTree]) -> Any:
        return self._lowered_for(form, batch, lambda: held, self.replicas is not None).program

    def _lower(self, form: StateLayout, state: TrainState, batch: tuple[PyTree, ...]) -> Lowered:
        exchanges = self.replicas is not None and (state.step + 1) % self.replicas.inner == 0
        return self._lowered_for(form, batch, lambda: self.shapes(form, state), exchanges)

    def _lowered_for(
        self, form: StateLayout, batch: tuple[PyTree, ...], shapes: Callable[[], tuple[PyTree, PyTree]], exchanges: bool
    ) -> Lowered:
        leaves, tree = optree.tree_flatten(batch)
        key = (tree, tuple(map(leaf_signature, leaves)))
        programs = self._lowered.setdefault((form, exchanges), ProgramCache("train_step"))
        lowered = programs.get(key, lambda: self._trace(form, shapes(), batch, exchanges))
        self.program = self._latest[form] = lowered.program
        return lowered

    def _trace(
        self, form: StateLayout, held: tuple[PyTree, PyTree], batch: tuple[PyTree, ...], exchanges: bool
    ) -> Lowered:
        self.batch_signature = tree_to_json(batch, _signature)
        (params, state), (_, state_specs) = held, form.trees(list(form.specs))
        more = loss_arguments(self.requests, self.split(state)[1])
        resolved = self.f.resolve((form.places.as_given(params), *more, *batch), self.mesh)
        specs = resolved.arguments[1 + len(more) :]
        batch = of_one_update(self.f.layout, self.mesh, self.batches.whole(batch, specs), specs)
        key = scalar_beside(params, 0, torch.int64) if self.options.seed is not None else None
        args = (held, batch, key)
        layouts = resolved.around(args, (form.specs, specs, P() if key is not None else None))
        has_norm = not is_asynchronous(self.f.layout, self.mesh)
        local, paths = self._local(form, state_specs, has_norm, exchanges), ArgumentPaths(parameters="0/0", state="0")
        return lower(local, self.mesh, args, layouts, name="train_step", options=self.options, paths=paths)

    def _local(self, form: StateLayout, state_specs: SpecTree, has_norm: bool, exchanges: bool) -> LocalFunction:
        """Return the step on a rank's shards."""
        f = self.f if self.replicas is None else self.replicas.loss
        step = LocalTrainStep(f, self.optimizer, self.options, has_norm and self.replicas is None, self._warned)
        if self.replicas is None:
            return step.on(form.places, state_specs)
        places = form.places
        specs = (places.kept, state_specs)
        return on_replicas(self.replicas, self.f.layout, places, partial(step.on, places), specs, exchanges)


def _signature(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        if leaf is None or isinstance(leaf, (bool, int, float, str)):
            return leaf
        raise TypeError("no JSON has it")
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch.")}
