"""Tree of tensors that stays on the ranks between calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, SupportsIndex

import optree
import torch

from sharding_specs import Mesh, P, SpecError, broadcast_specs, register_dataclasses, tree_paths, validate

from ..checkpoint import (
    Checkpoint,
    Contents,
    LeafLayout,
    SavePlan,
    begin_save,
    newest,
    plan_restore,
    plan_save,
    tree_keys,
    tree_to_json,
)
from ..functions import PyTree, SpecTree, StackedTree
from ..ir import Aval, without_memory
from ..runtime import (
    PipelineRuntime,
    PipelineValue,
    Runtime,
    Where,
    copy_if_aliased,
    default_runtime,
    device_of,
    storages,
)
from ..tracing import disable_ambient_modes
from .held import Held, StaticLeaf, copied, full_leaves, handle_of_shards, hollow_on, require_holders, tensors
from .held_leaves import HeldLeaves, leaf_layout, peers_of, saved_shapes
from .signatures import listed

Fill = Callable[[Sequence[LeafLayout], dict[tuple[int, int], torch.Tensor]], None]


class Sharded(Held):
    """Tree of tensors that stays on the ranks of a mesh, such as parameters, an optimizer state or a cache.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh, P
    >>> weights = fp.Sharded.of({"w": torch.arange(4.0)}, Mesh(data=2), P("data"))
    >>> weights
    Sharded on Mesh(data=2)
      w: (4,) float32, P('data')
    >>> weights.relayout(P()).full()
    {'w': tensor([0., 1., 2., 3.])}

    `train.sharded`, `train.frozen` and functions compiled with `state=` return such trees. Compiled functions and
    `train.init` take them.

    Attributes:
        mesh: the mesh.
        shapes: the tree, with tensors without memory.
        as_argument: text for the error about a tree inside of another argument.
    """

    as_argument: ClassVar = "an argument by itself, not a part of one: give it alone, or .full()"

    __slots__ = ("_hollows", "_runtime", "_source", "_specs", "_stacks", "mesh", "shapes")

    def __init__(
        self,
        handles: tuple[Any, ...] | None,
        shapes: PyTree,
        specs: Sequence[P],
        runtime: Callable[[], Runtime[Any, Any]],
        stacks: StackedTree | None = None,
        source: Callable[[], tuple[Any, ...]] | None = None,
    ) -> None:
        super().__init__(handles)
        self.shapes, self.mesh, self._specs = shapes, runtime().mesh, tuple(specs)
        self._runtime, self._stacks, self._source = runtime, stacks, source
        self._hollows: dict[torch.device, PyTree] = {}

    @classmethod
    def of(cls, tree: PyTree, mesh: Mesh, specs: SpecTree) -> Sharded:
        """Shard a tree of full tensors, which is the same on every rank.

        Args:
            tree: the tree.
            mesh: the mesh.
            specs: a spec, or a pytree prefix of specs.

        Raises:
            SpecError: if the specs do not fit the tree.
            InputMismatchError: if the tree differs between ranks.
        """
        register_dataclasses(tree)
        shapes = optree.tree_map(without_memory, tree)
        wanted, runtime = _fitting(specs, shapes, mesh), partial(default_runtime, mesh)
        leaves, paths = optree.tree_leaves(tree), tree_paths(tree)
        with disable_ambient_modes():
            rows = [(path, x) for path, x in zip(paths, leaves, strict=True) if isinstance(x, torch.Tensor)]
            runtime().check_same("Sharded.of", [path or "the tensor" for path, _ in rows], [x for _, x in rows])
            given = storages(*leaves)
            handles = [
                copy_if_aliased(runtime().shard(x, spec), given) if isinstance(x, torch.Tensor) else StaticLeaf(x)
                for x, spec in zip(leaves, wanted, strict=True)
            ]
        return cls(tuple(handles), shapes, wanted, runtime)

    @classmethod
    def made(
        cls,
        structure: optree.PyTreeSpec,
        leaves: Sequence[Any],
        specs: Sequence[P],
        runtime: Callable[[], Runtime[Any, Any]],
    ) -> Sharded:
        """Return the tree of results of a program: handles, with the specs of these, and leaves that are no tensors."""
        remaining, held, on = iter(specs), list[tuple[Any, Any, P]](), runtime()
        for leaf in leaves:
            if isinstance(leaf, (torch.Tensor, list, PipelineValue)):
                spec = next(remaining)
                held.append((leaf, without_memory(on.like(leaf, spec)), spec))
            else:
                held.append((StaticLeaf(leaf), leaf, P()))
        handles, shapes, full = zip(*held, strict=True) if held else ((), (), ())
        return cls(tuple(handles), structure.unflatten(shapes), full, runtime)

    @classmethod
    def restore(cls, path: str | Path, mesh: Mesh, specs: SpecTree, *, step: int | None = None) -> Sharded:
        """Read the parameters of a checkpoint onto a mesh. Each rank reads its shards.

        Args:
            path: folder of checkpoints, or one checkpoint, of `Sharded.save` or `train.save`.
            mesh: the mesh.
            specs: a spec, or a pytree prefix of specs.
            step: step of the checkpoint; by default the newest.

        Raises:
            CheckpointError: if there is none. A tree with other containers than dicts, lists and tuples is a dict.
            SpecError: if the specs do not fit the tree.
        """

        def read(checkpoint: Checkpoint) -> Sharded:
            def fill(leaves: Sequence[LeafLayout], shards: dict[tuple[int, int], torch.Tensor]) -> None:
                checkpoint.fill(plan_restore(checkpoint.plan, leaves, mesh), shards)

            runtime = partial(default_runtime, mesh)
            return filled(saved_shapes(checkpoint), specs, runtime, torch.get_default_device(), fill)

        return newest(Path(path), step, read)

    @property
    def handles(self) -> tuple[Any, ...]:
        """Handle of the runtime for each leaf."""
        return super().handles if self._source is None else self._source()

    def _donated(self, failure: str) -> str:
        how = f"failed ({failure}) and may have written over part of it" if failure else "wrote its result into it"
        return f"this Sharded was given to a call that {how}: use the call's result, or give it x.copy() to keep x"

    @property
    def specs(self) -> SpecTree:
        """Tree of the specs."""
        return self._structure.unflatten(self._specs)

    @property
    def _structure(self) -> optree.PyTreeSpec:
        """Structure of the handles."""
        return optree.tree_structure(self.shapes) if self._stacks is None else self._stacks.layers

    def runtime(self) -> Runtime[Any, Any]:
        """Return the runtime, after a check that it holds the values."""
        runtime = self._runtime()
        require_holders(runtime, self.handles, "this Sharded", "it was made")
        return runtime

    def full(self) -> PyTree:
        """Return the tree of full tensors, in separate memory. Every process must call it."""
        found = self._structure.unflatten(full_leaves(self.runtime(), self.handles, self._specs, ", of a Sharded"))
        return found if self._stacks is None else self._stacks.restack(found)

    def copy(self) -> Sharded:
        """Copy the tree into separate memory. Calls that donate this tree do not change the copy."""
        return Sharded(copied(self.handles), self.shapes, self._specs, self._runtime, self._stacks)

    def cast(self, like: PyTree) -> Sharded:
        """Return the tree in the dtypes of another tree. Each rank casts its shards. Stacked layers do not change."""
        dtypes = [x.dtype if isinstance(x, torch.Tensor) else None for x in optree.tree_leaves(like)]
        old = [x.dtype if isinstance(x, torch.Tensor) else None for x in optree.tree_leaves(self.shapes)]
        if dtypes == old or self._stacks is not None:
            return self
        runtime = self.runtime()

        def handle(x: Any, spec: P, dtype: torch.dtype | None) -> Any:
            if dtype is None:
                return x
            return runtime.assemble(spec, runtime.where(x), lambda rank: runtime.shard_of(x, spec, rank).to(dtype))

        handles = map(handle, self.handles, self._specs, dtypes)
        return Sharded(tuple(handles), optree.tree_map(without_memory, like), self._specs, self._runtime)

    def relayout(self, specs: SpecTree = None, mesh: Mesh | None = None) -> Sharded:
        """Move the tree into another layout. No rank holds a full leaf, unless it is replicated. The tree stays usable.

        Args:
            specs: a spec, or a pytree prefix of specs. By default the specs of this tree.
            mesh: a mesh of the same processes, or of some of them. By default the mesh of this tree.

        Returns:
            The tree in the new layout. Every process must call it.

        Raises:
            SpecError: if the specs do not fit the tree or the mesh.
        """
        mesh = self.mesh if mesh is None else mesh
        wanted = self.specs if specs is None and self._stacks is None else specs
        return self._moved(wanted, partial(default_runtime, mesh), lambda _: ())

    def _moved(
        self, specs: SpecTree, runtime: Callable[[], Runtime[Any, Any]], where: Callable[[int], Where]
    ) -> Sharded:
        source, mesh = self.source(runtime()), runtime().mesh

        def fill(leaves: Sequence[LeafLayout], shards: dict[tuple[int, int], torch.Tensor]) -> None:
            source.fill(plan_restore(source.plan, leaves, mesh), shards)

        return filled(self.shapes, specs, runtime, device_of(self.handles) or torch.get_default_device(), fill, where)

    def source(self, target: Runtime[Any, Any]) -> HeldLeaves:
        """Return the values as the source of a move to the ranks of `target`, with the plan of its full tensors."""
        source = HeldLeaves(self.runtime(), self.handles, self._specs, target)
        (where, *_), found, first = source.agreed(source.where), list[LeafLayout](), 0
        leaves = optree.tree_leaves(self.shapes)
        lengths = (0,) * len(leaves) if self._stacks is None else self._stacks.lengths
        for key, leaf, length in zip(tree_keys(self.shapes), leaves, lengths, strict=True):
            held = tuple(range(first, first + (length or 1)))
            first += len(held)
            if isinstance(leaf, torch.Tensor):
                found.append(leaf_layout("params", key, leaf, held, bool(length), self._specs, where.__getitem__))
        source.plan = SavePlan(self.mesh, tuple(found), "the tree")
        return source

    @property
    def is_view(self) -> bool:
        """Whether the handles belong to a training state, which alone can be donated."""
        return self._source is not None

    def require(
        self,
        runtime: Runtime[Any, Any],
        name: str,
        stacks: StackedTree | None,
        paths: Sequence[str],
        specs: Sequence[P],
    ) -> None:
        """Check that the program `name` takes the tree in this layout. Paths and specs are of the program's inputs."""
        told = self._differences(runtime, name, stacks, paths, specs)
        if told:
            raise SpecError(
                "a Sharded has another layout than the function that is called:\n  "
                + "\n  ".join(listed(told))
                + "\nGive the function x.relayout(specs, mesh), with its mesh and specs, or x.full()"
            )

    def _differences(
        self,
        runtime: Runtime[Any, Any],
        name: str,
        stacks: StackedTree | None,
        paths: Sequence[str],
        specs: Sequence[P],
    ) -> list[str]:
        held = self.runtime()
        told = [] if self.mesh == runtime.mesh else [f"it lies on {self.mesh!r}, and {name} runs on {runtime.mesh!r}"]
        if type(held) is not type(runtime) or self._stacks != stacks:
            told += [f"it lies {_stages(held, self._stacks)}, for {name} it must lie {_stages(runtime, stacks)}"]
        mine = [spec for spec, x in zip(self._specs, self.handles, strict=True) if not isinstance(x, StaticLeaf)]
        rows = zip(paths, mine, specs, strict=False)
        return told + [f"argument {path}: {a!r} in the Sharded, {b!r} for {name}" for path, a, b in rows if a != b]

    def placed(
        self,
        runtime: Callable[[], Runtime[Any, Any]],
        name: str,
        stacks: StackedTree | None,
        paths: Sequence[str],
        specs: Sequence[P],
        where: Callable[[int], Where],
    ) -> Sharded:
        """Return the tree in the layout of the program `name`, moved if it has another layout. `where` is by input."""
        differs = self._differences(runtime(), name, stacks, paths, specs)
        if stacks is not None or not (differs or self._is_on_other_stages(where)):
            self.require(runtime(), name, stacks, paths, specs)
            return self
        rest, number = iter(enumerate(specs)), dict[int, int]()
        full = []
        for index, leaf in enumerate(optree.tree_leaves(self.shapes)):
            number[index], spec = next(rest) if isinstance(leaf, torch.Tensor) else (0, P())
            full.append(spec)
        return self._moved(
            optree.tree_structure(self.shapes).unflatten(full), runtime, lambda index: where(number[index])
        )

    def _is_on_other_stages(self, where: Callable[[int], Where]) -> bool:
        held = self.runtime()
        if held.mesh.is_partial and not held.is_simulated:  # all processes would have to take part in a move
            return False
        for number, handle in enumerate(tensors(self.handles)):
            known = dict(held.where(handle))
            if any(not set(ranks) <= set(known.get(axis, ranks)) for axis, ranks in where(number)):
                return True
        return False

    def replaced(self, leaves: Sequence[Any]) -> Sharded:
        """Return a tree in the same layout of other values: handles of tensors, and leaves that are not tensors."""
        like, structure = optree.tree_flatten(self.shapes)
        pairs = list(zip(like, leaves, strict=True))
        handles = (x if isinstance(old, torch.Tensor) else StaticLeaf(x) for old, x in pairs)
        shapes = structure.unflatten(old if isinstance(old, torch.Tensor) else x for old, x in pairs)
        return Sharded(tuple(handles), shapes, self._specs, self._runtime)

    def save(self, path: str | Path, *, step: int = 0, extra: Any = None) -> None:
        """Save the tree as a checkpoint, which `restore`, `fp.checkpoint.load` and `inspect` read.

        Args:
            path: folder of checkpoints, which all hosts share. It is created.
            step: number of the checkpoint.
            extra: other values to save; JSON.

        Raises:
            CheckpointError: on every process, if a process could not write its part, or another run writes there.
        """
        runtime = self.runtime()
        plan = plan_save(self.source(runtime).plan.leaves, self.mesh)
        keys = tree_keys(self.shapes)
        tree = tree_to_json(optree.tree_structure(self.shapes).unflatten(keys), str)
        absent = dict.fromkeys(("seed", "loss_scale", "data_position", "batch"))
        body = {**absent, "step": step, "reduction": "ordered", "extra": extra, "tree": tree, "left_out": {}}
        rows = zip(keys, optree.tree_leaves(self.shapes), strict=True)
        numbers = {f"params/{key}": value for key, value in rows if not isinstance(value, torch.Tensor)}

        def shard(index: int, rank: int) -> torch.Tensor:
            return runtime.shard_of(self.handles[index], self._specs[index], rank)

        save = begin_save(peers_of(runtime), Path(path), Contents(plan, shard, numbers, body), keep=None, copies=None)
        save.run()
        save.wait()

    def like(self, device: torch.device | None) -> PyTree:
        """Return the tree with tensors without values, for a trace."""
        place = device or device_of(self.handles) or torch.get_default_device()
        if place not in self._hollows:
            self._hollows[place] = hollow_on(self.shapes, place)
        return self._hollows[place]

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a Sharded is what this process holds of a tree, its rank's shards alone: save it by x.save(path), which "
            "all ranks call, or pickle x.full()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        return self.copy()

    def __repr__(self) -> str:
        is_donated, paths = self._handles is None and not self.is_view, tree_paths(self.specs)
        shapes = self.shapes if self._stacks is None else self._stacks.unstack(self.shapes)
        rows = zip(paths, optree.tree_leaves(shapes), self._specs, strict=True)
        lines = [f"  {path or 'the tensor'}: {_text(x)}, {spec!r}" for path, x, spec in rows]
        return "\n".join([f"Sharded on {self.mesh!r}{', donated' if is_donated else ''}", *lines])


def _stages(runtime: Runtime[Any, Any], stacks: StackedTree | None) -> str:
    where = "on the stages of a pipeline" if isinstance(runtime, PipelineRuntime) else "on all ranks"
    return f"{where} {'with' if stacks is not None else 'without'} stacks of layers"


def _text(x: Any) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" if isinstance(x, torch.Tensor) else repr(x)


def _fitting(specs: SpecTree, shapes: PyTree, mesh: Mesh) -> list[P]:
    """Return a spec for each leaf, after a check that it fits."""
    full = broadcast_specs(specs, shapes, name="the specs of a Sharded")
    full = optree.tree_map(lambda x, spec: spec if isinstance(x, torch.Tensor) else P(), shapes, full)
    validate(shapes, full, mesh)
    found: list[P] = optree.tree_leaves(full)
    return found


def filled(
    tree: PyTree,
    specs: SpecTree,
    on: Callable[[], Runtime[Any, Any]],
    device: torch.device,
    fill: Fill,
    where: Callable[[int], Where] = lambda _: (),
) -> Sharded:
    """Return a tree with shards that `fill` fills.

    Args:
        tree: the tree, of tensors without values.
        specs: a spec, or a pytree prefix of specs.
        on: returns the runtime.
        device: device of the shards, if the runtime does not decide.
        fill: fills shards, by the index of the leaf and the rank.
        where: returns the ranks that hold a leaf. By default all do.
    """
    runtime = on()
    mesh, shards = runtime.mesh, dict[tuple[int, int], torch.Tensor]()
    wanted, device = _fitting(specs, tree, mesh), runtime.device or device
    rows = list(enumerate(zip(tree_keys(tree), optree.tree_leaves(tree), wanted, strict=True)))

    def handle(index: int, x: Any, spec: P) -> Any:
        if not isinstance(x, torch.Tensor):
            return StaticLeaf(x)
        return handle_of_shards(runtime, spec, Aval(tuple(x.shape), x.dtype, device), where(index), index, shards)

    with disable_ambient_modes():
        handles = [handle(index, x, spec) for index, (_, x, spec) in rows]
        like = [(index, key, x) for index, (key, x, _) in rows if isinstance(x, torch.Tensor)]
        fill([leaf_layout("params", key, x, (index,), False, wanted, where) for index, key, x in like], shards)
        for index, (_, x, spec) in rows:
            if spec.storage:
                handles[index] = handle(index, x, spec)
    return Sharded(tuple(handles), optree.tree_map(without_memory, tree), wanted, on)
