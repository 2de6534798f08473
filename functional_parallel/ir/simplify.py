"""Passes for every traced graph: common subexpression elimination and removal of identities.

They matter for more than speed. Each matrix product on a 3-D activation emits a separate view of it. Three views of one
activation would later cost three psums instead of one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import fx
from torch.fx.node import Argument, Target

from .graph import Traced, reached
from .info import info
from .stand_ins import stays_apart
from .views import RESHAPES, VIEWS

aten = torch.ops.aten

_SAME_SHAPE_IS_IDENTITY = RESHAPES | {
    *(aten.expand.default, aten.slice.Tensor, aten.alias.default, aten.lift_fresh.default)
}


def simplify(traced: Traced) -> Traced:
    """Merge equal nodes and remove identities, in place. Return the graph, sealed."""
    seen: dict[Hashable, fx.Node] = {}
    returned = reached(
        (out for out in traced.outputs if isinstance(out, fx.Node)),
        lambda node: node.args[:1] if node.target in VIEWS else (),
    )
    for node in list(traced.nodes):
        original = _identity_of(node)
        if original is None and node not in returned and _changes_nothing(node):  # else an output would share memory
            original = node.args[0]
        if original is None:
            key = _key(node)
            original = seen.setdefault(key, node) if key is not None else node
        if original is not node:
            traced.replace(node, original)
    traced.seal()
    return traced


_FILLED_LIKE: dict[Target, float] = {aten.ones_like.default: 1, aten.zeros_like.default: 0}


def forget_values(traced: Traced) -> Traced:
    """Rewrite `ones_like(x)` and `zeros_like(x)` as `full`, in place, because they do not need the value of x."""
    # A gradient starts with ones like the loss. Without this pass, the loss and its psum would be computed only for the
    # shape.
    for node in traced.nodes:
        filling = _FILLED_LIKE.get(node.target)
        if filling is not None:
            aval = info(node).aval
            node.args = (list(aval.shape), filling)
            node.kwargs = {"dtype": aval.dtype, "device": aval.device}
            node.target = aten.full.default
    traced.seal()
    return traced


def _identity_of(node: fx.Node) -> fx.Node | None:
    if node.target in _SAME_SHAPE_IS_IDENTITY and not info(node).no_grad:
        source = node.args[0]
        if isinstance(source, fx.Node) and info(source).val == info(node).val:
            return source
    return None


def _changes_nothing(node: fx.Node) -> bool:
    """Whether an op is `x * 1`, `x / 1` or `x - 0`, or `x + 0` of integers: identities for every bit."""
    # -0.0 + 0 is 0.0, so `x + 0` is an op, but a linear one. A product of complex numbers makes NaN from infinity.
    neutral = _NEUTRAL.get(node.target)
    if neutral is None or node.kwargs or len(node.args) != 2 or info(node).no_grad:
        return False
    x, number = node.args
    dtype = info(node).aval.dtype
    if isinstance(number, fx.Node) or number != neutral or info(x).val != info(node).val or dtype.is_complex:
        return False
    return math.copysign(1, number) > 0 and not (node.target in _ADDITIONS and dtype.is_floating_point)


_ADDITIONS = {aten.add.Tensor, aten.add.Scalar}
_NEUTRAL: dict[Target, int] = {
    **dict.fromkeys([*_ADDITIONS, aten.sub.Tensor, aten.sub.Scalar], 0),
    **dict.fromkeys([aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar], 1),
}


def _key(node: fx.Node) -> Hashable | None:
    target = node.target
    is_random = isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
    if is_random or stays_apart(target):
        return None
    try:
        key = (target, frozen(node.args), frozen(node.kwargs), info(node).no_grad)
        hash(key)
    except TypeError:
        return None
    return key


def frozen(value: Argument) -> Hashable:
    """Return an argument of an op as a key that distinguishes types and the bits of numbers."""
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(frozen, value))
    if isinstance(value, dict):
        return tuple((name, frozen(part)) for name, part in sorted(value.items()))
    if isinstance(value, slice):
        return ("slice", frozen(value.start), frozen(value.stop), frozen(value.step))
    if isinstance(value, float):
        return ("float", value.hex())
    return (type(value).__name__, value)
