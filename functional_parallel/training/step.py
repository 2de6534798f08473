"""A training step with everything sharded as the plan says: gradient, clipping, optimizer, one program."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import optree
import torch

from sharding_specs import Mesh, P, validate

from .. import random
from ..assumptions import Programs
from ..compile import runtime_of
from ..data import stay_in_step
from ..local_function import LocalFunction, PyTree, unsharded
from ..optim import Optimizer
from ..precision import LossScale, LossScaleState
from ..program.passes import named
from ..runtime import check_backend, own, storages, who_holds
from ..staging import Staged, stage
from ..switches import switched_off
from .asynchronous import is_asynchronous, of_one_update
from .batches import Batches, check_same
from .flat import require_elementwise
from .loading import expected_state, require_parameters, require_state_of, require_values, steps_done
from .local_step import LocalStep, Metrics
from .looks import look
from .on_state import OnState
from .options import require_options
from .places import Places, find_places
from .scaled import with_scale
from .state import Constant, Form, TrainState, form_of, plain, recorded_steps

__all__ = ["TrainStep", "train_step"]


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
    without: Collection[str] = (),
    backend: str = "eager",
) -> TrainStep:
    """Build a training step: gradient, clipping, optimizer, all sharded as the plan says.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
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
        plan: a transform or a chain; without it nothing is split.
        clip: bound on the gradient's global norm.
        seed: makes a key for `fp.random` and dropout, another one each step.
        has_aux: whether the loss returns `(scalar, aux)`.
        batch: "global" (every rank is given the whole batch and takes its part) or "own" (each process is given its own
            part, as a sharded loader makes it; `even_batches` makes unequal parts equal).
        bucket: bytes of gradients, or of a layer's gathered parameters, that travel in one collective; "auto" for a
            quarter of all gradients, between 1 and 25 MiB, and a layer's parameters; None for one collective each.
        reduction: on real processes, "fast" for the backend's own sums, "ordered" for sums in rank order: the bits of
            simulated ranks, and of every ZeRO stage.
        donate: whether a step may write the new state into the memory of the old one, which then cannot be used again
            (an error says so); `train.copy(state)` keeps one. Without it a step holds both.
        without: rewrites to switch off, one name or several, as `program.passes` lists them.
        backend: what computes between collectives, "eager" or "inductor", as for `fp.compile`.

    Returns:
        The step: `state = train.init(params)`, `state, metrics = train(state, *batch)`, `train.params(state)`.
    """
    check_backend(backend)
    require_options(optimizer, plan, clip, seed, batch, reduction)
    f = plan(loss) if plan is not None else loss
    options = (batch == "own", bucket, reduction, donate, named(without), backend)
    return TrainStep(f, optimizer, mesh, clip, seed, has_aux, *options)


class TrainStep:
    """A compiled training step; see `train_step`."""

    def __init__(
        self,
        f: Callable[..., Any],
        optimizer: Optimizer,
        mesh: Mesh,
        clip: float | None,
        seed: int | None,
        has_aux: bool,
        own_batch: bool,
        bucket: int | str | None,
        reduction: str,
        donate: bool = True,
        without: Collection[str] = (),
        backend: str = "eager",
    ) -> None:
        self.f = f if isinstance(f, LocalFunction) else unsharded(f)
        self.optimizer, self.mesh, self.clip, self.seed = optimizer, mesh, clip, seed
        self.f.layout.mesh(mesh)  # refuses one without the axes that the plan splits over
        self.batches = Batches(self.f, mesh, own_batch)
        self.has_aux, self.bucket, self.reduction = has_aux, bucket, reduction
        if self.f.layout.flat_update:
            require_elementwise(optimizer)
        self.without, self.backend = without, backend
        self.donate = donate and not is_asynchronous(self.f.layout, mesh)  # whose weights have versions
        self.scaling: LossScale | None = self.f.layout.loss_scale
        self.program: Any = None
        self._forms: dict[Any, Form] = {}
        self._staged: dict[Form, Programs[Staged]] = {}

    # --- state ---

    def init(self, params: PyTree) -> TrainState:
        """Shard parameters and make the optimizer's state.

        Args:
            params: whole parameters, the same on every rank (which is checked); or a function without arguments that
                makes them.
        """
        whole = params() if callable(params) and not isinstance(params, torch.nn.Module) else params
        require_parameters(whole, "train_step.init")
        check_same(runtime_of(self.mesh, self.f, self.reduction), "train_step.init", whole)
        with switched_off():
            held, state = self.begun(whole)
            return self._load(held, state, 0, storages(*optree.tree_leaves(held)))

    def load(self, params: PyTree, optimizer_state: PyTree, step: int) -> TrainState:
        """A state from whole parameters and a whole optimizer state, as `whole` returned them.

        Raises:
            ValueError: when the optimizer keeps another state for these parameters, or the step is no number.
        """
        require_parameters(params, "train_step.load")
        stacks, expected = self.f.layout.stacks, expected_state(self.optimizer.init, params)
        expected, optimizer_state = (with_scale(each, self.scaling) for each in (expected, optimizer_state))
        require_state_of(expected, optimizer_state)
        given, done = storages(*optree.tree_leaves((params, optimizer_state))), steps_done(step)
        loaded = {"params": params, "optimizer_state": optimizer_state, "step": torch.tensor(done)}
        check_same(runtime_of(self.mesh, self.f, self.reduction), "train_step.load", loaded)
        if stacks is not None:
            params, optimizer_state = stacks.unstack(params), stacks.unstack_like(optimizer_state, params)
        with switched_off():
            return self._load(params, optimizer_state, done, given)

    def begun(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Parameters and first state as they are held: in a pipeline, layers that were stacked one by one."""
        stacks = self.f.layout.stacks
        if stacks is None:
            return params, self.optimizer.init(params)
        return stacks.unstack(params), stacks.first_state(self.optimizer.init, params)

    def _load(self, params: PyTree, optimizer_state: PyTree, step: int, given: set[int]) -> TrainState:
        """A state in memory of its own, but for what lies elsewhere than what was `given`."""
        require_values(params, optimizer_state)
        form, leaves = self._place(params, optimizer_state)
        runtime = runtime_of(self.mesh, self.f, self.reduction)
        held = tuple(
            own(runtime.shard(plain(leaf), spec), given) if isinstance(leaf, torch.Tensor) else Constant(leaf)
            for leaf, spec in zip(leaves, form.specs, strict=True)
        )
        return TrainState(step, held, form, f", of the state that call {runtime.calls} made")

    def _place(self, params: PyTree, optimizer_state: PyTree) -> tuple[Form, list[Any]]:
        """Decide where everything lies; that, and the leaves of parameters and state as a step holds them, whole."""
        places = self.places(params)
        validate(params, places.kept, self.mesh, advice="fp.zero(3, …) pads parameters by itself")
        packed = places.packed_state(with_scale(optimizer_state, self.scaling))
        specs = optree.tree_leaves((places.kept, places.state(packed, self.optimizer)))
        found = form_of(self.mesh, places, params, packed, tuple(specs))
        form = self._forms.setdefault(found.key, found)
        self._staged.setdefault(form, Programs("train_step", below=3))
        return form, optree.tree_leaves((params, packed))

    def places(self, params: PyTree) -> Places:
        """Where everything lies that a step with these parameters holds."""
        return find_places(self.f.layout, self.mesh, params, self.optimizer, self.clip is not None)

    def params(self, state: TrainState) -> PyTree:
        """The parameters of a state, whole; later steps do not change them. A collective: every process calls it."""
        return self.whole(state)[0]

    def copy(self, state: TrainState) -> TrainState:
        """The same state in memory of its own, which steps from the original do not use up."""
        form = self.known_form(state)
        held = (handle if isinstance(handle, Constant) else own(handle, storages(handle)) for handle in state.handles)
        return TrainState(state.step, tuple(held), form, state.whose, state.recorded)

    def whole(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """Parameters and optimizer state, whole: what a checkpoint saves. A collective: every process calls it."""
        form, runtime = self.known_form(state), self.runtime_for(state)
        if self.batches.own:
            stay_in_step(runtime, f"reads the state of step {state.step}")
        leaves = [
            handle.value
            if isinstance(handle, Constant)
            else own(runtime.whole(handle, spec, state.whose), storages(handle))
            for handle, spec in zip(state.handles, form.specs, strict=True)
        ]
        params, packed = form.trees(leaves)
        found, stacks = (params, form.places.unpacked_state(packed)), self.f.layout.stacks
        return found if stacks is None else stacks.restack_all(found)

    def check(self, state: TrainState) -> None:
        """Stop a run whose gradients overflow at the lowest loss scale; a loop asks now and then.

        Raises:
            LossScaleError: when a step up to this state did.
        """
        self.known_form(state)
        if self.scaling is not None:
            runtime = self.runtime_for(state)
            held = state.handles[-len(LossScaleState._fields) :]
            scale = [runtime.whole(handle, P(), state.whose) for handle in held]
            self.scaling.check(LossScaleState(*scale))

    # --- stepping ---

    def __call__(self, state: TrainState, *batch: PyTree, **named: PyTree) -> tuple[TrainState, Metrics]:
        """One step.

        Args:
            state: from `init` or the step before; used up, unless the step was built with `donate=False`.
            batch, named: what the loss takes after the parameters, by place or name.

        Returns:
            The new state, and the metrics.

        Raises:
            TypeError: when the first argument is no state.
            ValueError: when another step made it, for a state that lies otherwise.
        """
        form, runtime = self.known_form(state), self.runtime_for(state)
        batch = self.batches.by_place(batch, named)
        self.batches.stay_in_step(runtime, f"takes step {state.step}", batch)
        staged = self._stage(form, state, batch)
        count = sum(not isinstance(handle, Constant) for handle in state.handles)
        key = [] if self.seed is None else [random.fold_in(random.key(self.seed), state.step)]
        extra, shown = self.batches.entered(runtime, staged.program, "train_step", batch, *key)
        runtime.agree_on(staged.program)
        held = state.give() if self.donate else state.handles
        handles = [handle for handle in held if not isinstance(handle, Constant)]
        with state.used_by_a_step(held), switched_off():
            results = runtime.run(staged.program, [*handles, *extra], shown, state.whose)
        whole = [
            runtime.whole(x, spec) for x, spec in zip(results[count:], staged.program.out_specs[count:], strict=True)
        ]
        _, metrics = staged.unflatten([*results[:count], *whole])
        new = iter(results)
        kept = tuple(handle if isinstance(handle, Constant) else next(new) for handle in held)
        recorded = recorded_steps(state.recorded, metrics.loss)
        return TrainState(state.step + 1, kept, form, state.whose, recorded), metrics

    def compile(self, f: Callable[..., Any]) -> OnState:
        """Compile another function of the parameters, called on a state, whose parameters stay as they lie.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh
        >>> plan = fp.zero(3, "data")
        >>> train = fp.train_step(lambda w, x: ((x @ w - 1) ** 2).mean(), fp.optim.sgd(0.1), Mesh(data=2), plan)
        >>> predict = train.compile(plan(lambda w, x: x @ w))
        >>> predict(train.init(torch.ones(2)), torch.eye(2))
        tensor([1., 1.])

        Args:
            f: what the step's plan made of the function; or one of a plan under which parameters lie alike.

        Returns:
            The function, `result = predict(state, *batch)`: results whole; the state can be used on.

        Raises:
            TypeError, ValueError: when called, on what is no state; for parameters that lie otherwise.
        """
        return OnState(self, f)

    def known_form(self, state: TrainState) -> Form:
        """The form of a state that is not used up, as this step knows it."""
        if not isinstance(state, TrainState):
            raise TypeError(
                f"train_step takes a TrainState, not {type(state).__name__}: make one of whole parameters by "
                "train.init(params), or of a saved state by train.load(params, optimizer_state, step)"
            )
        _, form = state.handles, state.form  # one that is used up has no handles, and says so
        return form if form in self._staged else self._own_form(form)

    def runtime_for(self, state: TrainState) -> Any:
        """What runs the step, for a state that lies with the ranks that it runs on."""
        runtime = runtime_of(self.mesh, self.f, self.reduction)
        handle = next((each for each in state.handles if not isinstance(each, Constant)), None)
        if handle is not None and who_holds(handle) != runtime.holders:
            raise ValueError(
                f"this state, of step {state.step}, lies with {who_holds(handle)}, and {self.mesh!r} is "
                f"{runtime.holders} by now: call torch.distributed.init_process_group before train.init or train.load"
            )
        return runtime

    def _own_form(self, form: Form) -> Form:
        """The same form as this step made it; another step's states have forms of their own."""
        if form.key in self._forms:
            return self._forms[form.key]
        why = f"; {form.difference([*self._forms.values()][-1])}" if self._forms else ", which has made none yet"
        raise ValueError(
            f"this state was not made by this train_step{why}: begin with train.init(params), or take it over by "
            "train.load(*other.whole(state), state.step), where `other` is the step that made it"
        )

    def explain(self, **options: Any) -> Any:
        """Every collective of the step: kind, axis, count, bytes, source line."""
        if self.program is None:
            raise ValueError("train_step has not run yet: take one step, or call train.lower(state, batch), first")
        return self.program.explain(**options)

    def lower(self, state: TrainState | PyTree, *batch: PyTree, **named: PyTree) -> Any:
        """The program of a step for these arguments; nothing runs.

        Args:
            state: from `init`; or whole parameters, which may be on the meta device: then no state is made.
            batch, named: what the loss takes after the parameters, by place or name.
        """
        batch = self.batches.by_place(batch, named)
        if isinstance(state, TrainState):
            return self._stage(self.known_form(state), state, batch).program
        form, leaves = self._place(*self.begun(state))
        return self._staged_for(form, batch, lambda: form.trees(leaves)).program

    # --- the program ---

    def _stage(self, form: Form, state: TrainState, batch: tuple[PyTree, ...]) -> Staged:
        return self._staged_for(form, batch, lambda: self.shapes(form, state))

    def shapes(self, form: Form, state: TrainState) -> tuple[PyTree, PyTree]:
        """Parameters and optimizer state as they are held, without values."""
        like, held = runtime_of(self.mesh, self.f, self.reduction).like, zip(state.handles, form.specs, strict=True)
        leaves = [handle.value if isinstance(handle, Constant) else like(handle, spec) for handle, spec in held]
        return form.trees(leaves)

    def _staged_for(self, form: Form, batch: tuple[PyTree, ...], shapes: Callable[[], tuple[PyTree, PyTree]]) -> Staged:
        leaves, tree = optree.tree_flatten(batch)
        key = (tree, tuple(map(look, leaves)))
        staged = self._staged[form].get(key, lambda: self._trace(form, shapes(), batch))
        self.program = staged.program
        return staged

    def _trace(self, form: Form, held: tuple[PyTree, PyTree], batch: tuple[PyTree, ...]) -> Staged:
        params, _ = held
        _, state_specs = form.trees(list(form.specs))
        batch = self.batches.global_shapes(params, batch)
        batch = of_one_update(self.f.layout, self.mesh, params, batch)
        key = torch.zeros((), dtype=torch.int64) if self.seed is not None else None
        args = (held, batch, key)
        step = LocalStep(self.f, self.optimizer, self.clip, self.has_aux, not is_asynchronous(self.f.layout, self.mesh))
        return stage(
            step.on(form.places, state_specs),
            self.mesh,
            args,
            name="train_step",
            parameters="0/0",
            carried="0",
            donate=self.donate,
            bucket=self.bucket,
            without=self.without,
            backend=self.backend,
        )
