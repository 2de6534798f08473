"""Mixed precision as a transform. It is the innermost transform and computes a function in a low-precision dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar

import optree
import torch

from sharding_specs import tree_paths
from sharding_specs.rules import matches, nearest

from ...errors import OrderError
from ...functions import BufferTree, LocalFunction, PyTree, Request, Resolved, SpecTree, explain_keywords
from ...passes import CastBeforeGather, ReduceDtype, WidenedAndNarrowed
from ...requests import LossScale, Masters, Order, RunPass, ScaleLoss, StoredType, SummedApart
from ..transform import Transform
from .mode import PrecisionMode, cast, is_floating
from .tables import STATISTICS, functions_named

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@explain_keywords
@dataclass(frozen=True)
class mixed_precision(Transform):
    """Compute in a low-precision dtype. Updates, optimizer state and sensitive ops stay in float32.

    `train_step` stores the parameters in the compute dtype. Their float32 masters are in the optimizer's state, where
    ZeRO shards them (Micikevicius et al., arXiv 1710.03740 §3.1). Elsewhere, float32 parameters are cast at the start
    of the function, so their gradients are float32. The batch is cast too, except with `inputs="fp32"`. Products are
    computed in low precision. Softmax, norms, losses, powers and sums are computed in float32; the lists are in
    `functional_parallel/transforms/precision/tables.py`. Results are float32. Intermediate values have low precision,
    except for powers and sums that may leave the range of float16.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> plan = fp.chain(fp.mixed_precision("bf16"), fp.zero(3, "data"))
    >>> step = fp.compile(fp.grad_and_value(plan(lambda w, x: torch.mean(x @ w))), Mesh(data=2))
    >>> step(torch.ones(2), torch.ones(4, 2))
    (tensor([1., 1.]), tensor(2.))
    >>> [(c.kind, str(c.operand)) for c in step.program.collectives()]
    [('all_gather', 'bf16[1]'), ('psum', 'f32[]'), ('psum_scatter', 'f32[2]')]

    Args:
        compute: "bf16" or "fp16".
        keep: patterns for the paths of parameters that are not cast. Values computed from these parameters alone and
            products with them also stay in float32. Running statistics of batch norms are never cast.
        islands: additional functions to compute in float32: torch functions or their names.
        params: dtype of ZeRO-3's gathers of parameters: `compute`, the default, or "fp32".
        inputs: the dtype of floating tensors of the batch at the start of the function: `compute`, the default, or
            "fp32", which does not cast them. Use "fp32" for targets in the thousands, for example, because bfloat16 has
            three digits. Products of them are still in low precision.
        results: the dtype of floating results: "fp32", or `compute`, which does not cast them, as for a cache that is
            read again.
        reduce: dtype of the sums of gradients over ranks: "fp32", "bf16" or "fp16".
        masters: whether `train_step` keeps float32 masters. `train.params(state)` then returns these. False trains in
            the compute dtype alone: parameters, optimizer state and updates are rounded to it.
        loss_scale: the loss scale of `train_step`: rules, a constant, or None. The default is `fp.LossScale()` for fp16
            and None for bf16, which has the range of float32.

    Raises:
        ValueError: for an unsupported dtype or loss scale, or an unknown function. When the function is traced, for a
            pattern that matches no parameter.
    """

    compute: str
    _: KW_ONLY
    keep: Sequence[str] = ()
    islands: Iterable[str | Callable[..., Any]] = ()
    params: str | None = None
    inputs: str | None = None
    results: str = "fp32"
    reduce: str = "fp32"
    masters: bool = True
    loss_scale: LossScale | float | str | None = "auto"
    order: ClassVar[Order] = Order.PRECISION
    shown: ClassVar[tuple[str, ...]] = ("compute",)

    def __post_init__(self) -> None:
        for argument in ("keep", "islands"):
            given = getattr(self, argument)
            object.__setattr__(self, argument, (given,) if isinstance(given, str) else tuple(given))
        compute = self.compute
        _type(compute, "compute", ("bf16", "fp16"))
        for argument in ("params", "inputs"):
            _type(compute if getattr(self, argument) is None else getattr(self, argument), argument, (compute, "fp32"))
        _type(self.results, "results", (compute, "fp32"))
        _type(self.reduce, "reduce", ("fp32", "bf16", "fp16"))
        functions_named(self.islands)
        _rules(self.loss_scale, compute)

    def apply(self, f: LocalFunction) -> LocalFunction:
        _refuse_twice(f, self.name)
        dtype = _TYPES[self.compute]
        entering = dtype if self.inputs in (None, self.compute) else None
        keep, islands = (*self.keep, *STATISTICS), functions_named(self.islands)

        def call(resolved: Resolved, first: PyTree, *batch: PyTree) -> tuple[PyTree, SpecTree]:
            _refuse_unused(self.keep, first)
            leaves, kept = _cast(first, dtype, keep)
            into = [None if isinstance(arg, BufferTree) else entering for arg in batch]
            cast_args = [_cast(arg, narrow, STATISTICS) for arg, narrow in zip(batch, into, strict=True)]
            batch, statistics = tuple(arg for arg, _ in cast_args), [x for _, found in cast_args for x in found]
            with PrecisionMode(dtype, [*kept, *statistics], islands):
                result, specs = f.run(resolved, leaves, *batch)
            if self.results == self.compute:
                return result, specs
            wide = optree.tree_map(lambda x: x.float() if is_floating(x) and x.dtype == dtype else x, result)
            return wide, specs

        masters = ", masters in float32" if self.masters else ""
        lies = (f"stored in {self.compute}{masters}", "")
        return f.then(call, describe=self.name, lies=lies).requesting(*self._requests(dtype))

    def _requests(self, dtype: torch.dtype) -> Iterator[Request]:
        kept, scale = partial(_is_kept, (*self.keep, *STATISTICS)), _rules(self.loss_scale, self.compute)
        yield (Masters if self.masters else StoredType)(dtype, kept)
        yield SummedApart(kept)
        if scale is not None:
            yield ScaleLoss(scale)
        if self.params in (None, self.compute):
            yield RunPass(CastBeforeGather(dtype))
        yield RunPass(ReduceDtype(_TYPES[self.reduce]))
        yield RunPass(WidenedAndNarrowed())


def _refuse_twice(f: LocalFunction, name: str) -> None:
    inner = [each for each in f.applied.describe if each.startswith("mixed_precision(")]
    if inner:
        raise OrderError(f"{name} around {inner[0]}: a function is computed in one type; leave one of them out")


def _refuse_unused(keep: Sequence[str], params: PyTree) -> None:
    paths = tree_paths(params)
    for pattern in keep:
        if not any(matches(pattern, path) for path in paths):
            raise ValueError(
                f"mixed_precision(keep={list(keep)!r}): no parameter matches {pattern!r}, so nothing would be kept by "
                f"it; correct the pattern or leave it out. The nearest paths are: {', '.join(nearest(pattern, paths))}"
            )


def _cast(tree: PyTree, dtype: torch.dtype | None, keep: Sequence[str]) -> tuple[PyTree, list[torch.Tensor]]:
    leaves, structure = optree.tree_flatten(tree)
    kept = optree.tree_leaves(_is_kept(keep, tree))
    moved = [leaf if stays or dtype is None else cast(leaf, dtype) for leaf, stays in zip(leaves, kept, strict=True)]
    return structure.unflatten(moved), [leaf for leaf, stays in zip(leaves, kept, strict=True) if stays]


def _is_kept(keep: Sequence[str], tree: PyTree) -> PyTree:
    leaves, structure = optree.tree_flatten(tree)
    return structure.unflatten(
        is_floating(leaf) and any(matches(pattern, path) for pattern in keep)
        for path, leaf in zip(tree_paths(tree), leaves, strict=True)
    )


def _type(name: str, argument: str, supported: Sequence[str]) -> torch.dtype:
    if name not in supported:
        raise ValueError(
            f"mixed_precision({argument}={name!r}) is not supported; it is {' or '.join(map(repr, supported))}"
        )
    return _TYPES[name]


def _rules(scale: LossScale | float | str | None, compute: str) -> LossScale | None:
    if isinstance(scale, LossScale) or scale is None:
        return scale
    if scale == "auto":
        return LossScale() if compute == "fp16" else None
    if isinstance(scale, (int, float)) and not isinstance(scale, bool) and scale > 0:  # constant
        return LossScale(float(scale), window=1 << 62, minimum=float(scale), fail_at_minimum=False)
    raise ValueError(
        f"mixed_precision(loss_scale={scale!r}): it is fp.LossScale(…), a positive number, None, or 'auto', which is "
        "fp.LossScale() for fp16 and None for bf16"
    )
