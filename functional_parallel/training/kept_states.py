"""Methods of a training step that create, read, save, restore and move its states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import optree

from ..checkpoint import Copies, Save
from ..functions import PyTree
from ..ir import with_short_tracebacks, without_memory
from ..requests import converted_state
from ..stateful import Sharded
from .checkpoints import save_state
from .resizing import Rule
from .restoring import RestoreOptions, first_state, load_state, restore_state
from .states import States
from .train_state import TrainState


class KeptStates:
    """Creates, reads, saves, restores and moves the states of a training step."""

    def __init__(self, states: States) -> None:
        self.states = states

    @with_short_tracebacks
    def init(self, params: PyTree, *, batch: PyTree = None) -> TrainState:
        """Shard parameters and create the optimizer's state, leaf by leaf.

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
            params: full parameters, equal on every rank (this is checked), or a function without arguments that
                returns them. The function first runs on tensors without memory. Then its ops run one at a time, with
                the random numbers that the function itself would draw. Each leaf of parameters and state exists as a
                full tensor only until it is sharded. A function that reads the values of its tensors runs unchanged,
                with a warning. Or an `fp.Sharded`, which is moved to the layout of this step: of its parameters, no
                rank holds a full one.
            batch: the arguments of the loss after the parameters, in a tuple if there are several. Only the shapes and
                dtypes of tensors matter, so they may be on the meta device. They decide where a pipeline is cut, so
                that each of its ranks holds only the leaves that its stages read. Without a batch, every rank of a
                pipeline holds all leaves until the first step. Other plans do not need it.

        Raises:
            TypeError: if these are not parameters.
            InputMismatchError: if the parameters differ between ranks.
        """
        if isinstance(params, Sharded) and self.states.replicas is None:
            return first_state(self.states, params, batch)
        return self.states.create(params.full() if isinstance(params, Sharded) else params, batch)

    @with_short_tracebacks
    def load(
        self, params: PyTree, optimizer_state: PyTree = None, step: int | None = None, *, batch: PyTree = None
    ) -> TrainState:
        """Create a state from full parameters and a full optimizer state, as `whole` returned them, or move a state.

        A state of another step is moved to the layout of this step, on the same or another mesh of the same processes.
        Ranks send each other the elements that they lack, so no rank holds a full leaf. Both states remain usable.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh
        >>> first, second = (fp.train_step(lambda w, x: w @ x, fp.optim.sgd(0.1), Mesh(data=n)) for n in (4, 2))
        >>> second.load(first.init(torch.ones(3)))
        TrainState(step=0, parameters=1, mesh=Mesh(data=2))

        Args:
            params: the parameters, or the state of another step, which has the other two.
            optimizer_state: the optimizer state.
            step: number of completed steps.
            batch: as for `init`.

        Raises:
            TypeError: if `params` are not parameters, or if a state is given with more arguments.
            ValueError: if the optimizer state does not belong to these parameters and this optimizer, a leaf is on the
                meta device, or `step` is not a number of steps.
            InputMismatchError: if the values differ between ranks.
        """
        if not isinstance(params, TrainState):
            return self.states.load_full(params, optimizer_state, step, batch)
        if optimizer_state is not None or step is not None:
            raise TypeError(
                "train_step.load: a state of another step has its optimizer state and its step; give it alone"
            )
        return load_state(self.states, params, batch)

    def save(
        self, state: TrainState, path: str | Path, *, data: Any = None, extra: Any = None, only: str | None = None
    ) -> None:
        """Save a state as a checkpoint of its step. It returns when the checkpoint is safe on the disk.

        Each rank writes its shards, and ranks with equal shards share the work. Every process must call it.

        >>> import tempfile, torch, functional_parallel as fp
        >>> from sharding_specs import Mesh
        >>> def loss(w, x):
        ...     return ((x @ w - 1) ** 2).mean()
        >>> folder = tempfile.mkdtemp()
        >>> train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=2), fp.zero(3, "data"))
        >>> state, metrics = train(train.init(torch.zeros(2)), torch.eye(2))
        >>> train.save(state, folder, extra={"loss": 1.0})
        >>> wider = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=4), fp.zero(1, "data"))
        >>> again = wider.restore(folder)
        >>> again.step, torch.equal(wider.params(again), train.params(state))
        (1, True)

        Args:
            state: the state.
            path: folder of the run's checkpoints, which all hosts share. It is created. Each checkpoint is a folder in
                it, such as `step_00000100`.
            data: the `fp.Position` that `sampler.run` returned with the last batch, or a loader with `state_dict` and
                `load_state_dict`.
            extra: other values to save; JSON.
            only: "trained" to leave out the parameters that the optimizer does not update: those that `by_path`
                freezes, and tensors of integers. Parameters that the loss does not use are saved, with their state.

        Raises:
            CheckpointError: on every process, if a process could not write its part, or another run writes there. The
                state is unchanged, so training can go on.
            TypeError: if `data` or `extra` cannot be saved.
        """
        save = self.begin_save(state, path, data=data, extra=extra, only=only)
        save.run()
        save.wait()

    def begin_save(
        self,
        state: TrainState,
        path: str | Path,
        *,
        data: Any = None,
        extra: Any = None,
        keep: int | None = None,
        copies: Copies | None = None,
        only: str | None = None,
    ) -> Save:
        """Begin a save for a caller that decides when it is written, as `fp.checkpoint.Saver` does.

        Args:
            state, path, data, extra, only: as for `save`.
            keep: number of checkpoints to keep.
            copies: memory for copies of what this process writes, made now. Without it, the state must not be donated
                before the save has run.

        Returns:
            The save. `run` writes it, in this or another thread. Then `wait` raises what went wrong.
        """
        return save_state(self.states, state, path, data=data, extra=extra, keep=keep, copies=copies, only=only)

    def restore(
        self,
        path: str | Path,
        *,
        step: int | None = None,
        like: PyTree | Callable[[], PyTree] | None = None,
        data: Any = None,
        rename: Mapping[str, str] = MappingProxyType({}),
        partial: bool = False,
        cast: bool = False,
        fallback: bool = False,
        resize: Mapping[str, Rule] = MappingProxyType({}),
        batch: PyTree = None,
    ) -> TrainState:
        """Restore a state from a checkpoint onto this step's mesh and plan, with all checksums verified.

        Each rank reads its shards. Every process must call it.

        Args:
            path: folder of the run's checkpoints, or of one checkpoint.
            step: step of the checkpoint. By default the newest one is taken.
            like: parameters of the same structure, full or an `fp.Sharded`, or a function that makes them. It is needed
                if the parameters are in containers other than dicts with text as keys, lists and tuples, with
                `partial`, and for a checkpoint of the trained parameters, whose frozen parameters get the values of
                `like`.
            data: a loader whose `load_state_dict` gets the position of this process.
            rename: new names of leaves by their names in the checkpoint, as `inspect` lists them without "params/".
            partial: whether to restore only leaves that both have. Others get the values of `like`.
            cast: whether leaves may have another dtype in the checkpoint.
            fallback: whether to take an older checkpoint, with a warning, if the newest one is damaged.
            resize: rules for parameters of another size in `like`, by pattern of their paths. "zeros" keeps the
                elements that both have, and adds zeros; no rank holds more than its shards. A function of (old tensor,
                new shape) returns the new tensor. It runs on every process, with the full leaf, and must return equal
                values on all. Masters and averages of the parameter are resized like it. Its other state keeps the
                elements that both have, and gets zeros.
            batch: as for `init`, or "saved" for the shapes of the last batch of the saved run.

        Raises:
            CheckpointError: if there is no checkpoint, or its leaves are not the leaves of this step.
            DamagedCheckpointError: if a file is missing, changed or cut. The message names it.
        """
        options = RestoreOptions(step, like, data, rename, partial, cast, fallback, resize, batch)
        return restore_state(self.states, Path(path), options)

    def params(self, state: TrainState, *, ema: bool = False) -> PyTree:
        """Return the full parameters of a state. Later steps do not change them. Every process must call it.

        Args:
            state: the state.
            ema: whether to return the average of the parameters that `fp.optim.ema` computes.

        Raises:
            ValueError: with `ema`, if the optimizer is no `fp.optim.ema`, or if there are replicas.
        """
        params, held = self.states.whole(state)
        return self.states.average(converted_state(held, (), lambda _: None)) if ema else params

    def buffers(self, state: TrainState) -> dict[str, Any]:
        """Return the full buffers of a state. Later steps do not change them. Every process must call it."""
        _, *more = self.states.arguments(*self.states.whole(state))
        if not more:
            raise ValueError("this step has no buffers: fp.train_step(…, buffers=buffers) keeps them in its states")
        return dict(more[0])

    def whole(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """Return the full parameters and optimizer state, to save a checkpoint. Every process must call it."""
        return self.states.whole(state)

    def copy(self, state: TrainState) -> TrainState:
        """Copy a state into separate memory. Steps from the original do not donate the copy."""
        return self.states.copy(state)

    def check(self, state: TrainState) -> None:
        """Check that gradients have not overflowed at the lowest loss scale. A loop may call it every few steps.

        Raises:
            LossScaleError: if a step before this state overflowed at the lowest loss scale.
        """
        self.states.check(state)

    def sharded(self, state: TrainState) -> tuple[Sharded, Sharded]:
        """Return the parameters and the optimizer state of a state, as the step holds them, without a copy.

        A later step that is given the state writes over them. Then their use raises DonatedStateError. Parameters have
        the storage dtype, and the optimizer state has what the plan adds to it, such as masters.
        """
        return sharded_of(self.states, state)

    def frozen(self, state: TrainState) -> Sharded:
        """Return a copy of the sharded parameters that later steps do not change, such as for a reference model.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh
        >>> mesh, plan = Mesh(data=2), fp.zero(3, "data")
        >>> train = fp.train_step(lambda w, x: ((x @ w - 1) ** 2).mean(), fp.optim.sgd(0.1), mesh, plan)
        >>> state = train.init(torch.zeros(2))
        >>> first = train.frozen(state)
        >>> state, metrics = train(state, torch.eye(2))
        >>> fp.compile(plan(lambda w, x: x @ w), mesh)(first, torch.eye(2))
        tensor([0., 0.])
        """
        return self.sharded(state)[0].copy()


def sharded_of(states: States, state: TrainState) -> tuple[Sharded, Sharded]:
    layout, stacks = states.known_layout(state), state.layout.layouts.stacks
    params, opt_state = (optree.tree_map(without_memory, each) for each in states.shapes(layout, state))
    own = stacks if stacks is not None and layout.params == stacks.layers else None
    params = params if own is None else own.restack(params)
    count, runtime = layout.params.num_leaves, states.runtime
    return (
        Sharded(None, params, layout.specs[:count], runtime, own, lambda: state.handles[:count]),
        Sharded(None, opt_state, layout.specs[count:], runtime, None, lambda: state.handles[count:]),
    )


def parameters_of(state: TrainState) -> Sharded:
    """Return the parameters of a state, as the step that made it holds them."""
    return sharded_of(state.layout.states, state)[0]
