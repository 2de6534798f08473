"""Rules of ops that create tensors. Results are replicated; `*_like` ops read only a shape and never communicate."""

from __future__ import annotations

import torch
from torch.fx.node import Argument

from ... import _torch
from ...ir import Args, Kwargs
from ..axis_layout import REPLICATED, Partial
from ..decide import OpSharding
from ..op_context import OpContext
from ..registry import Rule, rule

aten = torch.ops.aten


def _decide_whole(step: OpContext) -> OpSharding:
    return OpSharding((), (REPLICATED,) * len(step.results))


def _decide_like(step: OpContext) -> OpSharding:
    """Return the layout of the operand. Partial sums count as replicated, because only their shape is read."""
    place = step.operands[0].place
    return OpSharding((place,), (REPLICATED if isinstance(place, Partial) else place,))


def _decide_new(step: OpContext) -> OpSharding:
    return OpSharding((step.operands[0].place,), (REPLICATED,), of_shapes=True)


_MAKERS = {
    "zeros": aten.zeros.default,
    "ones": aten.ones.default,
    "full": aten.full.default,
    "empty": aten.empty.memory_format,
}
_MAKERS_NEW = {getattr(aten, f"new_{name}").default: maker for name, maker in _MAKERS.items()}
_MAKERS_LIKE = {getattr(aten, f"{name}_like").default: maker for name, maker in _MAKERS.items()}


def _local_like(step: OpContext, x: torch.Tensor, *args: Argument, **kwargs: Argument) -> torch.Tensor:
    if not isinstance(step.decision.operands[0], Partial):
        return step.run(x, *args, **kwargs)
    kwargs.pop("memory_format", None)
    return _made(step, _MAKERS_LIKE[step.node.target], x, (list(x.shape), *args), kwargs)


def _local_new(step: OpContext, x: torch.Tensor, *args: Argument, **kwargs: Argument) -> torch.Tensor:
    return _made(step, _MAKERS_NEW[step.node.target], x, args, kwargs)


def _made(step: OpContext, maker: _torch.Op, x: torch.Tensor, args: Args, options: Kwargs) -> torch.Tensor:
    """Create a tensor without the operand, because the operand would make the result rank-dependent."""
    given = {key: value for key, value in options.items() if value is not None}
    result: torch.Tensor = step.emit(maker, args, {"dtype": x.dtype, "device": x.device, **given})
    return result


def _fill_text(node: torch.fx.Node) -> str:
    return "..., ... -> ..." if isinstance(node.args[1], torch.fx.Node) else "... -> ..."


rule([*_MAKERS.values(), aten.scalar_tensor.default], Rule(decide=_decide_whole))
rule([aten.arange.default, aten.arange.start, aten.arange.start_step, aten.eye.default], Rule(decide=_decide_whole))
rule([aten.linspace.default, aten.tril_indices.default, aten.triu_indices.default], Rule(decide=_decide_whole))
rule(_MAKERS_LIKE, Rule(decide=_decide_like, local=_local_like))
rule(_MAKERS_NEW, Rule(decide=_decide_new, local=_local_new))
rule([aten.fill.Scalar, aten.fill.Tensor], Rule(_fill_text))
