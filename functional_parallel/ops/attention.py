"""Scaled dot-product attention as one op of a traced forward, independent of the kernel that a device selects.

A trace records `torch.ops.fp.attention`. When run, the op calls torch's `scaled_dot_product_attention`. It uses the
definition if a second or forward derivative is required, because the fused kernels do not have these.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from .. import _torch, random
from .. import collectives as fp
from ..ir import define_op, info, tensor_operands
from ..rules import REPLICATED, OpContext, OpSharding, Rule, Shard, rule
from ..tracing import intercept, recorder
from .attention_kernels import fused_attention

Mask = Tensor | None


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, is_causal: bool, scale: float | None) -> Tensor:
    """Compute softmax(q kᵀ · scale + mask) v. If k and v have fewer heads, groups of query heads share them.

    Shapes are q (…, heads, queries, dim), k (…, groups, keys, dim), v (…, groups, keys, values), and the mask's is
    broadcast to (…, heads, queries, keys). It is boolean (True = attend) or added. The default scale is 1/√dim.
    """
    if _torch.needs_higher_derivatives():
        return _as_defined(q, k, v, mask, is_causal, scale)
    k, v = _for_every_head(q, k, v)
    if _takes_fused_kernel(q):
        found = fused_attention(q, k, v, mask, is_causal, scale)
        if found is not None:
            return found
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale)


def _with_batch_of_all(*operands: Tensor) -> tuple[Tensor, ...]:
    if all(x.ndim <= 2 for x in operands):
        return operands
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in operands))
    heads, *groups = (x.shape[-3] if x.ndim > 2 else 1 for x in operands)
    shared = max(groups)
    shapes = (
        (*batch, count, *x.shape[-2:]) for count, x in zip((max(heads, shared), shared, shared), operands, strict=True)
    )
    return tuple(x if x.shape == shape else x.expand(shape) for x, shape in zip(operands, shapes, strict=True))


def _for_every_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if k.ndim <= 2 or k.shape[-3] == q.shape[-3]:
        return k, v
    repeats = q.shape[-3] // k.shape[-3]
    return k.repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)


def _as_defined(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, is_causal: bool, scale: float | None, dropout: float = 0.0
) -> Tensor:
    k, v = _for_every_head(q, k, v)
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        hidden = torch.full((), -math.inf, dtype=scores.dtype, device=scores.device)
        scores = torch.where(mask, scores, hidden) if mask.dtype == torch.bool else scores + mask
    probabilities = scores.softmax(-1)
    return (random.dropout(probabilities, dropout) if dropout else probabilities) @ v


@intercept(torch.nn.functional.scaled_dot_product_attention, inside=True)
@intercept(torch.nn.functional.scaled_dot_product_attention)
def _in_forwards(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Record attention as one op, or by its definition in a derivative that a loss takes: no kernel has one of that."""
    if attn_mask is not None and is_causal:
        raise ValueError(
            "scaled_dot_product_attention takes attn_mask or is_causal=True, not both, as in torch: "
            "write the causal mask into attn_mask"
        )
    q, k, v = _with_batch_of_all(query, key, value)
    if dropout_p or _torch.differentiating_level():
        return _as_defined(q, k, v, attn_mask, is_causal, scale, dropout_p)
    recorded: Tensor = _OP(q, k, v, attn_mask, is_causal, scale)
    return recorded


@intercept(torch.nn.functional.scaled_dot_product_attention, always=True)
def _in_every_trace(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **named: Any,
) -> Tensor:
    """Compute attention with dropout by its definition, since kernels make their own draws; else choose the kernel."""
    if dropout_p:
        result: Tensor = _in_forwards(query, key, value, attn_mask, dropout_p, is_causal, scale, **named)
        return result
    if not _takes_fused_kernel(query) or (attn_mask is not None and is_causal):
        return NotImplemented  # type: ignore[no-any-return]
    q, k, v = _with_batch_of_all(query, key, value)
    return attention(q, k, v, attn_mask, is_causal, scale)


def _takes_fused_kernel(q: Tensor) -> bool:
    active = recorder()
    is_forward = active is not None and active.forward_only and active.on_node is None
    return not is_forward and torch.version.hip is None and _torch.wished_device(q.device).type == "cuda"


def _fake(q: Tensor, k: Tensor, v: Tensor, mask: Mask, is_causal: bool, scale: float | None) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


_SCHEMA = "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float? scale) -> Tensor"
_OP = define_op(_SCHEMA, attention, _fake, attention)


# --- The rule ---


def _text(node: fx.Node) -> str:
    """Return `"b (g r) s^ d^, b g t^ d^, b g t^ e^ -> b (g r) s e"`: a key head and its query heads share a rank."""
    q, k = (info(operand).aval for operand in tensor_operands(node)[:2])
    batch = [f"b{dim}" for dim in range(q.ndim - 3)]
    grouped = q.ndim > 2 and q.shape[-3] != k.shape[-3]
    heads = [] if q.ndim < 3 else ["(g r)"] if grouped else ["g"]
    groups = [] if q.ndim < 3 else ["g"]
    text = f"{_row(batch, heads, 's^ d^')}, {_row(batch, groups, 't^ d^')}, {_row(batch, groups, 't^ e^')}"
    mask = node.args[3]
    if isinstance(mask, fx.Node):
        names = [*batch, *heads, "s^", "t^"]
        shape = info(mask).aval.shape
        text += ", " + " ".join(
            "1" if size == 1 else name for size, name in zip(shape, names[-len(shape) :], strict=True)
        )
    return f"{text} -> {_row(batch, heads, 's e')}"


def _row(batch: list[str], heads: list[str], rest: str) -> str:
    return " ".join([*batch, *heads, rest])


def _decide(step: OpContext) -> OpSharding | None:
    # The query heads stay sharded, and each rank selects the key heads of its query heads.
    q, k = step.operands[0], step.operands[1]
    heads_dim = q.aval.ndim - 3
    split = isinstance(q.place, Shard) and q.place.dim == heads_dim and isinstance(q.place.outer, int)
    if not split or k.place != REPLICATED or step.parts.divide(k.aval.shape[-3]) or not step.parts.is_even:
        return None
    return OpSharding((q.place, *[REPLICATED] * (len(step.operands) - 1)), (q.place,), None)


def _local(
    step: OpContext, q: Tensor, k: Tensor, v: Tensor, mask: Mask, is_causal: bool, scale: float | None
) -> Tensor:
    place = step.decision.operands[0]
    if step.choice is None and isinstance(place, Shard) and q.shape[-3] != step.operands[0].aval.shape[-3]:
        assert isinstance(place.outer, int), place  # by `_decide`
        heads, groups = step.operands[0].aval.shape[-3], k.shape[-3]
        held = torch.arange(q.shape[-3], device=q.device)
        mine = step.parts.whole_position(held, fp.axis_index(step.axis), q.shape[-3], place.outer)
        group = mine // (heads // groups)
        k, v = (x.index_select(x.ndim - 3, group) for x in (k, v))
        if mask is not None and mask.ndim > 2 and mask.shape[-3] != 1:
            mask = mask.index_select(mask.ndim - 3, mine)
    return step.run(q, k, v, mask, is_causal, scale)


rule([_OP], Rule(_text, _local, _decide))
