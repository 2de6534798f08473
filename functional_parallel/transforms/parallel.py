"""Data parallelism, tensor parallelism and ZeRO. All are the transform `partition` with different specs."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import optree
import torch

from sharding_specs import Mesh, P, validate

from ..functions import LocalFunction, Resolved, SpecTree, explain_keywords
from ..partitioner import Partitioning
from ..passes import GatherAgain, GatherPlacement, ReduceScatterFirst
from ..quantities import is_positive_int
from ..requests import DataAxis, Master, Order, RunPass, UpdateSharding, owners_of, requested_passes
from ..rules import Owned
from .argument_specs import Rules, batch_arg_specs, batch_lies, only_axis, parameter_specs
from .as_code import as_code
from .transform import Transform


@explain_keywords
@dataclass(frozen=True)
class tensor_parallel(Transform):
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

    axis: str
    specs: Rules
    _: KW_ONLY
    batch: SpecTree = None
    strict: bool = False
    order: ClassVar[Order] = Order.TENSOR
    shown: ClassVar[tuple[str, ...]] = ("axis",)

    def in_specs(self, inner: Resolved) -> tuple[SpecTree, ...]:
        found = parameter_specs(inner.args[0], self.specs, self.axis, self.name, self.source)
        return (only_axis(found, self.axis, self.name), *batch_arg_specs(inner.args, self.batch))

    def apply(self, f: LocalFunction) -> LocalFunction:
        lies = (f"{as_code(self.specs)} over {self.axis!r}", batch_lies(self.batch, self.axis, ""))
        local = Partitioning(self.name, self.axis, self.in_specs, strict=self.strict, lies=lies).apply(f)
        return local.requesting(RunPass(GatherAgain(self.axis)))


@explain_keywords
@dataclass(frozen=True)
class data_parallel(Transform):
    """Split the batch over an axis and sum the gradients: `zero(0, axis)`. With a master, torch's `DataParallel`.

    The master alone has the batch, the parameters, the optimizer's state and its update. A step has five exchanges,
    where the other step sums gradients on all ranks. The batch is scattered, parameters are broadcast, outputs are
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

    axis: str
    _: KW_ONLY
    master: int | None = None
    batch: SpecTree = None
    strict: bool = False
    order: ClassVar[Order] = Order.DATA
    shown: ClassVar[tuple[str, ...]] = ("axis", "master")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.master is not None and self.master != 0 and not is_positive_int(self.master):
            raise ValueError(f"{self.name}: the master is the index of a rank along {self.axis!r}, 0 or more")

    def apply(self, f: LocalFunction) -> LocalFunction:
        if self.master is None:
            return zero(0, self.axis, batch=self.batch, strict=self.strict).apply_as(f, self.name)
        data = [each.axis for each in f.applied.all(DataAxis)] + [*owners_of(f.applied)]
        if data:
            raise ValueError(
                f"{self.name} stands outside of {f}, which splits the batch over {data[0]!r}: "
                "a plan with a master has one data axis; make them one, or leave master= out"
            )
        lies = (f"on rank {self.master} of {self.axis!r}", batch_lies(self.batch, self.axis))
        owner = Owned(self.master)
        how = Partitioning(self.name, self.axis, self.in_specs, strict=self.strict, owner=owner, lies=lies)
        return how.apply(f).resolving(self._with_norm).requesting(Master(self.axis, self.master))

    def in_specs(self, inner: Resolved) -> tuple[SpecTree, ...]:
        size = inner.mesh.axis_size(self.axis)
        if self.master is not None and self.master >= size:
            raise ValueError(
                f"{self.name}: {self.axis!r} has {size} ranks, 0 … {size - 1}; take one of them as the master"
            )
        return (P(), *batch_arg_specs(inner.args, self.batch, P(self.axis)))

    def _with_norm(self, resolved: Resolved) -> Resolved:
        return replace(resolved, norm=tuple(_shards(resolved.inside, self.axis)))


@explain_keywords
@dataclass(frozen=True)
class zero(Transform):
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

    stage: int
    axis: str
    specs: Rules = None
    _: KW_ONLY
    layout: str = "dims"
    batch: SpecTree = None
    whole_below: int = 0
    keep_gathered: bool = False
    prefetch: int = 1
    strict: bool = False
    order: ClassVar[Order] = Order.DATA
    shown: ClassVar[tuple[str, ...]] = ("stage", "axis", "layout")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage not in (0, 1, 2, 3) or isinstance(self.stage, bool):
            raise ValueError(f"zero(stage={self.stage!r}): the stages are 0 (data parallel), 1, 2 and 3")
        for what, number in (("whole_below", self.whole_below), ("prefetch", self.prefetch)):
            if number != 0 and not is_positive_int(number):
                raise ValueError(
                    f"zero({self.stage}, {self.axis!r}, {what}={number!r}): it is an integer of at least 0"
                )
        _check_layout(self.layout, self.stage, self.axis, self.specs, self.whole_below)

    def apply(self, f: LocalFunction) -> LocalFunction:
        return self.apply_as(f, self.name)

    def apply_as(self, f: LocalFunction, name: str) -> LocalFunction:
        """Transform a function, as a transform of this name."""
        for held, rank in owners_of(f.applied).items():
            raise ValueError(
                f"{name} stands outside of {' → '.join(f.applied.describe)}: rank {rank} of {held!r} holds all "
                f"training state there, and {self.axis!r} shards none of it; leave master= out to use {name}"
            )
        gathered, lies = (0,) if self.stage == 3 else (), (self._lie(), batch_lies(self.batch, self.axis))
        how = Partitioning(name, self.axis, self.in_specs, gathered=gathered, strict=self.strict, lies=lies)
        local = how.apply(f).resolving(self._split).requesting(DataAxis(self.axis))
        axes = tuple(each.axis for each in local.applied.all(DataAxis))
        if len(axes) > 1:
            local = local.requesting(RunPass(ReduceScatterFirst(axes)))
        if self.stage in (1, 2):
            return local.requesting(UpdateSharding(self.axis, self.layout == "flat", self.stage == 1))
        if self.stage == 0:
            return local
        gathers = (each for each in requested_passes(f.applied) if isinstance(each, GatherPlacement))
        kept = frozenset(each.axis for each in gathers if each.keep)
        return local.requesting(RunPass(GatherPlacement(self.axis, self.keep_gathered, self.prefetch, kept)))

    def in_specs(self, inner: Resolved) -> tuple[SpecTree, ...]:
        if self.stage == 3:
            parameters = optree.tree_structure(inner.args[0]).unflatten(self._shards(inner))
        else:
            parameters = P(reduced={self.axis}) if self.stage else P()
        return (parameters, *batch_arg_specs(inner.args, self.batch, P(self.axis)))

    def _split(self, resolved: Resolved) -> Resolved:
        if self.stage == 0:
            return resolved if resolved.norm else replace(resolved, norm=tuple(_shards(resolved.inside, self.axis)))
        found = replace(resolved, norm=(P(),) * len(resolved.update))
        return found if self.stage == 3 or self.layout == "flat" else found.split_update(self._shards(resolved.inside))

    def _shards(self, inner: Resolved) -> list[P]:
        params, mesh = inner.args[0], inner.mesh
        leaves, structure = optree.tree_flatten(params)
        if self.specs is None:
            chosen = _shards(inner, self.axis, self.whole_below)
        else:
            found = parameter_specs(params, self.specs, self.axis, self.name, self.source)
            chosen = optree.tree_leaves(only_axis(found, self.axis, self.name))
        places = [_padded(*each, mesh) for each in zip(leaves, inner.updated(), chosen, strict=True)]
        validate(params, structure.unflatten(places), mesh)  # lists the paths with errors
        pairs = zip(chosen, places, strict=True)
        return [own.replace(padded={d: n for d, n in both.padded.items() if d in _dims(own)}) for own, both in pairs]

    def _lie(self) -> str:
        shards = f"{'a dim of each' if self.specs is None else as_code(self.specs)} over {self.axis!r}"
        if self.layout == "flat":
            return f"in the update one vector, sharded over {self.axis!r}"
        return {0: f"replicated over {self.axis!r}", 3: f"at rest {shards}"}.get(self.stage, f"in the update {shards}")


def _check_layout(layout: str, stage: int, axis: str, specs: Rules, whole_below: int) -> None:
    if layout not in ("dims", "flat"):
        raise ValueError(f"zero(layout={layout!r}): it is 'dims' or 'flat'")
    if layout == "dims":
        return
    call = f"zero({stage}, {axis!r}, layout='flat')"
    if stage == 0:
        raise ValueError(f"{call}: stage 0 splits nothing, so there is no layout; take stage 1 or 2, or leave it out")
    if stage == 3:
        raise ValueError(f"{call}: stage 3 gathers each parameter by itself; leave the layout out, or take stage 2")
    if specs is not None or whole_below:
        raise ValueError(f"{call}: specs and whole_below split single parameters; leave them out, or the layout")


def _shards(inner: Resolved, axis: str, whole_below: int = 0) -> list[P]:
    """Choose a free dim of each parameter: the first that the axis divides, for contiguous shards, else the longest.

    The dim of the layers of a stack is not free: each layer is on the ranks of its stage.
    """
    leaves: list[Any] = optree.tree_leaves(inner.args[0])
    lengths = inner.stacks.lengths if inner.stacks is not None else [0] * len(leaves)
    used = [{placement.dim for placement in spec.placements(inner.mesh)} for spec in inner.updated()]
    rows = zip(leaves, used, lengths, strict=True)
    return [_shard(leaf, axis, inner.mesh, dims | {0} if n else dims, whole_below) for leaf, dims, n in rows]


def _shard(leaf: Any, axis: str, mesh: Mesh, used: set[int], whole_below: int) -> P:
    if not isinstance(leaf, torch.Tensor) or not leaf.ndim or leaf.numel() < whole_below:
        return P()
    free = [dim for dim in range(leaf.ndim) if dim not in used and leaf.shape[dim]]
    if not free:
        return P()
    even = [dim for dim in free if leaf.shape[dim] % mesh.axis_size(axis) == 0]
    best = even[0] if even else max(free, key=lambda dim: leaf.shape[dim])
    return P(*[None] * best, axis).fitted(leaf.shape, mesh)


def _padded(leaf: Any, inner: P, own: P, mesh: Mesh) -> P:
    """Combine two specs. A dim of `own` is padded if the axes of both do not divide it, but the axes of `inner` do."""
    both = inner.divided(own, mesh)
    if not isinstance(leaf, torch.Tensor) or both.named > leaf.ndim:
        return both
    fits = inner.fitted(leaf.shape, mesh).padded.keys() <= inner.padded.keys()
    return both.fitted(leaf.shape, mesh) if fits else both


def _dims(spec: P) -> set[int]:
    return {dim for dim, axes in enumerate(spec.dim_axes()) if axes}
