"""Save and restore training states: the leaves of a state, written and read by the plans of `checkpoint`."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optree
import torch

from sharding_specs import local_shape, register_dataclasses

from ..checkpoint import (
    Checkpoint,
    Contents,
    Copies,
    LeafLayout,
    Peers,
    Save,
    SavePlan,
    begin_save,
    candidates,
    load_position,
    plan_restore,
    plan_save,
    position_to_json,
    tree_from_json,
    tree_keys,
    tree_to_json,
)
from ..errors import CheckpointError, DamagedCheckpointError
from ..functions import PyTree
from ..ir import Aval, TensorSignature, hollow, without_memory
from ..pipelines import PipelineProgram, pipeline_of
from ..requests import ScaleLoss, split_state
from ..runtime import Runtime, Where, device_of
from ..tracing import disable_ambient_modes
from .finite import settle
from .saved import SavedLeaves, saved_leaves
from .signatures import listed
from .state import StateLayout, StaticLeaf, TrainState
from .states import StateManager

_TIMEOUT = 600.0  # seconds that a process waits until the others have written


def peers_of(runtime: Runtime[Any, Any]) -> Peers:
    """Return the processes of a run, as a checkpoint uses them."""
    size = 1 if runtime.holders == "simulated ranks" else runtime.mesh.size
    rank, store = (runtime.own_ranks[0], runtime.store) if size > 1 else (0, None)
    return Peers(rank, size, runtime.own_ranks, runtime.exchange, store, runtime.missing, _TIMEOUT)


# --- save ---


def save_state(
    manager: StateManager,
    state: TrainState,
    path: str | Path,
    *,
    data: Any,
    extra: Any,
    keep: int | None,
    copies: Copies | None,
) -> Save:
    """Begin to save a state. If its values are copied, training may continue. Every process calls it."""
    form, runtime = manager.known_form(state), manager.runtime_for(state)
    settle(manager, state)
    try:
        json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"extra={extra!r}: a checkpoint has what JSON can hold ({error})") from None
    peers = peers_of(runtime)
    leaves, plan = _plan(manager, form, tuple(_where(runtime, form, state, i) for i in range(len(form.specs))))
    numbers = {key: state.handles[index].value for key, index in leaves.numbers.items()}
    for key, value in numbers.items():
        if not isinstance(value, (bool, int, float)):
            raise CheckpointError(f"{key!r} is a {type(value).__name__}; a checkpoint has tensors and numbers")
    body = {
        "step": state.step,
        "seed": manager.options.seed,
        "reduction": _reduction(manager, runtime),
        "loss_scale": _loss_scale(manager, form, state),
        "data_position": position_to_json(data, peers),
        "extra": extra,
        "tree": tree_to_json(optree.tree_structure(leaves.params).unflatten(tree_keys(leaves.params)), str),
        "batch": manager.batch_signature,
    }

    def shard(index: int, rank: int) -> torch.Tensor:
        return runtime.shard_of(state.handles[index], form.specs[index], rank)

    contents = Contents(plan, shard, numbers, body)
    return begin_save(peers, Path(path), contents, keep=keep, copies=copies)


def _plan(manager: StateManager, form: StateLayout, where: tuple[Where, ...]) -> tuple[SavedLeaves, SavePlan]:
    """Return the leaves of a state and the plan to save them, which are computed once."""
    if (form, where) not in manager.plans:
        leaves = saved_leaves(manager, form, where.__getitem__)
        manager.plans[form, where] = leaves, plan_save(leaves.tensors, manager.mesh)
    found: tuple[SavedLeaves, SavePlan] = manager.plans[form, where]
    return found


def _where(runtime: Runtime[Any, Any], form: StateLayout, state: TrainState, index: int) -> Where:
    handle = state.handles[index]
    return _owners(form, index) + (() if isinstance(handle, StaticLeaf) else runtime.where(handle))


def _owners(form: StateLayout, index: int) -> Where:
    return tuple((axis, (rank,)) for axis, rank in form.specs[index].owner.items())


def _reduction(manager: StateManager, runtime: Runtime[Any, Any]) -> str:
    """Return text that is equal for two runs if their sums have the same bits."""
    if manager.options.reduction == "ordered" or runtime.holders == "simulated ranks":
        return "ordered"
    return f"fast on {manager.mesh} by {runtime.algorithm}"


def _loss_scale(manager: StateManager, form: StateLayout, state: TrainState) -> float | None:
    _, indices = form.trees(list(range(len(state.handles))))
    for each, held in zip(manager.requests, split_state(indices, manager.requests)[1], strict=True):
        if isinstance(each, ScaleLoss):
            return float(manager.runtime_for(state).whole(state.handles[held.scale], form.specs[held.scale]))
    return None


# --- restore ---


@dataclass(frozen=True)
class RestoreOptions:
    """The arguments of `train.restore` after the path."""

    step: int | None
    like: PyTree | Callable[[], PyTree] | None
    data: Any
    rename: Mapping[str, str]
    partial: bool
    cast: bool
    fallback: bool


def restore_state(manager: StateManager, path: Path, options: RestoreOptions) -> TrainState:
    """Return the state of a checkpoint. Every process calls it."""
    runtime = manager.runtime()
    peers, found, problem = peers_of(runtime), list[Path](), ""
    if peers.rank == 0:
        try:
            found = candidates(path, options.step)
        except CheckpointError as error:
            problem = str(error)
    (found, problem), *_ = peers.exchange((found, problem), "to restore a checkpoint")
    if problem:
        raise CheckpointError(problem)
    for number, each in enumerate(found):
        try:
            return _restored(manager, runtime, peers, each, options)
        except DamagedCheckpointError as error:
            if not options.fallback or number + 1 == len(found):
                older = f"; fallback=True takes {found[number + 1].name}" if number + 1 < len(found) else ""
                raise DamagedCheckpointError(f"{error}{older}") from None
            warnings.warn(f"{error}. Restoring {found[number + 1].name} instead", RuntimeWarning, stacklevel=3)
    raise AssertionError("candidates is not empty")


def _restored(
    manager: StateManager, runtime: Runtime[Any, Any], peers: Peers, path: Path, options: RestoreOptions
) -> TrainState:
    """Restore one checkpoint. What fails on one process is raised on all."""
    failure: Exception | None = None
    state: TrainState | None = None
    try:
        with disable_ambient_modes():
            checkpoint = Checkpoint(path)
            state = _Restore(manager, runtime, checkpoint, options).state()
        if options.data is not None:
            load_position(checkpoint.body["data_position"], options.data, peers)
    except Exception as error:
        failure = error
    told = "" if failure is None else f"{type(failure).__name__}: {failure}"
    is_damaged = isinstance(failure, DamagedCheckpointError)
    every = peers.exchange((told, is_damaged), "after restoring a checkpoint")
    if failure is not None and (is_damaged or not any(damaged for _, damaged in every)):
        raise failure
    wrong = [(rank, text) for rank, (text, _) in enumerate(every) if text]
    if wrong:
        kind = DamagedCheckpointError if any(damaged for _, damaged in every) else CheckpointError
        raise kind(f"rank {wrong[0][0]}: {wrong[0][1]}")
    assert state is not None
    return state


class _Restore:
    """A state from a checkpoint, for the ranks of this process."""

    def __init__(
        self, manager: StateManager, runtime: Runtime[Any, Any], checkpoint: Checkpoint, options: RestoreOptions
    ) -> None:
        self.manager, self.runtime, self.checkpoint, self.options = manager, runtime, checkpoint, options
        self.plan: SavePlan = checkpoint.plan
        self.first, given = self._first_state(), self._like()
        default = torch.get_default_device()
        self.device = runtime.device or device_of(optree.tree_leaves(given)) or default
        self.device = torch.device("cpu") if self.device.type == "meta" else self.device
        like = optree.tree_map(without_memory, given)
        register_dataclasses(like)
        self.form, self.leaves = manager.place(*manager.begun(like))
        self.where = self._where(self._program())
        self.saved: SavedLeaves = saved_leaves(manager, self.form, self.where.__getitem__)
        self.shards: dict[tuple[int, int], torch.Tensor] = {}  # by index of the held tensor and rank

    def state(self) -> TrainState:
        self._warn()
        wanted, numbers = self._wanted(), self._numbers()
        read = {index for leaf in wanted for piece in leaf.pieces for index in piece.held}
        handles = [self._handle(index, numbers, index in read) for index in range(len(self.leaves))]
        items = plan_restore(self.plan, wanted, self.manager.mesh)
        for rank in {rank: None for _, rank in self.shards}:
            mine = [item for item in items.rank(rank) if (item.part.held, rank) in self.shards]
            covered = Counter[int]()
            for item in mine:
                covered[item.part.held] += item.part.box.numel
            for (index, owner), shard in self.shards.items():
                if owner == rank and covered[index] < shard.numel():
                    shard.zero_()  # padding
            self.checkpoint.read(mine, lambda held, rank=rank: self.shards[held, rank], rank)  # type: ignore[misc]
        whose = f", of the state that call {self.runtime.calls} restored"
        return TrainState(self.checkpoint.step, tuple(handles), self.form, whose)

    # --- the layout ---

    def _like(self) -> PyTree:
        like = self.options.like
        if like is not None:
            return like() if callable(like) and not isinstance(like, torch.nn.Module) else like
        made = self.checkpoint.body["tree"]
        if made is None:
            raise CheckpointError(
                f"{self.checkpoint.path}: its parameters are in containers other than dicts with text as keys, lists "
                "and tuples, which a checkpoint does not name: give train.restore(path, like=params), parameters of "
                "the same structure; they may be on the meta device"
            )
        leaves = {leaf.key: leaf for leaf in self.plan.leaves if leaf.kind == "params"}

        def leaf(key: str) -> Any:
            if key not in leaves:
                return self.checkpoint.numbers[f"params/{key}"]
            return torch.empty(leaves[key].shape, dtype=leaves[key].dtype, device="meta")

        return tree_from_json(made, leaf)

    def _first_state(self) -> TrainState | None:
        """Return a first state for the leaves that the checkpoint lacks, with `partial`."""
        if not self.options.partial:
            return None
        if self.options.like is None:
            raise CheckpointError("partial=True takes new leaves from like=…, parameters with values, which is missing")
        return self.manager.init(self.options.like)

    def _program(self) -> PipelineProgram | None:
        """Return the program of a pipeline, with the ranks that hold each leaf; None if it is not known."""
        made = self.checkpoint.body["batch"]
        if pipeline_of(self.manager.f.layout) is None or made is None or self.manager.batches.own:
            return None

        def leaf(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            return hollow(Aval(tuple(value["shape"]), getattr(torch, value["dtype"]), self.device))

        def like(leaf: Any) -> Any:
            return hollow(Aval(tuple(leaf.shape), leaf.dtype, self.device)) if isinstance(leaf, torch.Tensor) else leaf

        params, state = self.form.trees(list(map(like, self.leaves)))
        try:
            program = self.manager.lower_for(self.form, tree_from_json(made, leaf), (params, state))
        except Exception:  # the batch of the saved run does not fit this plan, so all ranks hold all leaves
            return None
        is_chain = isinstance(program, PipelineProgram) and program.schedule.versions is None
        return program if is_chain else None

    def _where(self, program: PipelineProgram | None) -> list[Where]:
        """Return the ranks that hold each leaf."""
        found = [_owners(self.form, index) for index in range(len(self.form.specs))]
        plan = pipeline_of(self.manager.f.layout)
        if program is None or plan is None:
            return found
        tensors = (index for index, look in enumerate(self.form.looks) if isinstance(look, TensorSignature))
        for index, node in zip(tensors, program.inputs, strict=False):  # the batch follows
            found[index] += ((plan.axis, tuple(sorted(program.holders(node)))),)
        return found

    # --- leaves ---

    def _wanted(self) -> list[LeafLayout]:
        """Return the leaves to read, with the keys that they have in the checkpoint. Raise if they do not match."""
        held = {(leaf.kind, leaf.key): leaf for leaf in self.plan.leaves}
        names = {(kind, self._renamed(kind, key)): (kind, key) for kind, key in held}
        found, problems, used = [], [], set()
        every = [(leaf, False) for leaf in self.saved.tensors] + [(leaf, True) for leaf in self.saved.rounded]
        for leaf, is_rounded in every:
            old = names.get((leaf.kind, leaf.key))
            if old is None:
                if not (self.options.partial or leaf.key.startswith("~")):
                    problems.append(f"{leaf}: the checkpoint does not have it")
                continue
            used.add(old)
            saved = held[old]
            if saved.shape != leaf.shape:
                problems.append(f"{leaf}: {saved.shape} in the checkpoint, {leaf.shape} in this step")
            elif saved.dtype != leaf.dtype and not (is_rounded or self.options.cast):
                problems.append(f"{leaf}: {saved.dtype} in the checkpoint, {leaf.dtype} in this step; see cast=True")
            found.append(replace(leaf, key=old[1]))
        if not self.options.partial:
            extra = [held[old] for old in held if old not in used and not old[1].startswith("~")]
            problems += [f"{leaf}: this step does not have it" for leaf in extra]
        if problems:
            raise CheckpointError(
                f"{self.checkpoint.path} is not of this step's model and optimizer:\n  "
                + "\n  ".join(listed(problems))
                + "\nrename={old: new} restores renamed leaves; partial=True with like=… restores those that both have"
            )
        return found

    def _renamed(self, kind: str, key: str) -> str:
        for old, new in self.options.rename.items():
            if key == old or (kind == "optimizer" and key.endswith(f"/{old}")):
                return key.removesuffix(old) + new
        return key

    def _numbers(self) -> dict[int, Any]:
        """Return the values of the leaves that are not tensors, by index."""
        saved = {
            f"{kind}/{self._renamed(kind, rest)}": value
            for key, value in self.checkpoint.numbers.items()
            for kind, _, rest in [key.partition("/")]
        }
        found = {}
        for key, index in self.saved.numbers.items():
            if key in saved:
                found[index] = type(self.leaves[index])(saved[key])
            elif not self.options.partial and "/~" not in key:
                raise CheckpointError(f"{self.checkpoint.path}: it does not have the number {key!r}")
        return found

    def _handle(self, index: int, numbers: Mapping[int, Any], is_read: bool) -> Any:
        leaf, spec = self.leaves[index], self.form.specs[index]
        if not isinstance(leaf, torch.Tensor):
            return StaticLeaf(numbers.get(index, leaf))
        if not is_read:
            if self.first is not None:
                return self.first.handles[index]
            if leaf.is_meta:
                raise CheckpointError(f"{self.checkpoint.path}: it does not have a value for {self.form.path(index)}")
            return self.runtime.shard(leaf, spec)
        where, mesh = self.where[index], self.manager.mesh

        def shard(rank: int) -> torch.Tensor:
            coordinates = mesh.coordinates(rank)
            size = local_shape(leaf.shape, spec, mesh)
            if not all(coordinates[axis] in indices for axis, indices in where):
                return torch.empty(size, dtype=leaf.dtype, device="meta")
            made = torch.empty(size, dtype=leaf.dtype, device=self.device)
            self.shards[index, rank] = made
            return made

        return self.runtime.assemble(spec, where, shard)

    def _warn(self) -> None:
        saved, mine = self.checkpoint.body, self.manager
        if saved["seed"] != mine.options.seed:
            warnings.warn(
                f"{self.checkpoint.path} was saved by a step with seed={saved['seed']}, and this one has "
                f"seed={mine.options.seed}: random numbers differ from those of the uninterrupted run",
                RuntimeWarning,
                stacklevel=6,
            )
        now = _reduction(mine, self.runtime)
        if saved["reduction"] != now and "fast" in saved["reduction"] + now:
            warnings.warn(
                f"{self.checkpoint.path} was saved by a run with sums {saved['reduction']}, and this one has {now}: "
                "losses differ from those of the uninterrupted run by rounding; reduction='ordered' has the same bits",
                RuntimeWarning,
                stacklevel=6,
            )
