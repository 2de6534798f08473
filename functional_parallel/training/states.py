"""The states of a training run: made of whole parameters, one leaf after the other, copied, and given back whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import Any

import optree
import torch

from sharding_specs import Mesh, P, register_dataclasses, tree_paths, validate

from .. import _torch
from ..compile import runtime_of
from ..data import check_same_call
from ..functions import LocalFunction, PyTree, as_local_function
from ..optim import Optimizer
from ..pipelines import PipelineProgram
from ..runtime import copy_if_aliased, runtime_kind_of, storages
from ..tracing import disable_ambient_modes
from ..transforms import LossScale, LossScaleState
from .batches import BatchInputs, check_same
from .deferred import CannotDeferError, defer_init
from .finite import settle
from .loading import expected_state, require_parameters, require_state_of, require_values, steps_done
from .options import StepOptions
from .signatures import leaf_signature, signature_text
from .state import StateLayout, StaticLeaf, TrainState, detach_leaf, state_layout
from .update import StepLayout, find_step_layout, warn_of_replicated_state, with_scale

__all__ = ["StateManager"]

Made = Iterable[tuple[int, Any]]  # leaves, each with its number, in any order


class StateManager:
    """What begins a run, goes on with a saved one, and reads what a state holds.

    Args:
        f: the loss, and what the plan made of it.
        optimizer: the optimizer.
        mesh: the mesh.
        options: the step's options.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        optimizer: Optimizer,
        mesh: Mesh,
        options: StepOptions,
    ) -> None:
        self.f = f if isinstance(f, LocalFunction) else as_local_function(f)
        self.optimizer, self.mesh, self.options = optimizer, mesh, options
        self.f.layout.mesh(mesh)  # refuses one without the axes that the plan splits over
        self.batches = BatchInputs(self.f, mesh, options.batch == "own")
        self.scaling: LossScale | None = self.f.layout.loss_scale
        self._forms: dict[Any, StateLayout] = {}
        self._known: set[StateLayout] = set()
        self._latest: dict[StateLayout, Any] = {}  # programs

    def init(self, params: PyTree) -> TrainState:
        """Shard parameters and make the optimizer's state, one leaf after the other.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh
        >>> def loss(params, x):
        ...     return (x @ params["weight"].T + params["bias"]).square().mean()
        >>> def make():
        ...     return fp.functional(torch.nn.Linear(64, 64))[1]
        >>> train = fp.train_step(loss, fp.optim.adamw(1e-3), Mesh(data=4), fp.zero(3, "data"))
        >>> state = train.init(make)                                  # no rank holds more than one whole leaf
        >>> sorted(train.params(state))
        ['bias', 'weight']

        Args:
            params: whole parameters, the same on every rank (which is checked); or a function without arguments that
                makes them. That is run without memory first, and then op by op, its random numbers drawn as it would
                draw them, so that of parameters and state each leaf is there, whole, for as long as it takes to shard
                it. A function that looks at values on its way runs as it is, with a warning that says so.

        Raises:
            TypeError: when these are no parameters.
            DifferentInputsError: when ranks have different ones.
        """
        register_dataclasses(params)
        makes = callable(params) and not isinstance(params, torch.nn.Module)
        given = None if makes else optree.tree_map(detach_leaf, params)
        make = params if makes else lambda: given
        why = "" if makes or _elements(given) > _FEW else "a recording would take longer"
        with disable_ambient_modes():
            try:
                if not why:
                    form, recording = defer_init(partial(self._begin, make))
                    leaves, made = recording.leaves, recording.made()
            except CannotDeferError as error:
                why = str(error)
            if why:
                form, leaves = self._begin(make)
                made = enumerate(leaves)
            if why and makes:
                warnings.warn(_IN_ONE_PIECE.format(why=why), RuntimeWarning, stacklevel=2)
            return self._compared("train_step.init", form, leaves, made)

    def _begin(self, make: Callable[[], PyTree]) -> tuple[StateLayout, list[Any]]:
        """How a state lies that begins with some parameters, and its leaves, whole."""
        params = make()
        register_dataclasses(params)
        require_parameters(params, "train_step.init")
        held, state = self.begun(params)
        require_values(held, state)
        return self._place(held, state)

    def _compared(self, name: str, form: StateLayout, leaves: list[Any], made: Made) -> TrainState:
        """A state of these leaves as they are made, once it is known that all ranks have the same parameters."""
        runtime = runtime_of(self.mesh, self.f, self.options.reduction)
        count = form.params.num_leaves
        params = {index: leaf for index, leaf in enumerate(leaves[:count]) if isinstance(leaf, torch.Tensor)}
        every = tree_paths(form.params.unflatten(range(count)))
        paths = [every[index] or "parameters" for index in params]
        runtime.check_sums(name, paths, [signature_text(leaf_signature(leaf)) for leaf in params.values()])
        given = storages(*params.values())
        sums = dict.fromkeys(params, "")

        def see(index: int, leaf: Any) -> None:
            if index in sums:
                sums[index] = runtime.checksum(leaf)

        held = self._held(form, made, given, see)
        runtime.check_sums(name, paths, list(sums.values()))
        return TrainState(0, held, form, f", of the state that call {runtime.calls} made")

    def load(self, params: PyTree, optimizer_state: PyTree, step: int) -> TrainState:
        """A state from whole parameters and a whole optimizer state, as `whole` returned them.

        Raises:
            ValueError: when the optimizer keeps another state for these parameters, or the step is no number.
        """
        register_dataclasses(params, optimizer_state)
        require_parameters(params, "train_step.load")
        stacks, expected = self.f.layout.stacks, expected_state(self.optimizer.init, params)
        expected, optimizer_state = (with_scale(each, self.scaling) for each in (expected, optimizer_state))
        require_state_of(expected, optimizer_state)
        given, done = storages(*optree.tree_leaves((params, optimizer_state))), steps_done(step)
        loaded = {"params": params, "optimizer_state": optimizer_state, "step": torch.tensor(done)}
        check_same(runtime_of(self.mesh, self.f, self.options.reduction), "train_step.load", loaded)
        if stacks is not None:
            params, optimizer_state = stacks.unstack(params), stacks.unstack_like(optimizer_state, params)
        with disable_ambient_modes():
            require_values(params, optimizer_state)
            form, leaves = self._place(params, optimizer_state)
            held = self._held(form, enumerate(leaves), given)
        runtime = runtime_of(self.mesh, self.f, self.options.reduction)
        return TrainState(done, held, form, f", of the state that call {runtime.calls} made")

    def begun(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Parameters and first state as they are held: in a pipeline, layers that were stacked one by one."""
        register_dataclasses(params)
        stacks = self.f.layout.stacks
        if stacks is None:
            return params, self.optimizer.init(params)
        return stacks.unstack(params), stacks.first_state(self.optimizer.init, params)

    def _held(
        self, form: StateLayout, made: Made, given: set[int], see: Callable[[int, Any], None] = lambda *_: None
    ) -> tuple[Any, ...]:
        """Leaves as the runtime holds them, in memory of their own; what was `given` lies in others'."""
        held: list[Any] = [None] * len(form.specs)
        shard = self._sharding(form)
        for index, leaf in made:
            see(index, leaf)
            is_tensor = isinstance(leaf, torch.Tensor)
            held[index] = copy_if_aliased(shard(index, detach_leaf(leaf)), given) if is_tensor else StaticLeaf(leaf)
            del leaf  # or it would be there while the next is made
        return tuple(held)

    def _sharding(self, form: StateLayout) -> Callable[[int, torch.Tensor], Any]:
        """How a leaf is sharded: in a pipeline that is cut already, for the ranks whose stages take it."""
        runtime, program = runtime_of(self.mesh, self.f, self.options.reduction), self._latest.get(form)
        if not isinstance(program, PipelineProgram) or program.schedule.versions is not None:
            return lambda index, leaf: runtime.shard(leaf, form.specs[index])
        numbers = list(accumulate(isinstance(look, tuple) for look in form.looks))  # of what is a tensor, from one
        return lambda index, leaf: runtime.shard_for(program, numbers[index] - 1, leaf, form.specs[index])

    def _place(self, params: PyTree, optimizer_state: PyTree) -> tuple[StateLayout, list[Any]]:
        """Decide where everything lies; that, and the leaves of parameters and state as a step holds them, whole."""
        with _torch.disable_modes():  # a recording of how leaves are made, which asks what tracing an update may not
            places = self.places(params)
        validate(params, places.kept, self.mesh, advice="fp.zero(3, …) pads parameters by itself")
        packed = places.packed_state(with_scale(optimizer_state, self.scaling))
        state_specs = places.state(packed, self.optimizer)
        specs = optree.tree_leaves((places.kept, state_specs))
        found = state_layout(self.mesh, places, params, packed, tuple(specs))
        if found.key not in self._forms:
            warn_of_replicated_state(packed, state_specs, places, self.optimizer)
        form = self._forms.setdefault(found.key, found)
        self._known.add(form)
        return form, optree.tree_leaves((params, packed))

    def places(self, params: PyTree) -> StepLayout:
        """Where everything lies that a step with these parameters holds."""
        return find_step_layout(self.f.layout, self.mesh, params, self.optimizer, self.options.clip is not None)

    def params(self, state: TrainState) -> PyTree:
        """The parameters of a state, whole; later steps do not change them. A collective: every process calls it."""
        return self.whole(state)[0]

    def copy(self, state: TrainState) -> TrainState:
        """The same state in memory of its own, which steps from the original do not use up."""
        form = self.known_form(state)
        held = (
            handle if isinstance(handle, StaticLeaf) else copy_if_aliased(handle, storages(handle))
            for handle in state.handles
        )
        copied = TrainState(state.step, tuple(held), form, state.whose, state.recorded)
        copied.watched, copied.counts = state.watched, state.counts
        return copied

    def whole(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """Parameters and optimizer state, whole: what a checkpoint saves. A collective: every process calls it."""
        form, runtime = self.known_form(state), self.runtime_for(state)
        settle(self, state)
        if self.batches.own:
            check_same_call(runtime, f"reads the state of step {state.step}")
        leaves = [
            handle.value
            if isinstance(handle, StaticLeaf)
            else copy_if_aliased(runtime.whole(handle, spec, state.whose), storages(handle))
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

    def known_form(self, state: TrainState) -> StateLayout:
        """The form of a state that is not used up, as this step knows it."""
        if not isinstance(state, TrainState):
            raise TypeError(
                f"train_step takes a TrainState, not {type(state).__name__}: make one of whole parameters by "
                "train.init(params), or of a saved state by train.load(params, optimizer_state, step)"
            )
        _, form = state.handles, state.form  # one that is used up has no handles, and says so
        return form if form in self._known else self._own_form(form)

    def runtime_for(self, state: TrainState) -> Any:
        """What runs the step, for a state that lies with the ranks that it runs on."""
        runtime = runtime_of(self.mesh, self.f, self.options.reduction)
        handle = next((each for each in state.handles if not isinstance(each, StaticLeaf)), None)
        if handle is not None and runtime_kind_of(handle) != runtime.holders:
            raise ValueError(
                f"this state, of step {state.step}, lies with {runtime_kind_of(handle)}, and {self.mesh!r} is "
                f"{runtime.holders} by now: call torch.distributed.init_process_group before train.init or train.load"
            )
        return runtime

    def _own_form(self, form: StateLayout) -> StateLayout:
        """The same form as this step made it; another step's states have forms of their own."""
        if form.key in self._forms:
            return self._forms[form.key]
        why = f"; {form.difference([*self._forms.values()][-1])}" if self._forms else ", which has made none yet"
        raise ValueError(
            f"this state was not made by this train_step{why}: begin with train.init(params), or take it over by "
            "train.load(*other.whole(state), state.step), where `other` is the step that made it"
        )

    def shapes(self, form: StateLayout, state: TrainState) -> tuple[PyTree, PyTree]:
        """Parameters and optimizer state as they are held, without values."""
        like = runtime_of(self.mesh, self.f, self.options.reduction).like
        held = zip(state.handles, form.specs, strict=True)
        leaves = [handle.value if isinstance(handle, StaticLeaf) else like(handle, spec) for handle, spec in held]
        return form.trees(leaves)


def _elements(tree: PyTree) -> int:
    return sum(leaf.numel() for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


_FEW = 1 << 18  # a megabyte
_IN_ONE_PIECE = (
    "train.init ran the function that makes parameters as it is, so that every rank held them all, and the optimizer's "
    "whole first state, because {why}. One that only makes tensors, fills them and draws random numbers is run leaf by "
    "leaf, and needs the memory of one leaf beside the shards"
)
