"""Adafactor (Shazeer & Stern, arXiv 1804.04235), as `torch.optim.Adafactor` defines it, also correct on shards.

The second moment of a matrix is the product of row means and column means, so Adafactor is not elementwise. A mean
along a sharded dim is reduced over the axes that shard it. The specs of the parameters define these axes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from sharding_specs import P, whole_shape

from ..functions import PyTree, SpecTree, axis_mesh, explain_keywords
from ..ir import scalar_beside
from ..quantities import is_number
from .hyperparameters import Decay, decay_rates, refuse, require
from .optimizer import Optimizer, Schedule, learning_rate, map_leaves
from .sharded_sums import decays_and_specs, sum_over_shards, whole_along


class Factored(NamedTuple):
    """Second moment of a parameter with at least two dims: n + m numbers instead of n · m."""

    row: PyTree  # (..., n, 1) mean of squares along the last dim
    column: PyTree  # (..., 1, m) mean of squares along the second to last dim


class AdafactorState(NamedTuple):
    """State of `adafactor`."""

    step: PyTree  # () number of updates done
    square: PyTree  # per parameter: Factored, or like the parameter if it has fewer than two dims


Square = Tensor | Factored
_NOT_COMPLEX = (
    "complex parameters do not have row and column means. Store them as torch.view_as_real(w) and use "
    "torch.view_as_complex in the loss, or use an elementwise optimizer, such as adamw"
)


@explain_keywords
def adafactor(
    lr: Schedule = 1e-2,
    *,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
    decay: Decay = None,
) -> Optimizer:
    """Return the optimizer Adafactor: steps like Adam's, from row and column means of the squared gradients.

    v ← v + t^γ (g² − v), kept as row and column means;  u = g / √v̂;  p ← p − α u / max(1, RMS(u) / d).

    The step is relative: α = max(ε₂, RMS(p)) · min(lr, 1/√t).

    >>> import torch
    >>> optimizer = adafactor(0.5)
    >>> params = {"w": torch.ones(2, 3)}
    >>> state = optimizer.init(params)
    >>> state.square["w"].row.shape, state.square["w"].column.shape
    (torch.Size([2, 1]), torch.Size([1, 3]))
    >>> optimizer.update({"w": torch.ones(2, 3)}, state, params)[0]["w"][0]
    tensor([0.5000, 0.5000, 0.5000])

    Args:
        lr: upper bound ρ of the relative step, or a function from the number of updates done to this bound.
        beta2_decay: γ.
        eps: ε₁, a lower bound of √v̂ (by default the eps of the dtype), and ε₂, a lower bound of RMS(p).
        d: largest RMS of an update.
        weight_decay: λ, decoupled from the gradient.
        decay: parameters that decay: path pattern → bool or factor, or a function of path and leaf; by default all.

    Returns:
        An optimizer. Its update takes the specs of the parameters as fourth argument; `train_step` passes them. Its
        `init` raises ValueError for complex parameters, which torch's Adafactor does not support either.

    Raises:
        ValueError: for a number that is out of range.
    """
    require("adafactor", lr=lr, weight_decay=weight_decay)
    _require_own(beta2_decay, eps, d)

    def init(params: PyTree) -> AdafactorState:
        refuse("adafactor", torch.is_complex, params, _NOT_COMPLEX)
        decay_rates(weight_decay, decay, params)  # raises for a pattern that matches nothing
        return AdafactorState(scalar_beside(params), optree.tree_map(_start, params))

    def update(grads: PyTree, state: AdafactorState, params: PyTree, specs: SpecTree = None) -> tuple[PyTree, PyTree]:
        step, bound = state.step.double() + 1, learning_rate(lr, state.step)
        rates = decay_rates(weight_decay, decay, params)

        def one(p: Tensor, g: Tensor, square: Square, constant: tuple[float, P]) -> tuple[Tensor, Square]:
            rate_of_decay, spec = constant
            floor = torch.finfo(p.dtype).eps if eps[0] is None else eps[0]
            square, v = _second_moment(square, g, (step**beta2_decay).to(g.dtype), spec, floor)
            u = g * v.clamp(min=floor**2).rsqrt()
            alpha = _root_mean_square(p, spec).clamp(min=eps[1]) * torch.minimum(bound, step.rsqrt())
            alpha = alpha / (_root_mean_square(u, spec) / d).clamp(min=1.0)
            return p * (1 - bound * rate_of_decay).to(p.dtype) - alpha.to(p.dtype) * u, square

        constants = decays_and_specs("adafactor", "its row and column means need", rates, specs, params)
        new, square = map_leaves(one, params, grads, state.square, constants=constants)
        return new, AdafactorState(state.step + 1, square)

    def of_state(params: PyTree, specs: SpecTree) -> AdafactorState:
        return AdafactorState(P(), optree.tree_map(_placed, params, specs))

    return Optimizer(init, update, of_state, lr=lr)


def _require_own(beta2_decay: float, eps: tuple[float | None, float], d: float) -> None:
    if not (is_number(beta2_decay) and beta2_decay <= 0):
        raise ValueError(f"adafactor(beta2_decay={beta2_decay!r}): γ is a number of at most 0")
    if not (isinstance(eps, (tuple, list)) and len(eps) == 2):
        raise ValueError(f"adafactor(eps={eps!r}): give ε₁, a number or None, and ε₂, a number")
    require("adafactor", eps1=0 if eps[0] is None else eps[0], eps2=eps[1])
    if not (is_number(d) and d > 0):
        raise ValueError(f"adafactor(d={d!r}): the largest RMS of an update is a number above 0")


def _is_factored(leaf: Tensor) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.ndim >= 2


def _start(leaf: Tensor) -> Square:
    if _is_factored(leaf):
        return Factored(torch.zeros_like(leaf[..., :1]), torch.zeros_like(leaf[..., :1, :]))
    return torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _placed(leaf: Tensor, spec: P) -> P | Factored:
    if not _is_factored(leaf):
        return spec
    return Factored(whole_along(spec, leaf.ndim - 1), whole_along(spec, leaf.ndim - 2))


def _second_moment(square: Square, g: Tensor, weight: Tensor, spec: P, floor: float) -> tuple[Square, Tensor]:
    squares = g * g
    if not isinstance(square, Factored):
        square = square + weight * (squares - square)
        return square, square
    row = square.row + weight * (_mean(squares, -1, spec) - square.row)
    column = square.column + weight * (_mean(squares, -2, spec) - square.column)
    return Factored(row, column), row * column / _mean(row, -2, spec).clamp(min=floor)


def _mean(x: Tensor, dim: int, spec: P) -> Tensor:
    axes = [*spec.dim_axes(), *[()] * x.ndim][x.ndim + dim]
    return sum_over_shards(x.sum(dim, keepdim=True), axes) / whole_shape(x.shape, spec, axis_mesh())[dim]


def _root_mean_square(x: Tensor, spec: P) -> Tensor:
    wide = x if x.dtype.itemsize >= 4 else x.float()
    total = sum_over_shards((wide * wide).sum(), sorted(spec.axes))
    return (total / math.prod(whole_shape(x.shape, spec, axis_mesh()))).sqrt()
