"""Functions on the shards of one rank, with the layouts of their arguments and results.

torch.func copies the attributes of a function onto its wrappers. A layout in an attribute would survive `hessian(f)`
and be wrong there. `LocalFunction` has slots and no `__dict__`, so torch.func finds nothing to copy.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from inspect import Signature
from typing import TypeVar

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
from ..ir import with_short_tracebacks
from .keywords import bind_positional, call_signature, with_keywords
from .request import PyTree, Request, SpecTree

R = TypeVar("R")

STACK_DIM = "taken_dim"  # attribute of a tensor that represents a stack of layers: the dim that no transform may shard


@dataclass(frozen=True)
class Layout:
    """Layouts of the arguments of a local function, and the requests of its transforms.

    `arguments` returns a tuple of full spec trees, one per argument. They depend only on the paths and shapes of the
    arguments. In a trace, which has local shapes, it returns the specs that it returned for the global ones. `axes`,
    `describe` and `requests` have the innermost transform first. The signature is that of the user's function.
    """

    arguments: Callable[[tuple[PyTree, ...]], tuple[SpecTree, ...]]
    axes: tuple[str, ...] = ()
    describe: tuple[str, ...] = ()
    requests: tuple[Request, ...] = ()
    signature: Signature | None = None

    def __repr__(self) -> str:
        axes = ", ".join(map(repr, self.axes)) or "no axis"
        asked = f"; requests: {', '.join(map(str, self.requests))}" if self.requests else ""
        return f"Layout({' → '.join(self.describe) or 'no transform'}; local over {axes}{asked})"

    def all(self, kind: type[R]) -> tuple[R, ...]:
        """Return the requests of a class, innermost first."""
        return tuple(each for each in self.requests if isinstance(each, kind))

    def last(self, kind: type[R]) -> R | None:
        """Return the outermost request of a class; None if there is none."""
        return next((each for each in reversed(self.requests) if isinstance(each, kind)), None)

    def mesh(self, mesh: Mesh) -> Mesh:
        """Return a mesh with the virtual axes added."""
        virtual = self.virtual_sizes(mesh)
        clash = [name for name in virtual if name in mesh.axis_names]
        if clash:
            raise ValueError(f"{mesh!r} has an axis {clash[0]!r}, the name of the axis of microbatches; rename it")
        wide = Mesh({**mesh.shape, **virtual})
        for axis in self.axes:
            if axis not in wide.axis_names:
                by = next((words for words in self.describe if repr(axis) in words), "a transform")
                known = ", ".join(mesh.axis_names) or "none"
                raise MeshError(f"{mesh!r} has no axis {axis!r}, over which {by} splits; its axes are: {known}")
        return wide

    def virtual_sizes(self, mesh: Mesh) -> dict[str, int]:
        """Return the axes that requests add to a mesh, with their sizes."""
        return {name: size for each in self.requests for name, size in each.virtual_axes(mesh).items()}

    def batch_specs(self, mesh: Mesh, params: PyTree, batch: tuple[PyTree, ...]) -> SpecTree:
        """Return the specs of the arguments after the parameters, one spec per leaf."""
        with bind(self.mesh(mesh).shape, None):
            return specs_per_leaf(self.arguments((params, *batch))[1:], batch, "specs of the loss", 1)


class LocalFunction:
    """Pure function on shards, with its layout. Transforms return it.

    Call it inside `fp.compile`, on real ranks, or under `fp.vmap(axis_name=…)`. torch.func's transforms apply to it.
    A call checks that its arguments match the layout. Code that keeps the layout itself calls `run`.
    """

    __slots__ = ("__weakref__", "_call", "layout", "name", "results")

    def __init__(self, call: Callable[..., PyTree], layout: Layout, name: str) -> None:
        self._call = call
        self.layout = layout
        self.name = name
        self.results: SpecTree = None

    @with_short_tracebacks
    def __call__(self, *args: PyTree, **named: PyTree) -> PyTree:
        args = bind_positional(self.layout.signature, self.name, args, named)
        return self.run(*check_arguments(self, self.layout.axes, self.layout.arguments, args))

    def run(self, *args: PyTree) -> PyTree:
        """Call the function on arguments that are known to match the layout, and store the specs of its results."""
        value, self.results = self._call(*args)
        return value

    @property
    def specs(self) -> Layout:
        """Layout of the function."""
        return self.layout

    def requesting(self, *requests: Request) -> LocalFunction:
        """Return the function with more requests."""
        return self.with_layout(replace(self.layout, requests=(*self.layout.requests, *requests)))

    def without_schedule(self) -> LocalFunction:
        """Return the function without a pipeline, for transforms that no schedule supports: a rank runs all stages."""
        kept = [each.without_schedule() for each in self.layout.requests]
        return self.with_layout(replace(self.layout, requests=tuple(each for each in kept if each is not None)))

    def with_layout(self, layout: Layout) -> LocalFunction:
        """Return the function with another layout."""
        return LocalFunction(self._call, layout, self.name)

    def __repr__(self) -> str:
        return f"{' → '.join((self.name, *self.layout.describe))}"


def specs_per_leaf(
    specs: tuple[SpecTree, ...], args: tuple[PyTree, ...], of: str, first: int = 0
) -> tuple[SpecTree, ...]:
    """Return a spec for every leaf of some arguments, given a pytree prefix of specs per argument.

    The message of an error names `of`. `first` is the number of the first argument among all.
    """
    full = []
    for number, (spec, arg) in enumerate(zip(specs, args, strict=True), first):
        spec = type(arg)(spec) if type(spec) is dict and isinstance(arg, UserDict) else spec
        full.append(broadcast_specs(spec, arg, name=f"{of}, argument {number}", what="what is given for it"))
        require_dims(arg, full[-1], f"argument {number} ({of})")
    return tuple(full)


def layout_of(f: Callable[..., PyTree]) -> Layout:
    """Return the layout of a local function. For a plain function, a layout with every argument replicated."""
    if isinstance(f, LocalFunction):
        return f.layout
    return Layout(lambda args: tuple(P() for _ in args), signature=call_signature(f))


def as_local_function(f: Callable[..., PyTree]) -> LocalFunction:
    """Turn a plain function into a local one: every rank computes all of it."""

    run = with_keywords(f)

    def call(*args: PyTree) -> tuple[PyTree, SpecTree]:
        result = run(*args)
        register_dataclasses(result)
        return result, optree.tree_map(lambda _: P(), result)

    return LocalFunction(call, layout_of(f), getattr(f, "__name__", type(f).__name__))


def axis_mesh() -> Mesh:
    """Return a mesh of all axes bound here, including hidden axes."""
    return Mesh({name: mesh_axis_size(name) for name in (*hidden_axes(), *current_axes())})


def refuse_idle_states(specs: tuple[SpecTree, ...], who: str, axis: str) -> None:
    """Refuse specs of a plan's arguments with `unreduced` or `owner` for its axis, which no plan applies."""
    wrong = [
        f"  {path}: {spec!r}: {'unreduced' if axis in spec.unreduced else 'owner'}= has no effect along {axis!r}"
        for path, spec in zip(tree_paths(specs), optree.tree_leaves(specs), strict=True)
        if axis in spec.unreduced or axis in spec.owner
    ]
    if wrong:
        raise SpecError(
            f"specs of {who}: a plan's arguments are replicated or sharded along {axis!r}; leave it out of unreduced= "
            "and owner=, which specs of fp.shard_map and out_specs take (one rank holds all training state with "
            "fp.data_parallel(axis, master=rank)):\n" + "\n".join(wrong)
        )


def refuse_unknown_axes(specs: tuple[SpecTree, ...], who: str, known: Collection[str] = ()) -> None:
    """Refuse specs of arguments that name an axis that is neither bound here nor in `known`, such as a typo."""
    names = axis_mesh().axis_names
    leaves = optree.tree_leaves(specs)
    wrong = [
        f"  {path}: {spec!r}: the mesh has no axis {axis!r} (its axes: {', '.join(names) or 'none'})"
        for path, spec in zip(tree_paths(specs), leaves, strict=True)
        for axis in sorted(spec.named_axes.difference(names, known))
    ]
    if wrong:
        raise SpecError(f"specs of {who} name axes that the mesh does not have:\n" + "\n".join(wrong))
