"""Layouts of the arguments of a local function, resolved for the shapes of the arguments and a mesh.

They are resolved once, where a function enters. Transforms contribute in turn, the innermost first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import optree

from sharding_specs import Mesh, P, register_dataclasses, tree_paths

from ..ir import hollow
from .request import PyTree, SpecTree
from .stacked import StackedTree


@dataclass(frozen=True)
class Resolved:
    """Layouts of the arguments of a local function. Specs are in the order of the leaves of `args`.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> f = fp.zero(1, "data")(lambda w, x: (x @ w).sum())
    >>> f.resolve((torch.ones(4), torch.ones(2, 4)), Mesh(data=2))
    zero(1, 'data') on Mesh(data=2)
      0: P(reduced={'data'}), at rest P(), in the update P('data')
      1: P('data')
    """

    name: str  # the transform that contributed last
    mesh: Mesh  # with the axes of microbatches
    args: tuple[PyTree, ...] = field(compare=False, repr=False)  # as the function takes them; of tensors the shapes
    tree: optree.PyTreeSpec
    specs: tuple[P, ...]  # of the leaves in the function, over the axes of all transforms
    own: tuple[P, ...]  # over the axis of the last transform alone
    update: tuple[P, ...]  # the axes that split update and optimizer state of each parameter in addition (ZeRO-1 and 2)
    norm: tuple[P, ...] | None = None  # the same of each gradient for the sum of squares; None if no transform decides
    stacks: StackedTree | None = None  # parameters of the user that are stacks of layers, taken separately
    inner: Resolved | None = None  # layouts of the function inside

    @classmethod
    def of(cls, args: tuple[PyTree, ...], mesh: Mesh, specs: Iterable[P] | None = None, name: str = "") -> Resolved:
        """Return the layouts of arguments with these specs, by default replicated."""
        register_dataclasses(args)
        args = optree.tree_map(hollow, args)
        leaves, tree = optree.tree_flatten(args)
        found = (P(),) * len(leaves) if specs is None else tuple(specs)
        count = optree.tree_structure(args[0]).num_leaves if args else 0
        return cls(name, mesh, args, tree, found, found, (P(),) * count)

    @property
    def arguments(self) -> tuple[SpecTree, ...]:
        return self.tree.unflatten(self.specs)  # type: ignore[no-any-return]

    @property
    def inside(self) -> Resolved:
        assert self.inner is not None
        return self.inner

    def outside(self, name: str, specs: Iterable[P], own: Iterable[P]) -> Resolved:
        return replace(self, name=name, specs=tuple(specs), own=tuple(own), inner=self)

    def around(self, args: tuple[PyTree, ...], specs: SpecTree) -> Resolved:
        """Return the layouts of a function of other arguments, with these specs, around these layouts."""
        return replace(Resolved.of(args, self.mesh, optree.tree_leaves(specs)), stacks=self.stacks, inner=self)

    def split_update(self, further: Iterable[P]) -> Resolved:
        split = (a.divided(b, self.mesh) for a, b in zip(self.update, further, strict=True))
        return replace(self, update=tuple(split))

    def updated(self) -> list[P]:
        kept = (spec.without(spec.reduced) for spec in self.specs)
        return [a.divided(b, self.mesh) for a, b in zip(kept, self.update, strict=False)]

    def entered(self, args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        return args if self.stacks is None else (self.stacks.unstack(args[0]), *args[1:])

    def layers(self) -> Mapping[str, int]:
        """Return the path of each layer of a stack, with the number of layers in its stack."""
        if self.stacks is not None:
            return self.stacks.paths
        return {} if self.inner is None else self.inner.layers()

    def restacked(self, value: PyTree) -> PyTree:
        return value if self.stacks is None else self.stacks.restack_all(value)

    def __repr__(self) -> str:
        updated = [*self.updated(), *self.specs[len(self.update) :]]
        rows = zip(tree_paths(self.args), self.specs, updated, strict=True)
        return "\n".join([f"{self.name or 'no transform'} on {self.mesh!r}", *(f"  {_row(*each)}" for each in rows)])


def _row(path: str, spec: P, updated: P) -> str:
    stages = [("", spec), (", at rest ", spec.without(spec.reduced)), (", in the update ", updated)]
    changes = [f"{words}{after!r}" for (_, before), (words, after) in pairwise(stages) if after != before]
    return f"{path}: {spec!r}{''.join(changes)}"


Resolver = Callable[[Resolved], Resolved]  # contribution of a transform


@dataclass(frozen=True)
class _Beside:
    f: Callable[..., tuple[Any, Any]]
    kept: list[Any] = field(default_factory=list)

    def __call__(self, *args: Any, **named: Any) -> Any:
        value, rest = self.f(*args, **named)
        self.kept[:] = [rest]
        return value


def beside(f: Callable[..., tuple[Any, Any]]) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """Split a function of (value, rest): the function of the value, and a function for the last rest."""
    first = _Beside(f)
    return first, lambda: first.kept[0]
