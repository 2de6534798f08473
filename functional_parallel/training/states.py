"""States of a training run: create them from full parameters, leaf by leaf, copy them, and gather them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import optree
import torch

from sharding_specs import register_dataclasses, tree_paths, validate

from .. import _torch
from ..data import check_same_call
from ..functions import PyTree, SpecTree
from ..ir import (
    TensorSignature,
    current_source,
    leaf_signature,
    warn_at,
    without_memory,
)
from ..optim import EMAState, tree_map_params
from ..pipelines import PipelineProgram
from ..requests import (
    ReplicaState,
    StateRequest,
    converted_state,
    loss_arguments,
    split_state,
    with_leaves,
)
from ..runtime import Runtime, copy_if_aliased, runtime_of, storages
from ..stateful import StaticLeaf, copied, full_leaves, require_holders
from ..tracing import disable_ambient_modes
from .batches import check_same
from .deferred import defer_init
from .finite import settle
from .loading import expected_state, require_parameters, require_state_of, require_values, steps_done
from .replay import CannotDeferError
from .replicas import first_replicas, masters_of, one_replica, replica_specs
from .step_programs import StepPrograms
from .train_state import StateLayout, TrainState, detach_leaf, state_layout
from .update import StepLayout, find_step_layout, warn_of_replicated_state

T = TypeVar("T")

Made = Iterable[tuple[int, Any]]  # (index, leaf) pairs, in any order


class States:
    """Creates the states of a step from parameters or from a checkpoint, and reads them."""

    def __init__(self, programs: StepPrograms) -> None:
        self.programs = programs
        self.f, self.optimizer, self.mesh = programs.f, programs.optimizer, programs.mesh
        self.options = programs.options
        self.requests, self.replicas, self.split = programs.requests, programs.replicas, programs.split
        self._layouts: dict[Any, StateLayout] = {}
        self._known: set[StateLayout] = set()
        self.plans: dict[Any, Any] = {}  # of checkpoints

    def runtime(self) -> Runtime[Any, Any]:
        """Return the runtime of the step."""
        return runtime_of(self.mesh, self.f, self.options.reduction)

    def create(self, params: PyTree, batch: PyTree) -> TrainState:
        """Return the first state of parameters, which the optimizer makes, leaf by leaf; see `KeptStates.init`."""
        register_dataclasses(params)
        makes = callable(params) and not isinstance(params, torch.nn.Module)
        given = None if makes else optree.tree_map(detach_leaf, params)
        make = params if makes else lambda: given
        why = "" if makes or _elements(given) > _FEW else "a recording would take longer"
        with disable_ambient_modes():
            try:
                if not why:
                    layout, recording = defer_init(partial(self._begin, make))
                    leaves, made = recording.leaves, recording.made()
            except CannotDeferError as error:
                why = str(error)
            if why:
                layout, leaves = self._begin(make)
                made = enumerate(leaves)
            if why and makes:
                warn_at(current_source(), _IN_ONE_PIECE.format(why=why), RuntimeWarning)
            return self._compared("train_step.init", layout, leaves, made, batch)

    def _begin(self, make: Callable[[], PyTree]) -> tuple[StateLayout, list[Any]]:
        """Return the layout of the first state of the parameters from `make`, and its leaves as full tensors."""
        params = make()
        register_dataclasses(params)
        require_parameters(params, "train_step.init")
        held, state = self.begun(params)
        require_values(held, state)
        return self.place(held, state)

    def _compared(self, name: str, layout: StateLayout, leaves: list[Any], made: Made, batch: PyTree) -> TrainState:
        """Shard each leaf when it is made, check that the parameters are equal on all ranks, and return the state."""
        runtime = self.runtime()
        compared = self.arguments(*layout.trees(list(range(len(leaves)))))
        indices = zip(tree_paths(compared), optree.tree_leaves(compared), strict=True)
        every = {index: path.partition("/")[2] for path, index in indices if isinstance(leaves[index], torch.Tensor)}
        params, paths = {index: leaves[index] for index in every}, [path or "parameters" for path in every.values()]
        runtime.check_sums(name, paths, [str(leaf_signature(leaf)) for leaf in params.values()])
        _, state = layout.trees(leaves)
        given = storages(*params.values(), *optree.tree_leaves(self.split(state)[1]))  # the caller's
        sums = dict.fromkeys(params, "")

        def see(index: int, leaf: T) -> None:
            if index in sums and isinstance(leaf, torch.Tensor):
                sums[index] = runtime.checksum(leaf)

        held = self._held(layout, made, given, self.programs.holding(layout, leaves, batch), see)
        runtime.check_sums(name, paths, list(sums.values()))
        return TrainState(0, held, layout, f", of the state that call {runtime.calls} made")

    def load_full(self, params: PyTree, optimizer_state: PyTree, step: int | None, batch: PyTree) -> TrainState:
        """Create a state from full parameters and a full optimizer state."""
        register_dataclasses(params, optimizer_state)
        require_parameters(params, "train_step.load")
        expected = expected_state(self.optimizer.init, self._trained(params))
        if self.replicas is not None and isinstance(optimizer_state, ReplicaState):
            hollows = optree.tree_map(without_memory, self._trained(params))
            packed = self._with_requests(expected, hollows, self.requests, self.layouts(params))
            expected = first_replicas(self.replicas, self.mesh, self._stored(hollows), packed, self.requests)
            expected = expected._replace(masters=None)  # computed from the parameters
        else:
            saved = [each for each in self.requests if each.saved]
            layouts = self.layouts(params)
            expected, optimizer_state = (
                self._with_requests(x, params, saved, layouts) for x in (expected, optimizer_state)
            )
        require_state_of(expected, optimizer_state)
        given, done = storages(*optree.tree_leaves((params, optimizer_state))), steps_done(step)
        loaded = {"params": params, "optimizer_state": optimizer_state, "step": torch.tensor(done, device="cpu")}
        runtime = self.runtime()
        check_same(runtime, "train_step.load", loaded)
        with disable_ambient_modes():
            require_values(params, optimizer_state)
            layout, leaves = self.place(params, optimizer_state, fresh=False)
            held = self._held(layout, enumerate(leaves), given, self.programs.holding(layout, leaves, batch))
        return TrainState(done, held, layout, f", of the state that call {runtime.calls} made")

    def begun(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Return the parameters, and the first state of the optimizer, full."""
        register_dataclasses(params)
        return params, self.optimizer.init(self._trained(params))

    def _held(
        self,
        layout: StateLayout,
        made: Made,
        given: set[int],
        program: PipelineProgram | None,
        see: Callable[[int, Any], None] = lambda *_: None,
    ) -> tuple[Any, ...]:
        """Return the handles of the leaves, in separate memory: copy leaves with storages in `given`; extend it.

        With the program of a pipeline, only ranks with stages that read a leaf get it.
        """
        held: list[Any] = [None] * len(layout.specs)
        runtime = self.runtime()
        numbers = list(
            accumulate(isinstance(look, TensorSignature) for look in layout.signatures)
        )  # 1-based, of the tensors
        for index, leaf in made:
            see(index, leaf)
            if not isinstance(leaf, torch.Tensor):
                held[index] = StaticLeaf(leaf)
                continue
            shard = runtime.shard if program is None else partial(runtime.shard_for, program, numbers[index] - 1)
            held[index] = copy_if_aliased(shard(detach_leaf(leaf), layout.specs[index]), given)
            del leaf  # release it before the next leaf is made
        return tuple(held)

    def place(self, params: PyTree, optimizer_state: PyTree, *, fresh: bool = True) -> tuple[StateLayout, list[Any]]:
        """Return the layout of a state, and the leaves of parameters and packed state as full tensors.

        The memory of a `fresh` optimizer state is not the caller's.
        """
        with _torch.disable_modes():  # `defer_init` may be recording; its mode needs data that traces lack
            layouts = self.layouts(params)
        params, packed, state_specs = self.placed(layouts, params, optimizer_state, fresh)
        validate(params, layouts.kept, self.mesh, advice="fp.zero(3, …) pads parameters by itself")
        specs = optree.tree_leaves((layouts.kept, state_specs))
        found = state_layout(self, layouts, params, packed, tuple(specs))
        if found.key not in self._layouts and self.replicas is None:
            warn_of_replicated_state(packed, state_specs, layouts, self.optimizer, self.requests)
        layout = self._layouts.setdefault(found.key, found)
        self._known.add(layout)
        return layout, optree.tree_leaves((params, packed))

    def layouts(self, params: PyTree) -> StepLayout:
        """Resolve the layouts of a step with these parameters of the user."""
        trained, is_clipped = self._trained(params), self.options.clip is not None
        return find_step_layout(self.f, self.mesh, trained, self.optimizer, is_clipped)

    def placed(
        self, layouts: StepLayout, params: PyTree, optimizer_state: PyTree, fresh: bool
    ) -> tuple[PyTree, PyTree, SpecTree]:
        """Return stored parameters, packed state with the leaves of requests, and its specs, from the user's trees."""
        trained = self._trained(params)
        whole = self._with_requests(one_replica(optimizer_state), trained, self.requests, layouts)
        stored = layouts.by_layer(self._stored(trained), trained, fresh=False)
        packed = layouts.packed_state(layouts.by_layer(whole, trained, fresh))
        specs = layouts.state(packed, self.optimizer, self.requests)
        if self.replicas is None:
            return stored, packed, specs
        replicas, kept = optimizer_state, masters_of(self.requests)
        if not isinstance(replicas, ReplicaState):
            replicas = first_replicas(self.replicas, self.mesh, stored, packed, self.requests)
        elif kept is not None:
            replicas = replicas._replace(masters=kept.init(trained, self.f.applied, layouts))
        return stored, replicas, replica_specs(self.replicas, layouts, stored, replicas, specs)

    def _trained(self, params: PyTree) -> PyTree:
        """Return the parameters that the optimizer updates, from the user's."""
        for each in self.requests:
            params = each.trained(params)
        return params

    def _stored(self, params: PyTree) -> PyTree:
        """Return the parameters that are stored, from the parameters of `_trained`."""
        for each in self.requests:
            params = each.stored(params)
        return params

    def _with_requests(
        self, state: PyTree, params: PyTree, requests: Sequence[StateRequest], layouts: StepLayout
    ) -> PyTree:
        """Return a state with the leaves of these requests, and of no others; `params` come from `_trained`."""
        return converted_state(state, requests, lambda each: each.init(params, self.f.applied, layouts))

    def average(self, state: PyTree) -> PyTree:
        """Return the average of the parameters in an optimizer state."""
        if isinstance(state, EMAState) and self.replicas is None:
            return state.average
        why = "each replica has its own average" if self.replicas is not None else f"{self.optimizer!r} has none"
        raise ValueError(
            f"train_step: ema=True takes the average of the parameters, and {why}: give train_step "
            "fp.optim.ema(optimizer, decay), around the optimizer of all parameters, without replicas"
        )

    def arguments(self, params: PyTree, state: PyTree) -> tuple[PyTree, ...]:
        """Return the arguments of a function of a state before the batch: parameters, and buffers if there are any."""
        return (
            (params, *loss_arguments(self.requests, split_state(state, self.requests)[1]))
            if self.programs.passed
            else (params,)
        )

    def copy(self, state: TrainState) -> TrainState:
        layout = self.known_layout(state)
        copy = TrainState(state.step, copied(state.handles), layout, state.whose, state.recorded)
        copy.watched, copy.counts = state.watched, state.counts
        return copy

    def whole(self, state: TrainState) -> tuple[PyTree, PyTree]:
        layout, runtime = self.known_layout(state), self.runtime_for(state)
        settle(self, state)
        if self.programs.batches.own:
            check_same_call(runtime, f"reads the state of step {state.step}")
        leaves = full_leaves(runtime, state.handles, layout.specs, state.whose)
        params, state, added = self.full(layout, leaves)
        rows = [(each, added[type(each).__name__]) for each in self.requests if type(each).__name__ in added]
        return params, with_leaves(state, *zip(*rows, strict=True)) if rows else state

    def full(
        self,
        layout: StateLayout,
        leaves: list[Any],
        of_vector: Callable[[Any, int], Any] | None = None,
        join: Callable[[list[Any]], Any] | None = None,
    ) -> tuple[PyTree, PyTree, dict[str, PyTree]]:
        """Return the user's parameters, the optimizer's state, and the saved leaves of each request by its name.

        Args:
            layout, leaves: layout of a state, and its leaves as full tensors.
            of_vector: returns the parameter of an index from the vector that has it; None if the vectors have values.
            join: returns a stack from its layers; None if they have values.
        """
        params, packed = layout.trees(leaves)
        if self.replicas is not None:
            kept = masters_of(self.requests)
            params = params if kept is None else kept.full(params, packed.masters)
            return params, packed._replace(masters=None), {}
        layouts = layout.layouts
        if of_vector is None:
            packed = layouts.unpacked_state(packed)
        else:
            spread = partial(layouts.packing.spread, of=of_vector)
            packed = tree_map_params(spread, packed, layouts.packing.structure)
        state, added = split_state(packed, self.requests)
        for each, held in zip(self.requests, added, strict=True):
            params = each.full(params, held)
        saved = {
            type(each).__name__: held
            for each, held in zip(self.requests, added, strict=True)
            if each.saved and each.tree is not None
        }
        found = params, state, saved
        return found if layouts.stacks is None else layouts.stacks.restack_all(found, join)

    def check(self, state: TrainState) -> None:
        layout = self.known_layout(state)

        def whole(index: int) -> torch.Tensor:
            return self.runtime_for(state).whole(state.handles[index], layout.specs[index], state.whose)

        _, indices = layout.trees(list(range(len(state.handles))))
        for each, held in zip(self.requests, self.split(indices)[1], strict=True):
            if each.may_skip:
                each.check(optree.tree_map(whole, held))

    def known_layout(self, state: TrainState) -> StateLayout:
        """Return the layout of a state, as the instance of this step."""
        if not isinstance(state, TrainState):
            raise TypeError(
                f"train_step takes a TrainState, not {type(state).__name__}: make one of whole parameters by "
                "train.init(params), or of a saved state by train.load(params, optimizer_state, step)"
            )
        _, layout = state.without_values, state.layout  # raises if the state was donated
        return layout if layout in self._known else self._own_layout(layout)

    def runtime_for(self, state: TrainState) -> Runtime[Any, Any]:
        """Return the runtime of the step, after a check that it holds this state."""
        runtime = self.runtime()
        require_holders(runtime, state.without_values, f"this state, of step {state.step},", "train.init or train.load")
        return runtime

    def _own_layout(self, layout: StateLayout) -> StateLayout:
        """Return this step's layout that is equal to `layout`, the layout of another step."""
        if layout.key in self._layouts:
            return self._layouts[layout.key]
        why = f"; {layout.difference([*self._layouts.values()][-1])}" if self._layouts else ", which has made none yet"
        raise ValueError(
            f"this state was not made by this train_step{why}: begin with train.init(params), or take it over by "
            "train.load(state), which moves it to this step's layout"
        )

    def shapes(self, layout: StateLayout, state: TrainState) -> tuple[PyTree, PyTree]:
        """Return parameters and optimizer state as the step holds them, without values."""
        like = self.runtime().like
        held = zip(state.without_values, layout.specs, strict=True)
        leaves = [handle.value if isinstance(handle, StaticLeaf) else like(handle, spec) for handle, spec in held]
        return layout.trees(leaves)


def _elements(tree: PyTree) -> int:
    return sum(leaf.numel() for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


_FEW = 1 << 18  # elements; 1 MiB of float32
_IN_ONE_PIECE = (
    "train.init ran the function that makes parameters as it is, so that every rank held them all, and the optimizer's "
    "whole first state, because {why}. One that only makes tensors, fills them and draws random numbers is run leaf by "
    "leaf, and needs the memory of one leaf beside the shards"
)
