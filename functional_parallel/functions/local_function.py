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
    whole_shape,
)

from .. import _torch
from ..checker import check_arguments, known_spec
from ..collectives import bind, current_axes, hidden_axes, mesh_axis_size
from ..ir import hollow, with_short_tracebacks
from .keywords import bind_positional, call_signature, with_keywords
from .request import PyTree, Request, SpecTree
from .resolved import Resolved, Resolver

R = TypeVar("R")


@dataclass(frozen=True)
class Applied:
    """How a local function lies on any mesh, and the requests of its transforms. All have the innermost one first."""

    axes: tuple[str, ...] = ()  # that the function is local to
    describe: tuple[str, ...] = ()  # the transforms, for messages
    requests: tuple[Request, ...] = ()  # what the transforms ask of the code that compiles the function
    signature: Signature | None = None  # of the user's function
    resolvers: tuple[Resolver, ...] = ()  # what the transforms contribute to the layouts of the arguments
    lies: tuple[tuple[str, str], ...] = ()  # by transform, how parameters and others lie, known without shapes
    start: Callable[[tuple[PyTree, ...], Mesh], Resolved] = Resolved.of  # the layouts before the first resolver
    order: int = 0  # position of the outermost transform in the legal order

    def __repr__(self) -> str:
        axes = ", ".join(map(repr, self.axes)) or "no axis"
        asked = f"; requests: {', '.join(map(str, self.requests))}" if self.requests else ""
        return f"Applied({' → '.join(self.describe) or 'no transform'}; local over {axes}{asked})"

    def resolve(self, args: tuple[PyTree, ...], mesh: Mesh) -> Resolved:
        found = self.start(args, mesh)
        for contribute in self.resolvers:
            found = contribute(found)
        return found

    def all(self, kind: type[R]) -> tuple[R, ...]:
        """Return the requests of a class, innermost first."""
        return tuple(each for each in self.requests if isinstance(each, kind))

    def last(self, kind: type[R]) -> R | None:
        """Return the outermost request of a class; None if there is none."""
        return next((each for each in reversed(self.requests) if isinstance(each, kind)), None)

    def mesh(self, mesh: Mesh) -> Mesh:
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
        return {name: size for each in self.requests for name, size in each.virtual_axes(mesh).items()}


class LocalFunction:
    """Pure function on shards, with its layout. Transforms return it.

    Call it inside `fp.compile`, on real ranks, or under `fp.vmap(axis_name=…)`. torch.func's transforms apply to it.
    A call resolves its layout, and checks that its arguments match. Code that has resolved it calls `run`.
    """

    __slots__ = ("__weakref__", "_call", "applied", "name")

    def __init__(self, call: Callable[..., tuple[PyTree, SpecTree]], applied: Applied, name: str) -> None:
        self._call = call
        self.applied = applied
        self.name = name

    @with_short_tracebacks
    def __call__(self, *args: PyTree, **named: PyTree) -> PyTree:
        args = bind_positional(self.applied.signature, self.name, args, named)
        register_dataclasses(args)
        leaves, tree = optree.tree_flatten(args)
        mesh, specs = axis_mesh(), list(map(known_spec, leaves))  # of the trace around this call
        with _torch.disable_modes():
            full = [_full(*each, self.applied.axes, mesh) for each in zip(leaves, specs, strict=True)]
            resolved = self.applied.resolve(tree.unflatten(full), mesh)
        axes = tuple(axis for axis in self.applied.axes if axis in mesh.axis_names)
        checked = check_arguments(self, axes, resolved.specs, resolved.entered(args))
        return self.run(resolved, *checked)[0]

    def run(self, resolved: Resolved, *args: PyTree) -> tuple[PyTree, SpecTree]:
        """Call the function on arguments that lie as they were resolved. Return the result and its specs."""
        return self._call(resolved, *args)

    def resolve(self, args: tuple[PyTree, ...], mesh: Mesh) -> Resolved:
        """Return the layouts of full arguments (of tensors only shapes count), and what a run on shards needs."""
        wide = self.applied.mesh(mesh)
        with bind(wide.shape, None):
            return self.applied.resolve(args, wide)

    @property
    def specs(self) -> Applied:
        return self.applied

    def then(
        self,
        call: Callable[..., tuple[PyTree, SpecTree]],
        *,
        describe: str = "",
        lies: tuple[str, str] | None = None,
        axis: str | None = None,
        resolver: Resolver | None = None,
    ) -> LocalFunction:
        """Return the function that a transform makes of this function. `call` takes its layouts and arguments."""
        inner = self.applied
        applied = replace(
            inner,
            axes=inner.axes if axis is None else (*inner.axes, axis),
            describe=(*inner.describe, describe) if describe else inner.describe,
            resolvers=inner.resolvers if resolver is None else (*inner.resolvers, resolver),
            lies=inner.lies if lies is None else (*inner.lies, lies),
        )
        return LocalFunction(call, applied, self.name)

    def requesting(self, *requests: Request) -> LocalFunction:
        return self.with_applied(replace(self.applied, requests=(*self.applied.requests, *requests)))

    def resolving(self, resolver: Resolver) -> LocalFunction:
        return self.then(self._call, resolver=resolver)

    def without_schedule(self) -> LocalFunction:
        kept = [each.without_schedule() for each in self.applied.requests]
        return self.with_applied(replace(self.applied, requests=tuple(each for each in kept if each is not None)))

    def with_applied(self, applied: Applied) -> LocalFunction:
        return LocalFunction(self._call, applied, self.name)

    def __str__(self) -> str:
        return f"{' → '.join((self.name, *self.applied.describe))}"

    def __repr__(self) -> str:
        first, *others = (
            self.applied.signature.parameters if self.applied.signature is not None else ("params", "batch")
        )
        texts = ["; ".join(filter(None, each)) for each in zip(*self.applied.lies, strict=True)]
        rows = zip((first, ", ".join(others)), texts, strict=False)
        return "\n".join([str(self), *(f"  {name}: {text}" for name, text in rows if text)])


def specs_per_leaf(
    specs: tuple[SpecTree, ...], args: tuple[PyTree, ...], of: str, first: int = 0
) -> tuple[SpecTree, ...]:
    """Return a spec for every leaf of arguments, given a pytree prefix per argument. `of` is for messages."""
    full = []
    for number, (spec, arg) in enumerate(zip(specs, args, strict=True), first):
        spec = type(arg)(spec) if type(spec) is dict and isinstance(arg, UserDict) else spec
        full.append(broadcast_specs(spec, arg, name=f"{of}, argument {number}", what="what is given for it"))
        require_dims(arg, full[-1], f"argument {number} ({of})")
    return tuple(full)


def as_local_function(f: Callable[..., PyTree]) -> LocalFunction:
    """Turn a plain function into a local one that every rank computes in full. Return a local function unchanged."""
    if isinstance(f, LocalFunction):
        return f
    run = with_keywords(f)

    def call(_: Resolved, *args: PyTree) -> tuple[PyTree, SpecTree]:
        result = run(*args)
        register_dataclasses(result)
        return result, optree.tree_map(lambda _: P(), result)

    return LocalFunction(call, Applied(signature=call_signature(f)), getattr(f, "__name__", type(f).__name__))


def applied_to(f: Callable[..., PyTree]) -> Applied:
    return as_local_function(f).applied


def axis_mesh() -> Mesh:
    return Mesh({name: mesh_axis_size(name) for name in (*hidden_axes(), *current_axes())})


def _full(leaf: PyTree, spec: P | None, axes: Collection[str], mesh: Mesh) -> PyTree:
    return leaf if spec is None else hollow(leaf, whole_shape(leaf.shape, spec.only(axes), mesh))


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
