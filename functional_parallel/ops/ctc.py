"""Connectionist temporal classification as one op of a trace. Samples are independent.

torch's op allocates memory by the length of the longest target, which a trace does not know. This op computes the
gradient together with the losses. Both use the same lattice, and nothing else of the lattice is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import _torch
from .._torch import FunctionContext
from ..collectives import keeping_grad_mode
from ..errors import TracingError
from ..ir import Source, current_source, define_op
from ..rules import Rule, rule
from ..tracing import intercept

aten = torch.ops.aten

_OPTIONS = "Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity"
_Option = Tensor | int


def _ctc(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero: bool
) -> tuple[Tensor, Tensor]:
    given = (log_probs.contiguous(), targets.contiguous(), inputs, lengths)
    losses, lattice = aten._ctc_loss.Tensor(*given, blank, zero)
    slopes = aten._ctc_loss_backward.Tensor(torch.ones_like(losses), *given, losses, lattice, blank, zero)
    return torch.where(losses.isinf(), 0, losses) if zero else losses, slopes


def _fake(log_probs: Tensor, *_: _Option) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), torch.empty_like(log_probs)


class _LossContext(FunctionContext):
    inputs: int
    source: Source | None


@_torch.without_zeros
class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(log_probs: Tensor, *options: _Option) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _OP(log_probs, *options)
        return found

    @staticmethod
    def setup_context(ctx: _LossContext, inputs: tuple[_Option, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[1])
        ctx.inputs, ctx.source = len(inputs), current_source()

    @staticmethod
    def backward(ctx: _LossContext, cotangent: Tensor, of_slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        if of_slopes is not None:
            raise _no_more(ctx.source)
        (slopes,) = ctx.saved_tensors
        return (cotangent[:, None] * slopes, *[None] * (ctx.inputs - 1))


_apply: Callable[..., tuple[Tensor, Tensor]] = _Losses.apply


def _losses(log_probs: Tensor, *options: _Option) -> tuple[Tensor, Tensor]:
    if _torch.needs_higher_derivatives():
        raise _no_more(current_source())
    with keeping_grad_mode():
        return _apply(log_probs, *options)


def _no_more(source: Source | None) -> TracingError:
    return TracingError(f"{source}: ctc_loss has a gradient alone, no second and no forward derivative, as in torch")


# the loss per sample, and the gradients of the losses
_OP = define_op(f"ctc(Tensor log_probs, {_OPTIONS}) -> (Tensor, Tensor)", _ctc, _fake, _losses)
rule([_OP], Rule("t^ n c^, n s^, n, n -> n, newt n newc"))


@intercept(torch.nn.functional.ctc_loss, always=True)
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Compute `F.ctc_loss` of scores (time, batch, classes) with targets padded to one row per sample."""
    single = log_probs.ndim == 2
    if targets.ndim != 2 - single:
        raise TracingError(
            f"{current_source()}: ctc_loss needs targets with a row per sample, (batch, longest), got "
            f"{tuple(targets.shape)}. Pad them by torch.nn.utils.rnn.pad_sequence(targets, batch_first=True)"
        )
    inputs, lengths = (torch.as_tensor(each, device=log_probs.device) for each in (input_lengths, target_lengths))
    if single:
        log_probs, targets, inputs, lengths = log_probs[:, None], targets[None], inputs.view(1), lengths.view(1)
    wide = log_probs.float() if log_probs.dtype.itemsize < 4 else log_probs
    losses, _ = _losses(wide, targets, inputs, lengths, blank, zero_infinity)
    if reduction == "mean":
        return (losses / lengths.clamp(min=1).to(losses.dtype)).mean()
    return losses.sum() if reduction == "sum" else losses[0] if single else losses
