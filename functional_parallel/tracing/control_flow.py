"""torch's control flow ops in a trace, which has no branches: loops are unrolled, and a known branch is selected.

The trace must know the deciding value. Known are the length that `scan` iterates over, the counter of a `while_loop`,
and a predicate that does not depend on an argument. For other values, the user must compute both branches, or run a
fixed number of iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.node import Argument

from .. import _torch
from ..errors import TracingError
from ..ir import Args, Kwargs, current_source
from .constant_folding import outside_trace, value_of
from .writer import TraceWriter

Branch = Callable[..., Any]
Operands = Sequence[Argument]


def unrolled(recording: TraceWriter, op: _torch.HigherOrderOp, args: Args, kwargs: Kwargs) -> Argument:
    rules: dict[str, Branch] = {"cond": _cond, "while_loop": _while_loop, "scan": _scan}
    rule = rules.get(op.name())
    if rule is None:
        raise TracingError(
            f"{current_source() or 'the function'}: torch's higher-order op {op.name()} is not supported; write it "
            "with other ops of torch: the trace runs Python's loops and branches"
        )
    with recording.unrolling():
        return rule(recording, *args, **kwargs)


def _cond(
    recording: TraceWriter, pred: torch.Tensor | bool, true_fn: Branch, false_fn: Branch, operands: Operands = ()
) -> Argument:
    known = _truth(
        recording, pred, "the branch of torch.cond", "compute both and choose, torch.where(pred, on_true, on_false)"
    )
    return (true_fn if known else false_fn)(*operands)


def _while_loop(
    recording: TraceWriter, cond_fn: Branch, body_fn: Branch, carried: Operands, additional: Operands = ()
) -> Args:
    values = tuple(carried)
    advice = "run a fixed number of rounds, and keep finished values by torch.where(done, old, new)"
    while _truth(recording, cond_fn(*values, *additional), "the end of torch's while_loop", advice):
        values = tuple(body_fn(*values, *additional))
    return values


def _scan(recording: TraceWriter, combine_fn: Branch, init: Operands, xs: Operands, additional: Operands = ()) -> Args:
    carry, rows = list(init), []
    for row in zip(*(x.unbind(0) for x in xs), strict=True):
        results = combine_fn(*carry, *row, *additional)
        carry = list(results[: len(init)])
        rows.append(results[len(init) :])
    return (*carry, *(torch.stack(column) for column in zip(*rows, strict=True)))


def _truth(recording: TraceWriter, value: torch.Tensor | bool | Sequence[torch.Tensor], what: str, advice: str) -> bool:
    if isinstance(value, (tuple, list)):
        (value,) = value
    known = value_of(recording, value) if isinstance(value, torch.Tensor) else value
    if known is None:
        raise TracingError(
            f"{current_source() or 'the function'}: {what} depends on values, which a traced function does not have; "
            f"{advice}"
        )
    with outside_trace():
        return bool(known)
