"""Choice among torch's fused attention kernels on CUDA, as a function of shapes and dtypes.

torch chooses by the device that it runs on. Its first choice on recent devices, cuDNN, has gradients that are NaN for
some shapes with an incomplete last tile of 128 keys, so it is chosen for full tiles without a mask only.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ir import Traced, info, named_arguments

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)
_MASK_ALIGNMENT = 8  # elements, as torch pads the bias of its efficient kernel
_OPS = {
    getattr(aten, f"_scaled_dot_product_{name}_attention").default: name for name in ("cudnn", "flash", "efficient")
}


class AttentionKernel(NamedTuple):
    """Attention kernel: "cudnn", "flash", "efficient", or "math" for separate ops of torch; and the reason."""

    name: str
    reason: str


class Shape(NamedTuple):
    dtype: torch.dtype
    head: int
    value: int
    queries: int
    keys: int
    has_mask: bool
    is_causal: bool


def attention_kernel(
    shape: Shape, capability: tuple[int, int] = (9, 0), enabled: Collection[str] = ("cudnn", "flash", "efficient")
) -> AttentionKernel:
    """Return the kernel for an attention on CUDA. By default the device is assumed to be an H100 or H200."""
    if shape.dtype not in (*_HALVES, torch.float32):
        return AttentionKernel("math", f"no fused kernel computes in {_name(shape.dtype)}")
    if shape.dtype == torch.bfloat16 and capability < (8, 0):
        return AttentionKernel("math", "this device has no fused kernel in bfloat16")
    if 0 in shape[1:5]:
        return AttentionKernel("math", "there is nothing to attend to")
    reasons = {"cudnn": _not_cudnn(shape, capability), "flash": _not_flash(shape, capability), "efficient": ""}
    passed = [f"not {name}: {why}" for name, why in reasons.items() if why and name in enabled]
    passed += [f"not {name}: disabled in torch.backends.cuda" for name in reasons if name not in enabled]
    chosen = next((name for name, why in reasons.items() if not why and name in enabled), "math")
    return AttentionKernel(chosen, "; ".join(passed) or "the fastest for full tiles of 128 keys")


def _not_cudnn(shape: Shape, capability: tuple[int, int]) -> str:
    if capability[0] not in (9, 10):
        return "it is the fastest on compute capabilities 9 and 10"
    if shape.dtype not in _HALVES:
        return f"it does not compute in {_name(shape.dtype)}"
    if shape.has_mask or shape.queries != shape.keys or shape.keys % 128:
        return "its gradients may be NaN with a mask, or where the last tile of 128 keys is not full"
    return "" if shape.head == shape.value and shape.head in (64, 128) else "it is verified for heads of 64 and 128"


def _not_flash(shape: Shape, capability: tuple[int, int]) -> str:
    if capability < (8, 0):
        return "it needs compute capability 8.0"
    if shape.dtype not in _HALVES:
        return f"it does not compute in {_name(shape.dtype)}"
    if shape.has_mask:
        return "it has no mask"
    if shape.is_causal and shape.queries != shape.keys:
        return "its causal mask ends at the last key"
    if shape.head != shape.value or shape.head > 256:
        return "it needs heads of one size up to 256"
    is_small = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    return "it has no backward for this head on this device" if is_small and 192 < shape.head <= 224 else ""


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor | None:
    """Compute attention by a fused kernel, with equal numbers of key and query heads. None if no kernel computes it."""
    shape = Shape(q.dtype, q.shape[-1], v.shape[-1], q.shape[-2], k.shape[-2], mask is not None, is_causal)
    name = attention_kernel(shape, _capability(q.device), _enabled()).name
    if name == "math" or 0 in q.shape:
        return None
    named = {"is_causal": is_causal, "scale": shape.head**-0.5 if scale is None else scale}
    heads = [_with_four_dims(_padded(x, 4 if x.dtype == torch.float32 else 8)) for x in (q, k, v)]
    if name == "flash":
        out = aten._scaled_dot_product_flash_attention.default(*heads, **named)[0]
    else:
        op = getattr(aten, f"_scaled_dot_product_{name}_attention").default
        out = op(*heads, None if mask is None else _bias(mask, q, k), compute_log_sumexp=True, **named)[0]
    found: Tensor = out[..., : shape.value] if out.shape[-1] != shape.value else out
    return found.reshape(*q.shape[:-1], shape.value) if q.ndim != 4 else found


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (9, 0)


def _enabled() -> list[str]:
    switches, deterministic = torch.backends.cuda, torch.are_deterministic_algorithms_enabled()
    enabled = {
        "cudnn": switches.cudnn_sdp_enabled() and not deterministic,
        "flash": switches.flash_sdp_enabled(),
        "efficient": switches.mem_efficient_sdp_enabled(),
    }
    return [name for name, is_on in enabled.items() if is_on]


def _with_four_dims(x: Tensor) -> Tensor:
    if x.ndim == 4:
        return x
    return x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x.flatten(0, -4)


def _padded(x: Tensor, multiple: int) -> Tensor:
    return pad(x, (0, -x.shape[-1] % multiple)) if x.shape[-1] % multiple else x


def _bias(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    bias = mask.to(q.dtype)
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(bias).masked_fill(~mask, -math.inf)
    bias = bias.expand(*bias.shape[:-1], k.shape[-2])
    rows = _padded(bias, _MASK_ALIGNMENT)[..., : k.shape[-2]]
    return _with_four_dims(rows.expand(*q.shape[:-1], k.shape[-2]))


def attention_notes(traced: Traced) -> list[str]:
    found: dict[str, None] = {}
    for node in traced.graph.nodes:
        name = _OPS.get(node.target)
        if name is None:
            continue
        given = named_arguments(node.target, node.args, node.kwargs)
        q, k, v = (info(operand).aval for operand in node.args[:3])
        has_mask, is_causal = given.get("attn_bias") is not None, bool(given.get("is_causal"))
        shape = Shape(q.dtype, q.shape[-1], v.shape[-1], q.shape[-2], k.shape[-2], has_mask, is_causal)
        kernel = attention_kernel(shape, _capability(q.device))
        why = kernel.reason if kernel.name == name else "the others are disabled in torch.backends.cuda"
        line = f"attention at {info(node).source or 'an unknown line'}: {name} kernel, heads of {shape.head}"
        found[f"{line}, {shape.queries} queries, {shape.keys} keys ({why})"] = None
    return list(found)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
