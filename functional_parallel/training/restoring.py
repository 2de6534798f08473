"""Restore training states: the leaves of a state, read by the plans of `checkpoint`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import optree
import torch

from sharding_specs import P, register_dataclasses

from ..checkpoint import (
    TOO_FAST,
    TRIES,
    Checkpoint,
    LeafInfo,
    LeafLayout,
    Peers,
    Piece,
    SavePlan,
    candidates,
    load_position,
    plan_restore,
    tree_from_json,
    tree_keys,
)
from ..errors import CheckpointError, DamagedCheckpointError, InputMismatchError, RemovedCheckpointError
from ..functions import PyTree
from ..ir import Aval, TensorSignature, hollow, without_memory
from ..runtime import Runtime, Where, device_of
from ..stateful import HeldLeaves, Sharded, StaticLeaf, handle_of_shards, listed, owners_along, peers_of, saved_shapes
from ..tracing import disable_ambient_modes
from .checkpoints import reduction_of
from .moving import HeldState
from .resizing import Resize, Rule, copies, resized
from .saved import SavedLeaves, saved_leaves
from .states import States
from .train_state import StateLayout, TrainState

T = TypeVar("T")


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
    resize: Mapping[str, Rule]
    batch: PyTree


def restore_state(states: States, path: Path, options: RestoreOptions) -> TrainState:
    """Return the state of a checkpoint; of the newest again, if a run removes it meanwhile. Every process calls it."""
    if options.resize and options.like is None:
        raise ValueError("resize=… takes the new shapes from like=…, parameters that may be on the meta device")
    runtime = states.runtime()
    peers, removed = peers_of(runtime), ""
    for _ in range(TRIES):
        found, problem = list[Path](), ""
        if peers.rank == 0:
            try:
                found = candidates(path, options.step)
            except CheckpointError as error:
                problem = removed or str(error)
        (found, problem), *_ = peers.exchange((found, problem), "to restore a checkpoint")
        if problem:
            raise (RemovedCheckpointError if removed else CheckpointError)(problem)
        try:
            return _first_intact(states, runtime, peers, found, options)
        except RemovedCheckpointError as error:
            removed = str(error)  # the error itself would keep what was read
    raise RemovedCheckpointError(TOO_FAST.format(path=path))


def _first_intact(
    states: States, runtime: Runtime[Any, Any], peers: Peers, found: list[Path], options: RestoreOptions
) -> TrainState:
    for number, each in enumerate(found):
        try:
            return _restored(states, runtime, peers, each, options)
        except DamagedCheckpointError as error:
            if not options.fallback or number + 1 == len(found):
                older = f"; fallback=True takes {found[number + 1].name}" if number + 1 < len(found) else ""
                raise DamagedCheckpointError(f"{error}{older}") from None
            if peers.rank == 0:
                told = f"{error}. Restoring {found[number + 1].name} instead"
                warnings.warn(told, RuntimeWarning, stacklevel=4)
    raise AssertionError("candidates is not empty")


def _restored(
    states: States, runtime: Runtime[Any, Any], peers: Peers, path: Path, options: RestoreOptions
) -> TrainState:
    checkpoint, nonces = _on_all(peers, "after opening a checkpoint", lambda: Checkpoint(path), lambda it: it.nonce)
    if len(set(nonces)) > 1:
        raise RemovedCheckpointError(f"{path}: it was replaced while it was opened")

    def restored() -> tuple[TrainState, str]:
        with disable_ambient_modes():
            restore = _Restore(states, runtime, checkpoint, options)
            state = restore.state()
        if options.data is not None:
            load_position(checkpoint.body["data_position"], options.data, peers)
        return state, " ".join(restore.sums)

    (state, _), sums = _on_all(peers, "after restoring a checkpoint", restored, lambda found: found[1])
    if len(set(sums)) > 1:
        raise InputMismatchError(
            "resize: the functions returned other values on other ranks: let them draw from a generator with a seed"
        )
    if peers.rank == 0:
        _warn(states, runtime, checkpoint)
    return state


_FAILURES = (CheckpointError, DamagedCheckpointError, RemovedCheckpointError)  # the last one decides


def _on_all(
    peers: Peers, doing: str, act: Callable[[], T], mark: Callable[[T], str] = lambda _: ""
) -> tuple[T, list[str]]:
    """Return the result of `act` and the marks of the results on all processes. What fails on one is raised on all."""
    failure, told, grade = None, "", -1
    try:
        result = act()
        told = mark(result)
    except Exception as error:
        failure, told = error, f"{type(error).__name__}: {error}"
        grade = max(number for number, kind in enumerate(_FAILURES) if not number or isinstance(error, kind))
    every = peers.exchange((told, grade), doing)
    worst = max(each for _, each in every)
    if failure is not None and grade == worst:
        try:
            raise failure
        finally:
            del failure  # in a cycle with this frame, it would keep what was read
    if worst >= 0:
        rank = [each for _, each in every].index(worst)
        raise _FAILURES[worst](f"rank {rank}: {every[rank][0]}")
    return result, [text for text, _ in every]


def load_state(states: States, state: TrainState, batch: PyTree) -> TrainState:
    """Return a state of another step in the layout of this step, by messages between the ranks. Every process calls it.

    Raises:
        TypeError: if the state is of simulated ranks, and this step is of real processes, or the reverse.
        ValueError: if a leaf of one step is not one of the other, or has another shape or dtype.
    """
    source = HeldState(state, states.runtime())
    options = RestoreOptions(None, source.leaves.params, None, {}, False, False, False, {}, batch)
    with disable_ambient_modes():
        return _Restore(states, states.runtime(), source, options).state()


def first_state(states: States, params: Sharded, batch: PyTree) -> TrainState:
    """Return the first state of sharded parameters, which are moved to the layout of this step."""
    runtime = states.runtime()
    held = params.source(runtime)
    device = runtime.device or device_of(held.handles) or torch.get_default_device()

    def zeros() -> PyTree:  # with the memory of one element
        return optree.tree_map(lambda x: torch.zeros_like(hollow(x, ()), device=device).expand(x.shape), params.shapes)

    options = RestoreOptions(None, zeros, None, {}, True, True, False, {}, batch)
    with disable_ambient_modes():
        restore = _Restore(states, runtime, held, options)
        leaves, owners = {leaf.key: leaf for leaf in held.plan.leaves}, restore.saved.owners
        named = [(name.partition("/")[2], leaves.get(owners[name])) for name in copies(states.optimizer, params.shapes)]
        added = (replace(leaf, kind="optimizer", key=key) for key, leaf in named if leaf is not None)
        restore.plan = replace(held.plan, leaves=(*held.plan.leaves, *added))
        return restore.state()


class _Restore:
    """A state from a checkpoint or from memory, for the ranks of this process."""

    def __init__(
        self, states: States, runtime: Runtime[Any, Any], source: Checkpoint | HeldLeaves, options: RestoreOptions
    ) -> None:
        self.states, self.runtime, self.source, self.options = states, runtime, source, options
        self.plan: SavePlan = source.plan
        self.first = self._first_state()
        given = self._like() if self.first is None else None  # it may be a function, which is called once
        held = optree.tree_leaves(given) if self.first is None else self.first.handles
        device = runtime.device or device_of(held) or torch.get_default_device()
        self.device = torch.device("cpu") if device.type == "meta" else device
        self.layout, self.leaves = self._layout(given)
        self.where = self._where()
        self.saved: SavedLeaves = saved_leaves(states, self.layout, self.where.__getitem__)
        self.resize = Resize(options.resize, self.saved, states.optimizer, states.requests)
        self.made: dict[str, list[LeafLayout]] = {}  # leaves that functions resize, by kind and key
        self.sums: list[str] = []  # of these
        self.shards: dict[tuple[int, int], torch.Tensor] = {}  # by index of the held tensor and rank

    def state(self) -> TrainState:
        wanted, numbers = self._wanted(), self._numbers()
        read = {index for leaf in wanted for piece in leaf.pieces for index in piece.held}
        handles = [self._handle(index, numbers, index in read) for index in range(len(self.leaves))]
        kept = [leaf for leaf in wanted if f"{leaf.kind}/{leaf.key}" not in self.made]
        items = plan_restore(self.plan, kept, self.states.mesh)
        self.source.fill(items, self.shards)
        for name, leaves in self.made.items():
            self._make(name, leaves)
        for index in read:
            if self.layout.specs[index].storage:
                handles[index] = self._handle(index, numbers, True)
        whose = f", of the state that call {self.runtime.calls} restored"
        return TrainState(self.source.step, tuple(handles), self.layout, whose)

    def _make(self, name: str, leaves: list[LeafLayout]) -> None:
        """Fill the shards of a leaf, of a parameter its master and the stored one, by a function of the old leaf."""
        rule, mesh = self.resize.rule(leaves[0]), self.states.mesh
        assert callable(rule)
        new = resized(rule, self._full(name), leaves[0])
        self.sums.append(self.runtime.checksum(new))
        for rank in {rank: None for _, rank in self.shards}:
            for leaf in leaves:
                for piece in leaf.pieces:
                    for region in leaf.regions(piece, mesh, mesh.coordinates(rank)):
                        for part in region.parts:
                            if (part.held, rank) in self.shards:
                                part.view(self.shards[part.held, rank]).copy_(new[part.box.slices])

    def _full(self, name: str) -> torch.Tensor:
        """Return the full old leaf, on each process with a rank of this step."""
        if isinstance(self.source, Checkpoint):
            return self.source.tensor(name)
        (old,) = (leaf for leaf in self.plan.leaves if f"{leaf.kind}/{leaf.key}" == name)
        full = torch.zeros(old.shape, dtype=old.dtype, device=self.device)
        items = plan_restore(self.plan, [replace(old, pieces=(Piece(P()),))], self.states.mesh)
        self.source.fill(items, {(0, rank): full for rank in list(self.runtime.own_ranks)[:1]})
        return full

    # --- the layout ---

    def _layout(self, given: PyTree) -> tuple[StateLayout, list[Any]]:
        """Return the layout of the state and its leaves, tensors without values."""
        if self.first is not None:
            held = zip(self.first.layout.signatures, self.first.handles, strict=True)
            return self.first.layout, [
                torch.empty(look.shape, dtype=look.dtype, device="meta")
                if isinstance(look, TensorSignature)
                else handle.value
                for look, handle in held
            ]
        like = optree.tree_map(without_memory, given)
        register_dataclasses(like)
        return self.states.place(*self.states.begun(like))

    def _like(self) -> PyTree:
        like = self.options.like
        if isinstance(like, Sharded):
            return like.shapes
        if like is not None:
            return like() if callable(like) and not isinstance(like, torch.nn.Module) else like
        made = self.source.body["tree"]
        if made is None:
            raise CheckpointError(
                f"{self.source.path}: its parameters are in containers other than dicts with text as keys, lists "
                "and tuples, which a checkpoint does not name: give train.restore(path, like=params), parameters of "
                "the same structure; they may be on the meta device"
            )
        return saved_shapes(self.source)

    def _first_state(self) -> TrainState | None:
        """Return a first state for the leaves that the checkpoint lacks: frozen ones, and others with `partial`."""
        like, lacks = self.options.like, self.source.left_out
        if not self.options.partial and not lacks:
            return None
        if isinstance(like, Sharded):
            return first_state(self.states, like, self._batch())
        leaves = zip(tree_keys(like), optree.tree_leaves(like), strict=True)  # a function is one leaf
        given = {key for key, leaf in leaves if not getattr(leaf, "is_meta", False)}
        frozen = [name.removeprefix("params/") for name in lacks if name.startswith("params/")]
        empty = [key for key in frozen if not callable(like) and self.options.rename.get(key, key) not in given]
        if empty:
            raise CheckpointError(
                f"{self.source.path} was saved with only='trained', without these frozen parameters: "
                f"{', '.join(listed(empty))}. Give train.restore(path, like=params), with their values"
            )
        if like is None:
            raise CheckpointError("partial=True takes new leaves from like=…, parameters with values, which is missing")
        return self.states.create(like, self._batch())

    def _batch(self) -> PyTree:
        """Return the batch of `restore`, or with "saved" the checkpoint's batch, without values."""
        batch = self.options.batch
        if not (isinstance(batch, str) and batch == "saved"):
            return batch
        made = self.source.body["batch"]
        if made is None:
            raise CheckpointError(
                f"{self.source.path}: it does not have the shapes of a batch: no step had been lowered, or the "
                "batch has other containers than dicts, lists and tuples: give train.restore(path, batch=batch)"
            )

        def leaf(value: Any) -> Any:
            is_tensor = isinstance(value, dict)
            return (
                torch.empty(value["shape"], dtype=getattr(torch, value["dtype"]), device="meta") if is_tensor else value
            )

        return tree_from_json(made, leaf)

    def _where(self) -> list[Where]:
        """Return the ranks that hold each leaf."""
        found = [owners_along(spec) for spec in self.layout.specs]
        program = self.states.programs.holding(self.layout, self.leaves, self._batch())
        if program is None:
            return found
        tensors = (index for index, look in enumerate(self.layout.signatures) if isinstance(look, TensorSignature))
        for index, node in zip(tensors, program.inputs, strict=False):  # the batch follows
            found[index] += ((program.axis, tuple(sorted(program.holders(node)))),)
        return found

    # --- leaves ---

    def _wanted(self) -> list[LeafLayout]:
        """Return the leaves to read, with the keys that they have in the checkpoint. Raise if they do not match."""
        held = {f"{leaf.kind}/{leaf.key}": leaf for leaf in self.plan.leaves}
        left_out = self.source.left_out
        known: dict[str, LeafLayout | LeafInfo] = {**held, **left_out}
        found, problems, used = list[LeafLayout](), list[str](), set[str]()
        every = [(leaf, False) for leaf in self.saved.tensors] + [(leaf, True) for leaf in self.saved.rounded]
        for leaf, is_rounded in every:
            old = self._old(f"{leaf.kind}/{leaf.key}", known)
            used.add(old)
            if old:
                problems += self._differences(leaf, known[old], is_rounded or old in left_out)
            elif not (self.options.partial or self._is_optional(leaf.key)):
                problems.append(f"{leaf}: {self.source.kind} does not have it")
            if old in held:
                found.append(replace(leaf, key=held[old].key))
                if held[old].shape != leaf.shape and callable(self.resize.rule(leaf)):
                    self.made.setdefault(old, []).append(leaf)
        if not self.options.partial:
            extra = [leaf for name, leaf in held.items() if name not in used and not leaf.key.startswith("~")]
            problems += [f"{leaf}: this step does not have it" for leaf in extra]
        if problems:
            told = "\n  ".join(listed(problems))
            raise self.source.error(
                f"{self.source.path} is not of this step's model and optimizer:\n  {told}{self.source.hint}"
            )
        return found

    def _is_optional(self, key: str) -> bool:
        """Whether the leaf is one of a request, which makes it at the start."""
        return any(each.optional and each.owns(key) for each in self.states.requests)

    def _differences(self, leaf: LeafLayout, saved: LeafLayout | LeafInfo, any_dtype: bool) -> Iterator[str]:
        is_resized = self.resize.rule(leaf) is not None and len(saved.shape) == len(leaf.shape)
        if saved.shape != leaf.shape and not is_resized:
            yield f"{leaf}: {saved.shape} in {self.source.kind}, {leaf.shape} in this step"
        elif saved.dtype != leaf.dtype and not (any_dtype or self.options.cast):
            yield f"{leaf}: {saved.dtype} in {self.source.kind}, {leaf.dtype} in this step{self.source.cast_hint}"

    def _old(self, name: str, known: Container[str]) -> str:
        """Return the name, kind and key, that a leaf of this step has in the checkpoint; "" if it is not there."""
        owner = self.saved.owners.get(name, "")
        old = next((old for old, new in self.options.rename.items() if new == owner), owner)
        text, part = f"{name}/", f"/{owner}/"
        layouts = [at for at in range(len(text)) if text.startswith(part, at)] if old != owner else []
        names = [f"{text[:at]}/{old}/{text[at + len(part) :]}"[:-1] for at in layouts] or [name]
        return next((each for each in names if each in known), "")

    def _numbers(self) -> dict[int, Any]:
        """Return the values of the leaves that are not tensors, by index."""
        found, saved = {}, self.source.numbers
        for name, index in self.saved.numbers.items():
            old = self._old(name, saved)
            if old:
                found[index] = type(self.leaves[index])(saved[old])
            elif not self.options.partial and "/~" not in name:
                raise CheckpointError(f"{self.source.path}: it does not have the number {name!r}")
        return found

    def _handle(self, index: int, numbers: Mapping[int, Any], is_read: bool) -> Any:
        leaf, spec = self.leaves[index], self.layout.specs[index]
        if not isinstance(leaf, torch.Tensor):
            return StaticLeaf(numbers.get(index, leaf))
        if not is_read:
            if self.first is not None:
                return self.first.handles[index]
            if leaf.is_meta:
                raise CheckpointError(f"{self.source.path}: it does not have a value for {self.layout.path(index)}")
            return self.runtime.shard(leaf, spec)

        aval = Aval(tuple(leaf.shape), leaf.dtype, self.device)
        return handle_of_shards(self.runtime, spec, aval, self.where[index], index, self.shards)


def _warn(states: States, runtime: Runtime[Any, Any], checkpoint: Checkpoint) -> None:
    saved = checkpoint.body
    if saved["seed"] != states.options.seed:
        warnings.warn(
            f"{checkpoint.path} was saved by a step with seed={saved['seed']}, and this one has "
            f"seed={states.options.seed}: random numbers differ from those of the uninterrupted run",
            RuntimeWarning,
            stacklevel=6,
        )
    now = reduction_of(states, runtime)
    if saved["reduction"] != now:
        warnings.warn(
            f"{checkpoint.path} was saved by a run with sums {saved['reduction']}, and this one has {now}: "
            "losses differ from those of the uninterrupted run by rounding; reduction='ordered' has the same bits",
            RuntimeWarning,
            stacklevel=6,
        )
