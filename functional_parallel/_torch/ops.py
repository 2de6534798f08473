"""Ops of torch: out-of-place variants, decompositions, and ways to call them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.fx.node import Argument, Target

Op: TypeAlias = torch._ops.OpOverload[..., Any]
OpPacket: TypeAlias = torch._ops.OpOverloadPacket[..., Any]
HigherOrderOp = torch._ops.HigherOrderOperator

grouped_mm = torch._grouped_mm  # called by F.grouped_mm, and by models before F.grouped_mm was public


def functional_variant(op: Op) -> Op | None:
    """Return the out-of-place variant of an in-place op or of an op with `out=`, or None."""
    if op.namespace != "aten":  # another library's op of the same name may do anything
        return None
    # The overload is chosen by the arguments, because its name may differ (`aten.transpose_` → `aten.transpose.int`).
    name = op._schema.name.split("::")[1]
    has_out = [argument.name for argument in op._schema.arguments if argument.is_out] == ["out"]
    packet = getattr(torch.ops.aten, name if has_out else name[:-1], None) if has_out or name.endswith("_") else None
    if packet is None:
        return None
    overloads = [getattr(packet, each) for each in sorted(packet.overloads(), key=lambda e: e != op._overloadname)]
    return next((each for each in overloads if each is not op and _taken(each) == _taken(op)), None)


def decomposition_of(op: Op) -> Callable[..., Any] | None:
    from torch._decomp import decomposition_table  # a slow import that few calls need

    return decomposition_table.get(op)


def has_derivative(op: Op) -> bool:
    """Whether autograd supports an op. For other ops torch.func would return a zero gradient."""
    names = ("Autograd", "AutogradCPU", "AutogradCUDA", "AutogradOther", "CompositeImplicitAutograd")
    keys = (getattr(torch._C.DispatchKey, name) for name in names)
    return op.namespace in ("aten", "prims") or any(map(op.has_kernel_for_dispatch_key, keys))


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def is_composite(op: Op) -> bool:
    """Whether an aten op is composed of other ops only. If called below autograd, it is not yet decomposed."""
    # The op's own method counts Python kernels too, which torch.compile has for ops that autograd does not decompose.
    return op.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _COMPOSITE)


def as_composed(op: Op, *args: Argument, **kwargs: Argument) -> Argument:
    """Call the ops that a composite op is composed of, as autograd does."""
    # `op.decompose` prefers Python decompositions, which some ops have for torch.compile: an interpolation by indexing.
    return op._op_dk(_COMPOSITE, *args, **kwargs)


def one_by_one(op: Op, *args: Argument, **kwargs: Argument) -> Argument:
    """Call a foreach op by torch's device-independent kernel, which calls the other op on every tensor."""
    return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each tensor, at least in float32. On CUDA one kernel reads all tensors of one dtype."""
    # The public `torch.nn.utils.get_total_norm` has the dtype of the tensors: a norm of 65,520 overflows float16.
    dtype = torch.float32 if tensors[0].dtype.itemsize < 4 else tensors[0].dtype
    return list(torch._foreach_norm(list(tensors), 2, dtype=dtype))


def _taken(op: Op) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments if not argument.is_out]


_VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


def stride_free(op: Target) -> Target:
    """Return the op to run for a traced op. It was traced on contiguous fakes, but operands may have other strides."""
    # A view of such an operand may be impossible. torch selects attention kernels only for operands with contiguous
    # rows; on other operands they would read wrong memory. Some other ops reject operands that are not contiguous.
    return torch.ops.aten.reshape.default if op in _VIEWS else _ON_COPIES.get(op, op)


def _on_copies(op: Op, copy: Callable[[Argument], Argument]) -> Callable[..., Any]:
    return lambda *args, **kwargs: op(*map(copy, args), **{name: copy(x) for name, x in kwargs.items()})


def _with_rows(x: Argument) -> Argument:
    # The sums of exponentials that a kernel saves for its backward have one dim fewer and keep their strides.
    if not isinstance(x, torch.Tensor) or x.ndim < 4 or x.shape[-1] == 1:
        return x
    if x.stride(-1) != 1:
        return x.contiguous()
    return x.clone(memory_format=torch.contiguous_format) if x.is_cuda and not _is_aligned(x) else x


def _is_aligned(x: torch.Tensor) -> bool:
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    return all(offset * x.itemsize % 16 == 0 for offset in (x.storage_offset(), *strides))


def _contiguous(x: Argument) -> Argument:
    return x.contiguous() if isinstance(x, torch.Tensor) else x


_OF_ROWS = {
    getattr(torch.ops.aten, name).default: _on_copies(getattr(torch.ops.aten, name).default, _with_rows)
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    for name in (f"_scaled_dot_product_{kernel}", f"_scaled_dot_product_{kernel}_backward")
    if hasattr(torch.ops.aten, name)
}


_ON_COPIES = _OF_ROWS | {
    op: _on_copies(op, _contiguous)
    for op in (
        *(torch.ops.aten.native_group_norm.default, torch.ops.aten.native_group_norm_backward.default),
        torch.ops.aten.view.dtype,
    )
}


def under_transforms(op: Target) -> Target:
    """Return the op to run for a traced op where torch.func's transforms may be active."""
    # torch.func cannot map `addmm_`, a product that is added in place. It maps `slice_scatter` with the number of
    # positions given by the slice's end, which is the largest integer for `x[2:]`.
    return _UNDER_TRANSFORMS.get(op) or stride_free(op)


def _slice_scatter(
    x: torch.Tensor, src: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> torch.Tensor:
    start, end, step = slice(start, end, step).indices(x.shape[dim])
    result: torch.Tensor = torch.ops.aten.slice_scatter.default(x, src, dim, start, max(start, end), step)
    return result


def _by_formula(op: Op) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        formula = decomposition_of(op)
        assert formula is not None
        return formula(*args, **kwargs)

    return run


def _rnn_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    *tensors, _, _, _, of_output, of_hidden, of_cell = args[:13]
    reverse, mode, hidden_size, layers, biases, train, bidirectional, batch_sizes, batch_first, _ = args[13:]
    options = (reverse, batch_sizes, mode, hidden_size, layers, biases, bidirectional, batch_first, train)

    def forward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = torch.ops.aten.mkldnn_rnn_layer.default(*tensors, *options)[:3]
        return found

    results, pull, *_ = torch.func.vjp(forward, *tensors)
    given = zip((of_output, of_hidden, of_cell), results, strict=True)
    cotangents = tuple(torch.zeros_like(result) if each is None else each for each, result in given)
    gradients: tuple[torch.Tensor, ...] = pull(cotangents)
    return gradients


# torch has no derivatives of these backward ops. A trace has them where it takes first derivatives only
# (`fused_backwards`), but its program may be differentiated later.
_BACKWARDS = ("silu", "mish", "logit", "native_group_norm", "_fused_rms_norm")

_UNDER_TRANSFORMS = {
    torch.ops.aten.addmm_.default: functional_variant(torch.ops.aten.addmm_.default),
    torch.ops.aten.slice_scatter.default: _slice_scatter,
    torch.ops.aten._weight_norm_interface_backward.default: torch.ops.aten._weight_norm_differentiable_backward.default,
    torch.ops.aten.mkldnn_rnn_layer_backward.default: _rnn_backward,
    **{
        op: _by_formula(op)
        for op in (getattr(torch.ops.aten, f"{name}_backward", None) for name in _BACKWARDS)
        for op in ([] if op is None else [op.default])
    },
}


def direct_call(op: Target) -> Target:
    """Return the function that an op's Python object calls, to skip one Python frame."""
    return getattr(op, "_op", op) if isinstance(op, torch._ops.OpOverload) else op
