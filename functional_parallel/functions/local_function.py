"""A function on one rank's shards that knows how its arguments and results lie.

torch.func copies a function's attributes onto what it wraps, so a layout kept in an attribute would survive
`hessian(f)` with a stale meaning. This class has slots and no `__dict__`: there is nothing to copy, and the layout is
bound to the object itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from inspect import Signature
from typing import Any

import optree

from sharding_specs import (
    Mesh,
    MeshError,
    P,
    SpecError,
    broadcast_specs,
    register_dataclasses,
    require_dims,
    tree_paths,
)

from ..checker import check_arguments
from ..collectives import bind, current_axes, hidden_axes, mesh_axis_size
from .positional import bind_positional, call_signature

__all__ = [
    "STACK_DIM",
    "Layout",
    "LocalFunction",
    "PyTree",
    "SpecTree",
    "as_local_function",
    "axis_mesh",
    "layout_of",
    "refuse_unknown_axes",
    "replicated_arguments",
    "specs_per_leaf",
]

PyTree = Any
SpecTree = Any

STACK_DIM = (
    "taken_dim"  # an attribute of a tensor that stands for a stack of layers: the dim that no transform may choose
)


@dataclass(frozen=True)
class Layout:
    """Where the arguments and results of a local function lie.

    `arguments(args)` is a tuple of full spec trees, one per argument, made from the arguments' paths and shapes alone;
    in a trace, which sees local shapes, it gives what it gave for the whole ones before. `axes` are the mesh axes that
    the function is local to, innermost transform first; `describe` says in words what each transform did. `passes` are
    the rewrites that transforms ask of the compiled program; `data_axes` are those that split the batch, `virtual` axes
    that no mesh has, microbatches, with their sizes or functions that make them from the mesh. `update_axes` are
    those over which the optimizer's work and state are split though the parameters are not (ZeRO-1 and 2), in the order
    of the chain, and `update_specs(args)` says how, unless `flat_update` says that they are laid end to end and cut
    anywhere; `whole_gradients` says that gradients count as held whole until then (ZeRO-1).
    `norm_specs(args)` says in which further parts the squares of gradients are summed, so that every ZeRO stage adds up
    the same numbers in the same order. `summed_as(params)` is a tree that tells parameters apart whose gradients are
    summed in different types. `signature` is that of the user's function, so that arguments may be given by name.
    `loss_scale` holds the rules of a loss scale, for `train_step`; `pipeline` says how the
    compiled program is cut into stages, and `stacks` which parameters are stacks of layers.
    """

    arguments: Callable[[tuple[PyTree, ...]], tuple[SpecTree, ...]]
    axes: tuple[str, ...] = ()
    describe: tuple[str, ...] = ()
    passes: tuple[Any, ...] = ()
    virtual: tuple[tuple[str, int | Callable[[Mesh], int]], ...] = ()
    data_axes: tuple[str, ...] = ()
    update_axes: tuple[str, ...] = ()
    update_specs: Callable[[tuple[PyTree, ...]], SpecTree] | None = None
    norm_specs: Callable[[tuple[PyTree, ...]], SpecTree] | None = None
    flat_update: bool = False
    whole_gradients: bool = False
    summed_as: Callable[[PyTree], PyTree] | None = None
    loss_scale: Any = None
    pipeline: Any = None
    stacks: Any = None
    signature: Signature | None = None

    def mesh(self, mesh: Mesh) -> Mesh:
        """A mesh together with the virtual axes, after a check that it has the others."""
        clash = [name for name, _ in self.virtual if name in mesh.axis_names]
        if clash:
            raise ValueError(f"{mesh!r} has an axis {clash[0]!r}, the name of the axis of microbatches; rename it")
        wide = Mesh({**mesh.shape, **self.virtual_sizes(mesh)})
        for axis in self.axes:
            if axis not in wide.axis_names:
                by = next((words for words in self.describe if repr(axis) in words), "a transform")
                known = ", ".join(mesh.axis_names) or "none"
                raise MeshError(f"{mesh!r} has no axis {axis!r}, over which {by} splits; its axes are: {known}")
        return wide

    def batch_specs(self, mesh: Mesh, params: PyTree, batch: tuple[PyTree, ...]) -> SpecTree:
        """How the arguments after the parameters lie, a spec for every leaf."""
        with bind(self.mesh(mesh).shape, None):
            return specs_per_leaf(self.arguments((params, *batch))[1:], batch, "specs of the loss", 1)

    def virtual_sizes(self, mesh: Mesh) -> dict[str, int]:
        """The sizes of the virtual axes beside a mesh."""
        return {name: size(mesh) if callable(size) else size for name, size in self.virtual}


class LocalFunction:
    """What a transform returns: a pure function on shards, with its layout.

    Call it inside `fp.compile`, on real ranks, or under `fp.vmap(axis_name=…)`; torch.func's transforms apply to it.
    A call checks that its arguments lie as the layout declares; what carries the layout on calls `run`.
    """

    __slots__ = ("__weakref__", "_call", "layout", "name", "results")

    def __init__(self, call: Callable[..., PyTree], layout: Layout, name: str) -> None:
        self._call = call
        self.layout = layout
        self.name = name
        self.results: SpecTree = None

    def __call__(self, *args: PyTree, **named: PyTree) -> PyTree:
        args = bind_positional(self.layout.signature, self.name, args, named)
        return self.run(*check_arguments(self, self.layout.axes, self.layout.arguments, args))

    def run(self, *args: PyTree) -> PyTree:
        """The function on what is known to lie as the layout declares."""
        value, self.results = self._call(*args)
        return value

    @property
    def specs(self) -> Layout:
        """How the arguments and results lie."""
        return self.layout

    def asking(self, *passes: Any) -> LocalFunction:
        """The same function, of whose program these rewrites are asked."""
        return self.with_layout(replace(self.layout, passes=(*self.layout.passes, *passes)))

    def updating(
        self,
        axis: str,
        specs: Callable[[tuple[PyTree, ...]], SpecTree],
        *,
        flat: bool = False,
        whole_gradients: bool = False,
    ) -> LocalFunction:
        """The same function, its optimizer's work split over one more axis; `specs` say how it is over all of them."""
        return self.with_layout(
            replace(
                self.layout,
                update_axes=(*self.layout.update_axes, axis),
                update_specs=specs,
                flat_update=flat or self.layout.flat_update,
                whole_gradients=whole_gradients,
            )
        )

    def without_schedule(self) -> LocalFunction:
        """The same function for what a pipeline's schedule is not made for: every rank runs all stages."""
        return self if self.layout.pipeline is None else self.with_layout(replace(self.layout, pipeline=None))

    def with_layout(self, layout: Layout) -> LocalFunction:
        """The same function under another layout."""
        return LocalFunction(self._call, layout, self.name)

    def __repr__(self) -> str:
        return f"{' → '.join((self.name, *self.layout.describe))}"


def specs_per_leaf(
    specs: tuple[SpecTree, ...], args: tuple[PyTree, ...], of: str, first: int = 0
) -> tuple[SpecTree, ...]:
    """A spec for every leaf of some arguments.

    Args:
        specs: a pytree prefix per argument.
        args: the arguments.
        of: says in messages whose they are.
        first: the number of the first one, among all.

    Raises:
        SpecError: when the specs' structure is not that of the arguments, or a spec has more dims than its tensor.
    """
    full = []
    for number, (spec, arg) in enumerate(zip(specs, args, strict=True), first):
        full.append(broadcast_specs(spec, arg, name=f"{of}, argument {number}", what="what is given for it"))
        require_dims(arg, full[-1], f"argument {number} ({of})")
    return tuple(full)


def replicated_arguments(args: tuple[PyTree, ...]) -> tuple[SpecTree, ...]:
    """The layout of a plain function: everything whole."""
    return tuple(P() for _ in args)


def layout_of(f: Callable[..., PyTree]) -> Layout:
    """A local function's own layout; of a plain one that everything is whole."""
    return f.layout if isinstance(f, LocalFunction) else Layout(replicated_arguments, signature=call_signature(f))


def as_local_function(f: Callable[..., PyTree]) -> LocalFunction:
    """A plain function as a local one: every rank does all of it."""

    def call(*args: PyTree) -> tuple[PyTree, SpecTree]:
        result = f(*args)
        register_dataclasses(result)
        return result, optree.tree_map(lambda _: P(), result)

    return LocalFunction(call, layout_of(f), getattr(f, "__name__", type(f).__name__))


def axis_mesh() -> Mesh:
    """A mesh of all axes bound here, hidden ones included."""
    return Mesh({name: mesh_axis_size(name) for name in (*hidden_axes(), *current_axes())})


def refuse_unknown_axes(specs: tuple[SpecTree, ...], who: str, known: Collection[str] = ()) -> None:
    """Refuse specs of arguments that name an axis that no mesh bound here has: a slip of the pen.

    Args:
        specs: a tree of specs per argument.
        who: asks for them.
        known: axes that may be bound elsewhere.
    """
    names = axis_mesh().axis_names
    leaves = optree.tree_leaves(specs)
    wrong = [
        f"  {path}: {spec!r}: the mesh has no axis {axis!r} (its axes: {', '.join(names) or 'none'})"
        for path, spec in zip(tree_paths(specs), leaves, strict=True)
        for axis in sorted((spec.axes | spec.unreduced | spec.reduced).difference(names, known))
    ]
    if wrong:
        raise SpecError(f"specs of {who} name axes that the mesh does not have:\n" + "\n".join(wrong))
