"""In-place ops in a trace, which has only values. The functional variant is recorded, and the target gets its result.

The schema of a custom op declares the arguments that it writes, as `Tensor(a!) x`. It determines the out-of-place form.

Tensors that share the memory of the target get their new contents too (see `view_chains`). With gradients off, torch
changes values and keeps the history of each tensor. The new values therefore have the gradient of the old ones (see
`straight_through`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import optree
import torch
from torch import fx
from torch.fx.node import Argument

from .. import _torch
from ..errors import MutationError
from ..ir import Args, Kwargs, current_source, declares_writes, info, named_arguments, out_of_place
from .straight_through import OP as STRAIGHT_THROUGH
from .view_chains import View, are_apart
from .writer import TraceWriter

aten = torch.ops.aten

_CHANGE_MEMORY = {aten.resize_, aten.resize_as_, aten.set_}


def mutate(recording: TraceWriter, func: _torch.Op, args: Args, kwargs: Kwargs) -> Argument:
    """Record an in-place op, and return its target: the first argument or `out`. Return the results of a custom op."""
    if func.overloadpacket in _CHANGE_MEMORY:
        raise MutationError(
            f"{current_source()}: {func} changes the memory of a tensor, which a program does not have; use the other "
            "tensor itself, or make a new one"
        )
    if declares_writes(func):
        return _written_by_schema(recording, func, args, kwargs)
    twin = _torch.functional_variant(func)
    if twin is not None and "out" in kwargs:
        return _written_out(recording, func, twin, args, dict(kwargs))
    target = args[0] if args else None
    if twin is None or not isinstance(target, torch.Tensor):
        raise MutationError(
            f"{current_source()}: {func} changes a tensor in place and does not have an out-of-place variant; use its "
            "result, without out= or the underscore"
        )
    old = _written_node(recording, func, target)
    if torch.Tag.inplace_view in func.tags:  # such as squeeze_: changes neither values nor other views
        with recording:
            new = recording.node_of(twin(*args, **kwargs))
        if _loses_history(old, new):
            raise MutationError(
                f"{current_source()}: {func} under torch.no_grad() changes the shape {info(old).aval.shape} of a "
                f"tensor to {info(new).aval.shape}, and its gradient would keep the old one; use the out-of-place op"
            )
        func(*args, **kwargs)
        recording.bind(target, new)
    else:
        _write_through(recording, func, target, old, _new_value(recording, func, twin, args, kwargs))
    return target


def _written_node(recording: TraceWriter, func: _torch.Op, target: torch.Tensor) -> fx.Node:
    old = recording.value(target)
    if old is None or recording.aliases.chain(old)[0] in recording.closed_over:
        raise MutationError(
            f"{current_source()}: {func} changes in place a tensor of shape {tuple(target.shape)} that the function "
            "closes over. The change would be lost; pass it in and return it (for a module's buffers: "
            "fp.functional(module, buffers=True))"
        )
    recording.layouts.check_write(target, func)
    return old


def _written_by_schema(recording: TraceWriter, func: _torch.Op, args: Args, kwargs: Kwargs) -> Argument:
    form, given = out_of_place(func), named_arguments(func, args, kwargs)
    targets = form.targets(given)
    for target in targets:
        _written_node(recording, func, target)
    _require_apart(recording, func, targets, [x for x in optree.tree_leaves(given) if isinstance(x, torch.Tensor)])

    def recorded(*args: Argument, **kwargs: Argument) -> list[torch.Tensor]:
        with recording:
            results: list[torch.Tensor] = form.op(*args, **kwargs)
        return results

    def write(target: torch.Tensor, value: torch.Tensor) -> None:
        _write_through(recording, func, target, recording.node_of(target), recording.node_of(value))

    return form.call(recorded, write, args, kwargs)


def _require_apart(
    recording: TraceWriter, func: _torch.Op, targets: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]
) -> None:
    chains = [recording.aliases.chain(recording.node_of(x)) for x in operands]
    for (index, one), (number, other) in permutations(enumerate(operands), 2):
        if one.untyped_storage()._cdata != other.untyped_storage()._cdata or not any(one is each for each in targets):
            continue
        (root, views), (other_root, other_views) = chains[index], chains[number]
        if root is not other_root or not are_apart(views, other_views):
            raise MutationError(
                f"{current_source()}: {func} writes a tensor of shape {tuple(one.shape)}, and another operand of shape "
                f"{tuple(other.shape)} shares its memory. The result is not defined: pass a clone"
            )


def _written_out(recording: TraceWriter, func: _torch.Op, twin: _torch.Op, args: Args, kwargs: Kwargs) -> Argument:
    target = kwargs.pop("out")
    with recording:
        result = twin(*args, **kwargs)
    if result.shape != target.shape:
        raise MutationError(
            f"{current_source()}: {func} would change the shape {tuple(target.shape)} of the out= tensor to "
            f"{tuple(result.shape)}; use the result of the op, without out="
        )
    mutate(recording, aten.copy_.default, (target, result), {})
    return target


def _new_value(recording: TraceWriter, func: _torch.Op, twin: _torch.Op, args: Args, kwargs: Kwargs) -> fx.Node:
    target = args[0]
    with recording:  # records the calls
        if func is aten.copy_.default:  # its functional variant has no derivative
            result = aten.clone.default(aten.expand.default(_like(args[1], target), list(target.shape)))
        else:
            result = _like(twin(*args, **kwargs), target)
    return recording.node_of(result)


def _like(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if (x.dtype, x.device) == (target.dtype, target.device):
        return x
    cast: torch.Tensor = aten._to_copy.default(x, dtype=target.dtype, device=target.device)
    return cast


def _write_through(recording: TraceWriter, func: _torch.Op, target: torch.Tensor, old: fx.Node, new: fx.Node) -> None:
    """Bind all tensors that share the memory of the target to their new contents."""
    aliases = recording.aliases
    root, views = aliases.chain(old)
    others = _others(recording, func, target, root)
    whole = aliases.written(root, views, new, info(new))
    if whole is None and others:
        raise _unknown(func, target, others[0][0])
    new = _with_history(recording, old, new)
    whole = new if whole is None or not views else _with_history(recording, root, whole)
    aliases.is_root(whole)
    for other, its_views in others:
        if are_apart(views, its_views):
            aliases.is_view_of(recording.node_of(other), whole, its_views)
        else:
            recording.bind(other, aliases.taken(whole, its_views))
    if whole is not new:
        aliases.is_view_of(new, whole, views)
    recording.bind(target, new)


def _others(
    recording: TraceWriter, func: _torch.Op, target: torch.Tensor, root: fx.Node
) -> list[tuple[torch.Tensor, list[View]]]:
    storage = target.untyped_storage()._cdata
    found: list[tuple[torch.Tensor, list[View]]] = []
    for other in recording.living():
        if other is not target and other.untyped_storage()._cdata == storage:
            its_root, views = recording.aliases.chain(recording.node_of(other))
            if its_root is not root:
                raise _unknown(func, target, other)
            found.append((other, views))
    return found


def _unknown(func: _torch.Op, target: torch.Tensor, other: torch.Tensor) -> MutationError:
    return MutationError(
        f"{current_source()}: {func} changes in place a tensor of shape {tuple(target.shape)}. Another view of it, of "
        f"shape {tuple(other.shape)}, is still alive, and its new values are unknown; use the out-of-place op"
    )


# --- With gradients off ---


def _with_history(recording: TraceWriter, old: fx.Node, new: fx.Node) -> fx.Node:
    if not _loses_history(old, new):
        return new
    return recording.create(STRAIGHT_THROUGH, (old, new), {}, info(new)._replace(no_grad=False))


def _loses_history(old: fx.Node, new: fx.Node) -> bool:
    has_any = old.op != "get_attr" and not info(old).no_grad and info(old).aval.is_differentiable
    return has_any and bool(info(new).no_grad)
