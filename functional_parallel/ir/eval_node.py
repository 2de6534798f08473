"""Run the op of a traced node with its derivative.

A raw library op does not have a derivative, so gradients through it would silently be zero. Each collective op is
therefore called as its differentiable primitive.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import optree
import torch
from torch import fx
from torch.fx.node import Argument

from .. import _torch
from ..collectives import apply_primitive, call_of, primitive_of
from ..errors import CustomFunctionError
from .graph import Args, Kwargs
from .info import info
from .source import current_source
from .stand_ins import differentiable_form, origin_of


def eval_node(target: Callable[..., Any], args: Args, kwargs: Kwargs) -> Argument:
    function = differentiable_form(target)
    if function is not None:
        result = function(*args, **kwargs)
        is_one = isinstance(result, torch.Tensor) and origin_of(target) is not target  # the form returns a list
        return [result] if is_one else result
    primitive = primitive_of(target)
    if primitive == "axis_index":
        return target(*args)
    if primitive is not None:
        call = call_of(primitive, args)
        return apply_primitive(primitive, call.operand, call.axes, *call.params)
    if isinstance(target, torch._ops.OpOverload) and not _torch.has_derivative(target):
        _refuse_derivative(target, args, kwargs)
    return _torch.under_transforms(target)(*args, **kwargs)


def _refuse_derivative(op: _torch.Op, args: Args, kwargs: Kwargs) -> None:
    operands = [leaf for leaf in optree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        raise CustomFunctionError(
            f"{current_source()}: {op} has no derivative that torch.func knows, so the gradient through it would "
            "silently be zero: write a torch.autograd.Function that calls it, and say so, "
            f"fp.register_rule(torch.ops.{op}, '… -> …', function=YourFunction.apply), see docs/rules.md; or call it "
            "under torch.no_grad() where no gradient is wanted"
        )


def grad_mode_of(node: fx.Node) -> AbstractContextManager[Any]:
    """Return `torch.no_grad()` if the op was recorded under it. Unlike through `detach`, tangents still propagate."""
    return torch.no_grad() if info(node).no_grad else nullcontext()


def explicit_casts() -> AbstractContextManager[None]:
    """Declare that ops inside write their casts explicitly, so that no torch.func derivative can miss one."""
    return _torch.pushed(_explicit(), True)


def casts_are_explicit() -> bool:
    return bool(_explicit())


def _explicit() -> list[bool]:
    return _torch.of_thread("explicit casts", list)
