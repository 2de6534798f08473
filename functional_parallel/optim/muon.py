"""Muon (Jordan, https://kellerjordan.github.io/posts/muon), as `torch.optim.Muon` defines it, also correct on shards.

Newton-Schulz iterations need the full matrix. Each rank gets some of the matrices of one shape in full, iterates on
these, and returns the shards. For n ranks that sends 2 (n − 1) / n of a rank's momentum, and no work is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from sharding_specs import P, whole_shape

from ..functions import PyTree, SpecTree, axis_mesh, explain_keywords, relayout_leaf
from ..ir import is_trained, scalar_beside
from ..quantities import is_positive_int
from .hyperparameters import Decay, decay_rates, refuse, require
from .optimizer import Optimizer, Schedule, learning_rate, map_leaves, zeros_like
from .sharded_sums import decays_and_specs

_FACTORS: dict[str, Callable[[int, int], float]] = {  # of the learning rate, by the shape of a matrix
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
_NO_MATRIX = (
    "not a real matrix. Give it to another optimizer: fp.optim.by_path({'*/bias': fp.optim.adamw(…), …, "
    "'*': fp.optim.muon(…)})"
)


class MuonState(NamedTuple):
    """State of `muon`."""

    step: PyTree  # () number of updates done
    momentum: PyTree  # like params: moving average of gradients


@explain_keywords
def muon(
    lr: Schedule,
    *,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str = "original",
    dtype: torch.dtype = torch.bfloat16,
    decay: Decay = None,
) -> Optimizer:
    """Return the optimizer Muon for matrices: steps along the momentum, with all singular values made about 1.

    m ← m + (1−μ)(g − m);  x = g + μ (m − g), divided by its norm;  k times: x ← a x + (b x xᵀ + c (x xᵀ)²) x;
    p ← p (1 − lr λ) − lr f x.

    >>> import torch
    >>> optimizer = muon(0.1, weight_decay=0.0)
    >>> params = {"w": torch.eye(2)}
    >>> optimizer.update({"w": torch.eye(2)}, optimizer.init(params), params)[0]["w"].round(decimals=1)
    tensor([[0.9000, 0.0000],
            [0.0000, 0.9000]])

    Args:
        lr: learning rate, or a function from the number of updates done to the learning rate.
        weight_decay: λ, decoupled from the gradient.
        momentum: μ.
        nesterov: whether to use Nesterov momentum. Without it, x = m.
        ns_coefficients: a, b and c.
        eps: lower bound of the norm.
        ns_steps: k, the number of iterations.
        adjust_lr_fn: f for n × m: √max(1, n / m) if "original", 0.2 √max(n, m) if "match_rms_adamw".
        dtype: dtype of the iterations.
        decay: parameters that decay: path pattern → bool or factor, or a function of path and leaf; by default all.

    Returns:
        An optimizer. Its update takes the specs of the parameters as fourth argument; `train_step` passes them. Its
        `init` raises ValueError for a parameter that is not a real matrix. `by_path` gives those to another optimizer.

    Raises:
        ValueError: for a value that is out of range.
    """
    require("muon", lr=lr, weight_decay=weight_decay, momentum=momentum, eps=eps)
    if adjust_lr_fn not in _FACTORS:
        raise ValueError(f"muon(adjust_lr_fn={adjust_lr_fn!r}): it is {' or '.join(map(repr, _FACTORS))}")
    if not is_positive_int(ns_steps):
        raise ValueError(f"muon(ns_steps={ns_steps!r}): it is a number of iterations of at least 1")

    def init(params: PyTree) -> MuonState:
        refuse("muon", lambda leaf: leaf.ndim != 2 or leaf.is_complex(), params, _NO_MATRIX)
        decay_rates(weight_decay, decay, params)  # raises for a pattern that matches nothing
        return MuonState(scalar_beside(params), zeros_like(params))

    def directions(p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        m = m + (1 - momentum) * (g - m)
        return g + momentum * (m - g) if nesterov else m, m

    def orthogonalized(x: Tensor) -> Tensor:  # (matrices, rows, columns)
        tall, (a, b, c) = x.shape[-2] > x.shape[-1], ns_coefficients
        y: Tensor = x.to(dtype).mT if tall else x.to(dtype)
        y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=eps)
        for _ in range(ns_steps):
            gram = y @ y.mT
            y = a * y + (b * gram + c * (gram @ gram)) @ y
        return (y.mT if tall else y).to(x.dtype)

    def update(grads: PyTree, state: MuonState, params: PyTree, specs: SpecTree = None) -> tuple[PyTree, MuonState]:
        rate = learning_rate(lr, state.step)
        aims, averages = map_leaves(directions, params, grads, state.momentum)
        leaves, tree = optree.tree_flatten(params)
        given, aims = tree.flatten_up_to(grads), tree.flatten_up_to(aims)
        decays = decay_rates(weight_decay, decay, params)
        constants = tree.flatten_up_to(decays_and_specs("muon", "full matrices need", decays, specs, params))
        alike: dict[tuple[torch.Size, torch.dtype, P], list[int]] = {}
        for i, (leaf, (_, spec)) in enumerate(zip(leaves, constants, strict=True)):
            if is_trained(leaf) and given[i] is not None:
                alike.setdefault((leaf.shape, leaf.dtype, spec), []).append(i)
        for (shape, kind, spec), members in alike.items():
            found = _of_full_matrices(orthogonalized, torch.stack([aims[i] for i in members]), spec)
            own, full = rate.to(kind), whole_shape(shape, spec, axis_mesh()) if spec.axes else shape
            for i, x in zip(members, found.unbind(), strict=True):
                leaves[i] = leaves[i] * (1 - own * constants[i][0]) - own * _FACTORS[adjust_lr_fn](*full) * x
        return tree.unflatten(leaves), MuonState(state.step + 1, averages)

    return Optimizer(init, update, lambda params, specs: MuonState(P(), specs), lr=lr)


def _of_full_matrices(function: Callable[[Tensor], Tensor], shards: Tensor, spec: P) -> Tensor:
    axes = tuple(axis for dim in spec.dim_axes() for axis in reversed(dim))  # the order of their moves
    split, whole = P(None, *spec.dim_axes()), P(axes, padded={0: len(shards)} if axes else None)
    return relayout_leaf(function(relayout_leaf(shards, split, whole)), whole, split)
