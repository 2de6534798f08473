"""Transform of a function that is global with respect to one mesh axis into a function that is local to it.

The forward of the function is traced at global shapes, with the axis hidden. It is then run on the shards of a rank,
with the collectives inserted. This run is differentiable, so gradients and their collectives follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import fx

from sharding_specs import (
    Mesh,
    P,
    Placement,
    SpecError,
    broadcast_specs,
    register_dataclasses,
    require_dims,
    tree_paths,
)
from sharding_specs.blocks import inside, nested, units

from ..collectives import DimSplit, axis_dim_split, current_axes, hidden_axes, hide, mesh_axis_size
from ..errors import PartitionError
from ..functions import (
    LocalFunction,
    PyTree,
    Resolved,
    SpecTree,
    as_local_function,
    axis_mesh,
    beside,
    filled,
    refuse_idle_states,
    refuse_unknown_axes,
    specs_per_leaf,
)
from ..ir import Aval, Traced, hollow, info, leaf_signature
from ..ops import to_device
from ..rules import REDUCED, REPLICATED, AxisLayout, Owned, Shard, TargetLayout, convert
from ..tracing import depends_on_layouts, recorder, trace
from .preparation import prepare
from .region import axis_layout_of
from .run import run_partitioned
from .values import PartitionedValue

Specs = Callable[[tuple[PyTree, ...]], tuple[SpecTree, ...]]
ResolvedSpecs = Callable[[Resolved], tuple[SpecTree, ...]]  # from the layouts of the function inside


def partition(
    f: Callable[..., PyTree],
    axis: str,
    in_specs: tuple[SpecTree, ...] | Specs,
    out_specs: SpecTree | None = None,
    *,
    parameters: int | None = 0,
    gathered: Sequence[int] = (),
    strict: bool = False,
) -> LocalFunction:
    """Partition a function that is global with respect to one mesh axis, so that it is local to the axis.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh, P
    >>> f = fp.partition(lambda w, x: (x @ w).sum(), "data", (P(), P("data")))
    >>> step = fp.compile(f, Mesh(data=2))
    >>> step(torch.ones(3, 2), torch.ones(4, 3))
    tensor(24.)
    >>> step.program.counts()
    {('psum', ('data',)): 1}

    Args:
        f: a pure function, or one that is already local to other axes.
        axis: the mesh axis.
        in_specs: per argument a spec, or a pytree prefix of specs, or a function from the arguments to that tuple. Only
            the entries of this axis are used.
        out_specs: the required layouts of the results along the axis. Without it, sharded results stay sharded and
            partial sums are completed.
        parameters: the index of the argument with leaves that keep their layout when operands of an op disagree, or
            None.
        gathered: arguments that are sharded only at rest. They are gathered at entry (replicated, their gradients
            unreduced), and their sharding is not propagated. The transpose of that gather is ZeRO's reduce-scatter.
        strict: whether to raise for ops without a sharding rule, instead of computing them on full tensors with a
            warning.

    Returns:
        The local function. Its layout names this axis in addition to the axes of `f`.

    Raises:
        PartitionError: when `f` is local to the axis already. When called, if a dim does not divide, or with `strict`
            if an op has no rule.
        SpecError: when called, if the specs do not fit the arguments.
    """

    def own(inner: Resolved) -> tuple[SpecTree, ...]:
        return in_specs(inner.args) if callable(in_specs) else _as_tuple(in_specs, inner.args)

    name = f"partition({axis!r})"
    return Partitioning(name, axis, own, out_specs, parameters, tuple(gathered), strict).apply(f)


@dataclass(frozen=True)
class Partitioning:
    """How a transform partitions a function over one mesh axis. The fields are the arguments of `partition`.

    An `owner` holds all arguments and results at rest. It scatters the arguments that `in_specs` shard, and broadcasts
    any other value when an op of all ranks needs it.
    """

    name: str  # of the transform, for messages
    axis: str
    in_specs: ResolvedSpecs
    out_specs: SpecTree | None = None
    parameters: int | None = 0
    gathered: tuple[int, ...] = ()
    strict: bool = False
    owner: Owned | None = None
    lies: tuple[str, str] | None = None  # how parameters and other arguments lie, for messages

    def apply(self, f: Callable[..., PyTree]) -> LocalFunction:
        inner = as_local_function(f)
        if self.axis in inner.applied.axes:
            raise PartitionError(f"{inner} is local to {self.axis!r} already; each axis is taken by one transform")

        def resolve(resolved: Resolved) -> Resolved:
            return self.resolve(resolved, inner.applied.axes)

        call = _Partition(inner, self)
        return inner.then(call, describe=self.name, lies=self.lies, axis=self.axis, resolver=resolve)

    def resolve(self, inner: Resolved, axes: Sequence[str]) -> Resolved:
        mesh_axis_size(self.axis)  # raises for an axis that is not bound
        trees = specs_per_leaf(self.in_specs(inner), inner.args, f"specs of {self.name}")
        refuse_unknown_axes(trees, self.name, {self.axis})
        refuse_idle_states(trees, self.name, self.axis)
        own: list[P] = optree.tree_leaves(trees)
        if (owner := self.owner) is not None:
            specs = [_with_place(spec, owner, self.axis, inner.mesh) for spec in inner.specs]
        else:
            specs = []
            for index, (before, after) in enumerate(zip(inner.specs, own, strict=True)):
                try:
                    specs.append(_merged(before, after, self.axis, axes, inner.mesh))
                except SpecError as error:
                    raise self._does_not_combine(inner, index, after.only({self.axis}), str(error)) from None
        return inner.outside(self.name, specs, own)

    def _does_not_combine(self, inner: Resolved, index: int, own: P, why: str) -> SpecError:
        path, leaf, before = tree_paths(inner.args)[index], optree.tree_leaves(inner.args)[index], inner.specs[index]
        return SpecError(
            f"{self.name}: argument {path} of shape {tuple(leaf.shape)}: {own!r} cannot be combined with {before!r}, "
            f"its layout inside: {why}\nSplit another dim, or the blocks, as {before.divided(own, inner.mesh)!r}"
        )


@dataclass
class _Entry:
    traced: Traced
    out_tree: optree.PyTreeSpec
    out_inner: list[P]


class _Partition:
    def __init__(self, f: LocalFunction, how: Partitioning) -> None:
        self.f, self.axis, self.how = f, how.axis, how
        self.entries: dict[Any, _Entry] = {}

    def __call__(self, resolved: Resolved, *args: PyTree) -> tuple[PyTree, SpecTree]:
        register_dataclasses(args)
        specs = resolved.own
        leaves, tree = optree.tree_flatten(args)
        rest = zip(leaves, resolved.specs, strict=True)
        leaves = [leaf if spec.memory == "device" else to_device(leaf) for leaf, spec in rest]
        places = [axis_layout_of(spec, self.axis, self.f.applied.axes) for spec in specs]
        given, held, owner = leaves, places, self.how.owner
        if owner is None:
            cut = axis_dim_split(self.axis)
            leaves, places = self._gather(args, leaves, places, resolved, cut)
        else:
            cut = self._split(args, leaves, places)
            leaves, places = self._scatter(leaves, places, owner, cut)
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        entry = self._entry(resolved.inside, leaves, tree, tensors, places, cut)
        self._check_layouts(entry.traced, args, given, held)
        static = self._argument_flags(args, (self.how.parameters,))
        whole: list[dict[TargetLayout, torch.Tensor]] = [{} if owner is None else {owner: leaf} for leaf in given]
        inputs = [PartitionedValue(places[index], leaves[index], static[index], whole[index]) for index in tensors]
        inputs += [PartitionedValue(REPLICATED, captured) for captured in entry.traced.captured]
        wanted, strict = self._out_places(entry), self.how.strict
        outputs, out_places = run_partitioned(
            entry.traced, inputs, self.axis, cut, out_places=wanted, owner=owner, strict=strict
        )
        pairs = zip(entry.out_inner, out_places, strict=True)
        specs_out = [_with_place(spec, place, self.axis, resolved.mesh) for spec, place in pairs]
        return optree.tree_unflatten(entry.out_tree, outputs), optree.tree_unflatten(entry.out_tree, specs_out)

    def _argument_flags(self, args: tuple[PyTree, ...], numbers: Sequence[int | None]) -> list[bool]:
        return [number in numbers for number, arg in enumerate(args) for _ in optree.tree_leaves(arg)]

    def _gather(
        self, args: tuple[PyTree, ...], leaves: list[Any], places: list[AxisLayout], resolved: Resolved, cut: DimSplit
    ) -> tuple[list[Any], list[AxisLayout]]:
        flags = self._argument_flags(args, self.how.gathered)
        whole = [flag and isinstance(place, Shard) for flag, place in zip(flags, places, strict=True)]
        self._check_padding(args, whole, resolved.own)
        gathered = [
            self._trimmed(convert(leaf, place, REDUCED, self.axis, cut), spec) if flag else leaf
            for flag, leaf, place, spec in zip(whole, leaves, places, resolved.specs, strict=True)
        ]
        return gathered, [REDUCED if flag else place for flag, place in zip(whole, places, strict=True)]

    def _trimmed(self, x: torch.Tensor, spec: P) -> torch.Tensor:
        """Cut off the padding of a gathered value. Its spec over all axes is `spec`."""
        for dim in spec.padded:
            length = spec.blocks(dim, axis_mesh()).get(self.axis, x.shape[dim])
            x = x.narrow(dim, 0, length) if x.shape[dim] != length else x
        return x

    def _split(self, args: tuple[PyTree, ...], leaves: list[Any], places: list[AxisLayout]) -> DimSplit:
        ranks = axis_dim_split(self.axis).ranks
        lengths = {
            path: leaf.shape[place.dim] // units(place.outer)
            for path, leaf, place in zip(tree_paths(args), leaves, places, strict=True)
            if isinstance(leaf, torch.Tensor) and isinstance(place, Shard)
        }
        if all(length % ranks == 0 for length in lengths.values()):
            return DimSplit.of(ranks)
        samples = math.gcd(*lengths.values())
        if samples < ranks or any(isinstance(place, Shard) and isinstance(place.outer, tuple) for place in places):
            listed = ", ".join(f"{path}: {length}" for path, length in lengths.items())
            raise PartitionError(
                f"the owner cannot scatter a batch of {listed} samples over the {ranks} ranks of {self.axis!r}: there "
                f"are {samples} samples, or equal pieces of all arguments; give {ranks} or more, a multiple of {ranks} "
                "of each, or say with batch= which arguments are not split"
            )
        return DimSplit.of(ranks, samples)

    def _scatter(
        self, leaves: list[Any], places: list[AxisLayout], owner: Owned, cut: DimSplit
    ) -> tuple[list[Any], list[AxisLayout]]:
        parts = [
            convert(leaf, owner, place, self.axis, cut)
            if isinstance(leaf, torch.Tensor) and isinstance(place, Shard)
            else leaf
            for leaf, place in zip(leaves, places, strict=True)
        ]
        return parts, [place if isinstance(place, Shard) else owner for place in places]

    def _check_padding(self, args: tuple[PyTree, ...], whole: list[bool], specs: Sequence[P]) -> None:
        for path, flag, spec in zip(tree_paths(args), whole, specs, strict=True):
            if self.axis in spec.axes and spec.only({self.axis}).padded and not flag:
                raise PartitionError(f"{path}: {spec!r} is padded, which only what lies at rest can be; make it even")

    def _check_layouts(
        self, traced: Traced, args: tuple[PyTree, ...], leaves: list[Any], places: list[AxisLayout]
    ) -> None:
        """Check the strides of arguments that affect the trace.

        Outside a trace, the strides of a shard do not determine the strides of the full tensor. A shard then counts as
        contiguous.
        """
        if not traced.layout_reads:
            return
        tensors = [
            (None if isinstance(place, Shard) and recorder() is None else leaf, path)
            for leaf, place, path in zip(leaves, places, tree_paths(args), strict=True)
            if isinstance(leaf, torch.Tensor)
        ]
        depends_on_layouts(traced, [leaf for leaf, _ in tensors], [path for _, path in tensors])

    def _out_places(self, entry: _Entry) -> list[AxisLayout | None] | None:
        if self.how.out_specs is None:
            return None
        outputs = optree.tree_unflatten(entry.out_tree, entry.traced.outputs)
        full = broadcast_specs(self.how.out_specs, outputs)
        shapes = optree.tree_map(lambda out: hollow(info(out).val) if isinstance(out, fx.Node) else out, outputs)
        require_dims(shapes, full, f"the results over {self.axis!r} (out_specs)")
        specs = optree.tree_leaves(full)
        return [axis_layout_of(spec, self.axis, self.f.applied.axes) for spec in specs]

    def _entry(
        self,
        inner: Resolved,
        leaves: list[Any],
        tree: optree.PyTreeSpec,
        tensors: list[int],
        places: list[AxisLayout],
        cut: DimSplit,
    ) -> _Entry:
        avals = {index: _global_aval(leaves[index], places[index], cut) for index in tensors}
        signatures = tuple(leaf_signature(avals.get(index, leaf), exact=True) for index, leaf in enumerate(leaves))
        key = (inner, tree, signatures, tuple(current_axes().items()), hidden_axes(), cut)
        recording = recorder()  # a program being lowered copies the data that it needs, and outlives the trace
        known = self.entries if recording is None else recording.notes.setdefault(self, {})
        entry: _Entry | None = known.get(key)
        if entry is None:
            entry = self._trace(inner, leaves, tree, tensors, list(avals.values()))
            if not entry.traced.captured:
                known[key] = entry
        return entry

    def _trace(
        self, inner: Resolved, leaves: list[Any], tree: optree.PyTreeSpec, tensors: list[int], avals: list[Aval]
    ) -> _Entry:
        def run(*values: torch.Tensor) -> tuple[list[Any], tuple[optree.PyTreeSpec, list[P]]]:
            result, specs = self.f.run(inner, *filled(leaves, tensors, values, tree))
            register_dataclasses(result)
            outputs, out_tree = optree.tree_flatten(result)
            return outputs, (out_tree, optree.tree_leaves(specs))

        flat, rest = beside(run)
        with hide(self.axis):
            paths = tree_paths(optree.tree_unflatten(tree, leaves))
            traced = prepare(trace(flat, avals, forward_only=True, paths=[paths[index] for index in tensors]))
        return _Entry(traced, *rest())


def _as_tuple(specs: tuple[SpecTree, ...], args: tuple[PyTree, ...]) -> tuple[SpecTree, ...]:
    given = specs if isinstance(specs, tuple) else (specs,)
    if len(given) != len(args):
        raise PartitionError(f"in_specs has {len(given)} entries for {len(args)} arguments; give one per argument")
    return given


def _global_aval(leaf: torch.Tensor, place: AxisLayout, cut: DimSplit) -> Aval:
    shape = list(leaf.shape)
    if isinstance(place, Shard):
        shape[place.dim] = cut.whole(shape[place.dim])
    return Aval(tuple(shape), leaf.dtype, leaf.device)


def _with_place(spec: P, place: AxisLayout, axis: str, mesh: Mesh, padded: Mapping[int, int] | None = None) -> P:
    if isinstance(place, Owned):
        return spec.replace(owner={**spec.owner, axis: place.rank})
    if not isinstance(place, Shard):
        return spec
    held = spec.placements(mesh)
    outer = place.outer
    for other in sorted((p for p in held if p.dim == place.dim), key=lambda p: units(p.outer)):
        rest = inside(outer, other.outer)
        if rest is not None:  # outside this split: its ranks are a factor before it
            outer = nested(nested(other.outer, mesh.axis_size(other.axis)), rest)
    dims = P.from_placements([*held, Placement(axis, place.dim, outer)], mesh).dims
    return spec.replace(dims, padded={**spec.padded, **(padded or {})})


def _merged(inner: P, own: P, axis: str, axes: Sequence[str], mesh: Mesh) -> P:
    """Merge the spec of this transform into the spec that the transforms inside, over `axes`, declared.

    `own` is used if it names all axes of the inner spec. Otherwise `axis` is added to the inner spec.
    """
    storage = {**inner.storage, **own.storage}
    inner, own = inner.replace(storage=storage), own.replace(storage=storage)
    if axis in own.reduced:
        return inner.replace(reduced=inner.reduced | {axis})
    if axis not in own.axes:
        return inner
    if inner.axes <= own.axes:
        told = own.only((*axes, axis))
        reduced, unreduced = told.reduced | inner.reduced, told.unreduced | inner.unreduced
        return told.replace(reduced=reduced, unreduced=unreduced, owner=inner.owner)
    mine = own.only({axis})
    return _with_place(inner, axis_layout_of(mine, axis, ()), axis, mesh, mine.padded)
