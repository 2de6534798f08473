"""Refusal of draws from torch's own generators for which `keyed_draws` does not have a keyed draw."""

from __future__ import annotations

import torch
from torch import fx

from .. import _torch
from ..errors import TracingError
from ..ir import Args, Kwargs, current_source, named_arguments, operands_of, topological_order
from .writer import Writer

__all__ = ["refuse_decisions", "refuse_draws"]


def refuse_draws(func: _torch.Op, args: Args, kwargs: Kwargs) -> None:
    """Refuse an op that draws from torch's generators. Attention with a `dropout_p` of 0 is accepted."""
    # Every rank has separate generators, so values that should be replicated would differ.
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return
    given = named_arguments(func, args, kwargs)
    if "dropout_p" in {argument.name for argument in func._schema.arguments} and not given.get("dropout_p"):
        return
    by = " with a generator=" if given.get("generator") is not None else ""
    raise TracingError(
        f"{current_source()}: {func}{by} draws from torch's own generator, of which every rank has another one; draw "
        f"with what becomes a keyed draw ({_KEYED}), or with fp.random.uniform or fp.random.normal from "
        "fp.random.next_key(), or pass the numbers in as an argument"
    )


def refuse_decisions(recording: Writer, func: _torch.Op, args: Args) -> None:
    """Refuse to read into Python a number that is computed only from draws, as layer drop does."""
    node = recording.value(args[0]) if func is torch.ops.aten._local_scalar_dense.default else None
    if node is None:
        return
    seen: dict[fx.Node, None] = {}
    for each in topological_order(node, lambda each: () if _is_draw(each) else operands_of(each), seen):
        seen[each] = None
    if any(map(_is_draw, seen)) and not any(each.op == "placeholder" for each in seen):
        raise TracingError(
            f"{current_source() or 'the function'}: Python decides by a drawn number, which every step draws anew, but "
            "a program has one branch for all steps; choose by torch.where(torch.rand(()) < p, x, layer(x)). Switch a "
            "model's layer drop off, in transformers by config.layerdrop = 0 (or encoder_layerdrop, decoder_layerdrop)"
        )


def _is_draw(node: fx.Node) -> bool:
    return str(node.target) == "fp.uniform.default"


_KEYED = (
    "rand, randn, randint, randperm, normal, bernoulli, the _like ones, uniform_, normal_, log_normal_, exponential_, "
    "geometric_, cauchy_ and random_ with bounds, of real numbers and without generator="
)
