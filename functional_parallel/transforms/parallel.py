"""Data parallelism, tensor parallelism and ZeRO. All are the transform `partition` with different specs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optree
import torch

from sharding_specs import (
    Mesh,
    P,
    broadcast_specs,
    validate,
)

from ..functions import (
    STACK_DIM,
    Layout,
    LocalFunction,
    PyTree,
    SpecTree,
    axis_mesh,
    explain_keywords,
    layout_of,
)
from ..partition import Partitioning
from ..passes import GatherAgain, GatherPlacement, ReduceScatterFirst
from ..quantities import is_positive_int
from ..requests import (
    DataAxis,
    Master,
    NormSharding,
    Order,
    RunPass,
    UpdateSharding,
    divided_specs,
    flat_update,
    owners_of,
    requested_passes,
    update_specs,
)
from ..rules import Owned
from ..tracing import recorder
from .argument_specs import Rules, batch_arg_specs, only_axis, parameter_specs
from .transform import Transform


@explain_keywords
def tensor_parallel(axis: str, specs: Rules, *, batch: SpecTree = None, strict: bool = False) -> Transform:
    """Shard a model's parameters over an axis. The layouts of activations follow.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh, P
    >>> def loss(params, x):
    ...     return ((x @ params["w1"]).relu() @ params["w2"]).sum()
    >>> plan = fp.tensor_parallel("tensor", {"w1": P(None, "tensor"), "w2": P("tensor", None)})
    >>> step = fp.compile(plan(loss), Mesh(tensor=2))
    >>> step({"w1": torch.ones(2, 4), "w2": torch.ones(4, 2)}, torch.ones(3, 2))
    tensor(48.)

    Args:
        axis: the mesh axis.
        specs: layouts of the parameters, the first argument: rules from path patterns to specs, or a tree of specs.
            Other axes in the specs are ignored.
        batch: specs of the other arguments along this axis. By default they are replicated.
        strict: raise an error for an op without a sharding rule.

    Returns:
        The transform. The specs determine its collectives: a row split needs one psum in the forward, a column split
        one psum in the backward (Megatron-LM, arXiv 1909.08053 §3). An activation that is gathered, as in sequence
        parallelism, is gathered again for the backward, which saves its shards. The pass "gather again" does it, so
        `without="gather again"` saves the gathered values and leaves out these gathers.
    """
    name = f"tensor_parallel({axis!r})"
    find = parameter_specs(specs, axis, name)

    def in_specs(args: tuple[PyTree, ...]) -> tuple[SpecTree, ...]:
        return (only_axis(find(args[0]), axis, name), *batch_arg_specs(args, batch))

    def apply(f: Callable[..., PyTree]) -> LocalFunction:
        local = Partitioning(name, axis, in_specs, strict=strict).apply(f)
        return local.requesting(RunPass(GatherAgain(axis)))

    return Transform(name, axis, Order.TENSOR, apply)


@explain_keywords
def data_parallel(axis: str, *, master: int | None = None, batch: SpecTree = None, strict: bool = False) -> Transform:
    """Split the batch over an axis and sum the gradients: `zero(0, axis)`. With a master, torch's `DataParallel`.

    The master alone has the batch, the parameters, the optimizer's state and its update. A step has five exchanges,
    where the other one sums gradients on all ranks. The batch is scattered, parameters are broadcast, outputs are
    gathered, gradients of outputs are scattered, and gradients of parameters are reduced to the master.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> step = fp.compile(fp.grad_and_value(fp.data_parallel("data")(lambda w, x: (x @ w).mean())), Mesh(data=2))
    >>> step(torch.ones(2), torch.ones(4, 2))
    (tensor([1., 1.]), tensor(2.))
    >>> plan = fp.data_parallel("data", master=0)
    >>> step = fp.compile(fp.grad(plan(lambda w, x: (x @ w).exp().sum().log())), Mesh(data=2))
    >>> step(torch.ones(2), torch.ones(4, 2)).round(decimals=4)
    tensor([1., 1.])
    >>> [one.kind for one in step.program.collectives()]
    ['scatter', 'broadcast', 'gather', 'scatter', 'reduce']

    Args:
        axis: the mesh axis.
        master: index of the rank that holds everything between steps, or None. The outputs are the ranks' parts of
            the loss, or what the model marks by `fp.outputs`. The batch may be uneven: the first ranks then get one
            sample more.
        batch: specs of the arguments after the parameters: one spec (or tree of specs) for all of them, or a tuple
            with one per argument. By default, dim 0 of every tensor that has one is sharded.
        strict: raise an error for an op without a sharding rule.

    Raises:
        ValueError: if `master` is not the index of a rank, or, with a master, if another transform shards the
            training state (ZeRO), has another master, or is a pipeline.
    """
    if master is not None:
        return _with_master(axis, master, batch, strict)
    return _zero(0, axis, f"data_parallel({axis!r})", batch, strict)


def _with_master(axis: str, master: int, batch: SpecTree, strict: bool) -> Transform:
    name = f"data_parallel({axis!r}, master={master!r})"
    if isinstance(master, bool) or not isinstance(master, int) or master < 0:
        raise ValueError(f"{name}: the master is the index of a rank along {axis!r}, 0 or more")

    def in_specs(args: tuple[PyTree, ...]) -> tuple[SpecTree, ...]:
        size = axis_mesh().axis_size(axis)
        if master >= size:
            raise ValueError(f"{name}: {axis!r} has {size} ranks, 0 … {size - 1}; take one of them as the master")
        return (P(), *batch_arg_specs(args, batch, P(axis)))

    def apply(f: Callable[..., PyTree]) -> LocalFunction:
        inner = layout_of(f)
        data = [each.axis for each in inner.all(DataAxis)] + [*owners_of(inner)]
        if data:
            raise ValueError(
                f"{name} stands outside of {' → '.join(inner.describe)}, which splits the batch over {data[0]!r} "
                "already and decides who holds the training state: a plan with a master has one data axis; make the "
                "mesh's data axes one axis, or leave master= out"
            )
        local = Partitioning(name, axis, in_specs, strict=strict, owner=Owned(master)).apply(f)
        return local.requesting(NormSharding(_ShardDimChooser(axis, name, _taken(inner))), Master(axis, master))

    return Transform(name, axis, Order.DATA, apply)


@explain_keywords
def zero(
    stage: int,
    axis: str,
    specs: Rules = None,
    *,
    layout: str = "dims",
    batch: SpecTree = None,
    whole_below: int = 0,
    keep_gathered: bool = False,
    prefetch: int = 1,
    strict: bool = False,
) -> Transform:
    """Split the batch over an axis and shard training state over it: ZeRO (arXiv 1910.02054).

    | stage | sharded at rest | gradients |
    |---|---|---|
    | 0 | nothing | psum |
    | 1, 2 | optimizer state | psum_scatter; then the new parameters are gathered |
    | 3 | parameters and optimizer state | psum_scatter, the transpose of the gather before use |

    At ZeRO stage 3, a layer's parameters are gathered just before use, freed after it, and re-gathered in the
    backward.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> step = fp.compile(fp.grad(fp.zero(3, "data")(lambda w, x: (x @ w).sum())), Mesh(data=2))
    >>> step(torch.ones(2), torch.ones(4, 2)), step.program.counts()
    (tensor([4., 4.]), {('psum_scatter', ('data',)): 1})

    Args:
        stage: the ZeRO stage: 0, 1, 2 or 3.
        axis: the mesh axis.
        specs: the dim of each parameter, or of its optimizer state, that is sharded over the axis. The default
            considers the dims that no other axis shards. It takes the first dim that the axis divides, else the longest
            dim, padded with zeros at rest.
        layout: the layout of the optimizer's work and state at stages 1 and 2. "dims" shards a dim of each parameter.
            "flat" concatenates all parameters to one vector and cuts it into equal chunks, as in the paper. There is
            one vector per dtype and value of weight decay. A step has one reduce-scatter and one all-gather, and the
            sizes of the shards do not depend on the shapes of the parameters.
        whole_below: parameters with fewer elements stay replicated.
        batch: as for `data_parallel`.
        keep_gathered: at stage 3, save the gathered parameters for the backward. It sends less but needs more memory.
        prefetch: at stage 3, the number of layers between a gather and the use of its parameters.
        strict: raise an error for an op without a sharding rule.

    Raises:
        ValueError: if `stage` or `layout` is unknown, `whole_below` or `prefetch` is not an integer of at least 0, or
            the layout does not apply to this stage or these options.
    """
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ValueError(f"zero(stage={stage!r}): the stages are 0 (data parallel), 1, 2 and 3")
    for what, number in (("whole_below", whole_below), ("prefetch", prefetch)):
        if number != 0 and not is_positive_int(number):
            raise ValueError(f"zero({stage}, {axis!r}, {what}={number!r}): it is an integer of at least 0")
    _check_layout(layout, stage, axis, specs, whole_below)
    passes = (GatherPlacement(axis, keep_gathered, prefetch),) if stage == 3 else ()
    flat = layout == "flat"
    name = f"zero({stage}, {axis!r}{', layout=' + repr(layout) if flat else ''})"
    given = None if specs is None else parameter_specs(specs, axis, name)
    return _zero(stage, axis, name, batch, strict, given, whole_below, passes, flat)


def _check_layout(layout: str, stage: int, axis: str, specs: Rules, whole_below: int) -> None:
    if layout not in ("dims", "flat"):
        raise ValueError(f"zero(layout={layout!r}): it is 'dims' or 'flat'")
    if layout == "dims":
        return
    call = f"zero({stage}, {axis!r}, layout='flat')"
    if stage == 0:
        raise ValueError(f"{call}: stage 0 splits nothing, so there is no layout; take stage 1 or 2, or leave it out")
    if stage == 3:
        raise ValueError(
            f"{call}: stage 3 gathers each parameter just before its use, so each is split by itself; leave the layout "
            "out, or take stage 2, which keeps parameters whole"
        )
    if specs is not None or whole_below:
        raise ValueError(
            f"{call}: specs and whole_below say how single parameters are split, and end to end they are not; leave "
            "them out, or the layout"
        )


def _zero(
    stage: int,
    axis: str,
    name: str,
    batch: SpecTree,
    strict: bool,
    given: Callable[[PyTree], SpecTree] | None = None,
    whole_below: int = 0,
    passes: tuple[GatherPlacement, ...] = (),
    flat: bool = False,
) -> Transform:
    def apply(f: Callable[..., PyTree]) -> LocalFunction:
        inner = layout_of(f)
        for held, rank in owners_of(inner).items():
            raise ValueError(
                f"{name} stands outside of {' → '.join(inner.describe)}: rank {rank} of {held!r} holds all training "
                f"state there, so none of it is sharded or replicated over {axis!r}; leave master= out to use {name}"
            )
        at_rest = _ShardDimChooser(axis, name, _taken(inner), given, whole_below)

        def in_specs(args: tuple[PyTree, ...]) -> tuple[SpecTree, ...]:
            parameters = at_rest(args) if stage == 3 else P() if stage == 0 else P(reduced={axis})
            return (parameters, *batch_arg_specs(args, batch, P(axis)))

        gathered = (0,) if stage == 3 else ()
        local = Partitioning(name, axis, in_specs, gathered=gathered, strict=strict).apply(f)
        if stage or local.layout.last(NormSharding) is None:  # the innermost data axis decides the shards of a norm
            local = local.requesting(NormSharding(at_rest if stage == 0 else _nothing))
        local = local.requesting(DataAxis(axis))
        axes = tuple(each.axis for each in local.layout.all(DataAxis))
        if len(axes) > 1:
            local = local.requesting(RunPass(ReduceScatterFirst(axes)))
        if stage in (0, 3):
            gathers = (each for each in requested_passes(inner) if isinstance(each, GatherPlacement))
            kept = frozenset(each.axis for each in gathers if each.keep)
            return local.requesting(*(RunPass(replace(each, kept=kept)) for each in passes))
        return local.requesting(UpdateSharding(at_rest, axis, flat, whole_gradients=stage == 1))

    return Transform(name, axis, Order.DATA, apply)


def _nothing(args: tuple[PyTree, ...]) -> SpecTree:
    return P()


def _taken(layout: Layout) -> Callable[[tuple[PyTree, ...]], SpecTree]:
    """Return the specs by which inner transforms shard the parameters and, for ZeRO-1 and 2, their update."""

    def kept(args: tuple[PyTree, ...]) -> SpecTree:
        return optree.tree_map(lambda spec: spec.without(spec.reduced), layout.arguments(args)[0])

    further = None if flat_update(layout) else update_specs(layout)
    return kept if further is None else divided_specs(kept, further)


class _ShardDimChooser:
    """Chooses the dim of each parameter that is sharded over an axis, once per parameter tree and mesh.

    Given specs take precedence. The choice needs global shapes, so it is made before the function is traced. A
    trace has the shapes of shards, which might equal the global shapes of another model. There the latest choice for
    the tree is used.
    """

    def __init__(
        self,
        axis: str,
        name: str,
        taken: Callable[[tuple[PyTree, ...]], SpecTree],
        given: Callable[[PyTree], SpecTree] | None = None,
        whole_below: int = 0,
    ) -> None:
        self.axis, self.name, self.taken, self.given, self.whole_below = axis, name, taken, given, whole_below
        self.chosen: dict[Any, SpecTree] = {}
        self.latest: dict[Any, SpecTree] = {}

    def __call__(self, args: tuple[PyTree, ...]) -> SpecTree:
        leaves, tree = optree.tree_flatten(args[0])
        if tree in self.latest and recorder() is not None:
            return self.latest[tree]
        mesh = axis_mesh()
        taken = optree.tree_leaves(broadcast_specs(self.taken(args), args[0]))  # inner ones choose and store, too
        key = (tree, tuple(tuple(getattr(leaf, "shape", ())) for leaf in leaves), mesh)
        if key not in self.chosen:
            self.chosen[key] = tree.unflatten(self._choose(args[0], leaves, taken, mesh))
        self.latest[tree] = self.chosen[key]
        return self.chosen[key]

    def _choose(self, params: PyTree, leaves: list[Any], taken: list[P], mesh: Mesh) -> list[P]:
        if self.given is not None:
            chosen = optree.tree_leaves(only_axis(self.given(params), self.axis, self.name))
            chosen = [_fitted(leaf, spec, mesh) for leaf, spec in zip(leaves, chosen, strict=True)]
        else:
            chosen = [self._dim_to_split(leaf, spec, mesh) for leaf, spec in zip(leaves, taken, strict=True)]
        places = [_together(a, b, mesh) for a, b in zip(taken, chosen, strict=True)]
        specs = optree.tree_structure(params).unflatten(places)
        validate(params, specs, mesh)  # lists the paths with errors
        return chosen

    def _dim_to_split(self, leaf: PyTree, taken: P, mesh: Mesh) -> P:
        """Choose a free dim: the first that the axis divides, for contiguous shards, else the longest."""
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim or leaf.numel() < self.whole_below:
            return P()
        used = {placement.dim for placement in taken.placements(mesh)} | {getattr(leaf, STACK_DIM, None)}
        size = mesh.axis_size(self.axis)
        free = [dim for dim in range(leaf.ndim) if dim not in used and leaf.shape[dim]]
        if not free:
            return P()
        even = [dim for dim in free if leaf.shape[dim] % size == 0]
        best = even[0] if even else max(free, key=lambda dim: leaf.shape[dim])
        return P(*[None] * best, self.axis).fitted(leaf.shape, mesh)


def _fitted(leaf: PyTree, spec: P, mesh: Mesh) -> P:
    return spec.fitted(leaf.shape, mesh) if isinstance(leaf, torch.Tensor) and len(spec.dims) <= leaf.ndim else spec


def _together(inner: P, own: P, mesh: Mesh) -> P:
    """Combine two specs. A dim that both shard must be divisible: padding of shards is not at the end of the dim."""
    both = inner.divided(own, mesh)
    shared = {placement.dim for placement in own.placements(mesh) if len(both.dim_axes()[placement.dim]) > 1}
    return both.replace(padded={dim: size for dim, size in both.padded.items() if dim not in shared})
