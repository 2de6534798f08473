"""Local SGD and DiLoCo: data parallelism that exchanges parameters every few steps, not gradients in each."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import ClassVar

import optree

from sharding_specs import P

from ..functions import LocalFunction, Resolved, SpecTree, explain_keywords, refuse_idle_states, specs_per_leaf
from ..optim import Optimizer, is_declared_elementwise, sgd
from ..partitioner import Partitioning
from ..quantities import is_positive_int
from ..requests import Order, Replicas
from .argument_specs import batch_arg_specs, batch_lies
from .transform import Transform


@explain_keywords
@dataclass(frozen=True)
class local_sgd(Transform):
    """Train a replica of the model on each rank of an axis, and average the replicas every few steps.

    Local SGD (Stich, arXiv 1805.09767). A step between two averages sends nothing over the axis. With `inner=1` the
    parameters are averaged after every step. For SGD without momentum that is synchronous data parallelism.
    With more inner steps or more replicas, replicas drift apart and convergence suffers.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> plan = fp.local_sgd("data", inner=2)
    >>> train = fp.train_step(lambda w, x: ((x - w) ** 2).mean(), fp.optim.sgd(0.25), Mesh(data=2), plan)
    >>> state = train.init(torch.zeros(()))
    >>> for batch in torch.tensor([[0.0, 8.0], [0.0, 8.0]]):
    ...     state, metrics = train(state, batch)
    ...     print(train.params(state), metrics.loss, train.program.counts())
    tensor(0.) None {}
    tensor(3.) tensor(20.) {('psum', ('data',)): 2}

    Args:
        axis: the mesh axis of the replicas. Each takes its part of every batch, and has its own optimizer state.
        inner: number of steps from one average to the next.
        batch, strict: as for `data_parallel`.

    Returns:
        The transform, the last of a chain, for `train_step`. `train.params(state)` are the parameters of the last
        average. `metrics.loss` is the mean over replicas and steps since the average before, in a step that averages;
        in other steps it is None, because it would have to be sent. A norm is not reported; each replica clips its own.

        With `fp.mixed_precision` inside, each replica has its own masters and loss scale. The masters are averaged, in
        float32. A replica that skips a step takes part in the exchange all the same. In a step that averages,
        `metrics.skipped` is whether no replica made an update, and `metrics.loss_scale` is the lowest.

        Outside of `train_step` it is `data_parallel`.

    Raises:
        ValueError: if `inner` is not a positive integer.
    """

    axis: str
    _: KW_ONLY
    inner: int
    batch: SpecTree = None
    strict: bool = False
    order: ClassVar[Order] = Order.REPLICAS
    shown: ClassVar[tuple[str, ...]] = ("axis", "inner")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_positive_int(self.inner):
            raise ValueError(
                f"{self.name}: inner is the number of steps from one exchange to the next, an integer above 0"
            )

    def apply(self, f: LocalFunction) -> LocalFunction:
        return self._applied(f, None)

    def _applied(self, f: LocalFunction, outer: Optimizer | None) -> LocalFunction:
        lies = (f"a replica for each rank of {self.axis!r}", batch_lies(self.batch, self.axis))
        local = Partitioning(self.name, self.axis, self.in_specs, strict=self.strict, lies=lies).apply(f)
        return local.requesting(Replicas(self.axis, int(self.inner), outer, f))

    def in_specs(self, inner: Resolved) -> tuple[SpecTree, ...]:
        own = tuple(batch_arg_specs(inner.args, self.batch, P(self.axis)))
        given = specs_per_leaf(own, inner.args[1:], f"specs of {self.name}", 1)
        refuse_idle_states(given, self.name, self.axis)
        return (P(), *optree.tree_map(partial(_outermost, self.axis), given, inner.arguments[1:]))


_DILOCO = sgd(0.7, momentum=0.9, nesterov=True)  # §3.1 of the paper


@explain_keywords
@dataclass(frozen=True)
class diloco(local_sgd):
    """Train replicas like `local_sgd`, and give the difference that their steps made to an outer optimizer.

    DiLoCo (Douillard et al., arXiv 2311.08105). The outer gradient is the parameters of the last exchange minus the
    mean of the replicas. With `outer=fp.optim.sgd(1.0)` the result equals `local_sgd`'s.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> plan = fp.diloco("data", inner=2, outer=fp.optim.sgd(0.5))
    >>> train = fp.train_step(lambda w, x: ((x - w) ** 2).mean(), fp.optim.sgd(0.25), Mesh(data=2), plan)
    >>> state = train.init(torch.zeros(()))
    >>> for batch in torch.tensor([[0.0, 8.0], [0.0, 8.0]]):
    ...     state, metrics = train(state, batch)
    >>> train.params(state)                                       # half of the way that local_sgd goes
    tensor(1.5000)

    Args:
        axis: the mesh axis of the replicas.
        inner: number of steps from one exchange to the next.
        outer: an elementwise optimizer of `fp.optim`. The default is the paper's: Nesterov momentum 0.9, rate 0.7.
        batch, strict: as for `data_parallel`.

    Returns:
        The transform; see `local_sgd`.

    Raises:
        ValueError: if `inner` is not a positive integer, or `outer` is not elementwise.
    """

    outer: Optimizer = field(default=_DILOCO, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.outer, Optimizer) or not is_declared_elementwise(self.outer):
            raise ValueError(
                f"diloco({self.axis!r}, outer={self.outer!r}): the outer optimizer updates shards of the parameters, "
                "so it is an elementwise one of fp.optim, such as fp.optim.sgd(0.7, momentum=0.9, nesterov=True)"
            )
        super().__post_init__()

    def apply(self, f: LocalFunction) -> LocalFunction:
        return self._applied(f, self.outer)


def _outermost(axis: str, own: P, inner: P) -> P:
    if axis not in own.axes:
        return inner
    dim = next(dim for dim, axes in enumerate(own.dim_axes()) if axis in axes)
    dims = [*inner.dims, *[()] * (dim + 1 - len(inner.dims))]
    return inner.replace([*dims[:dim], (axis, *dims[dim]), *dims[dim + 1 :]])
