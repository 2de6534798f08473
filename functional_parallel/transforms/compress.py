"""Compression of collectives as a transform (ZeRO++, arXiv 2306.10209)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from ..errors import OrderError
from ..functions import LocalFunction, explain_keywords
from ..ops import IDENTITY, WIRE_FORMATS, block_format
from ..passes import WireFormats
from ..quantities import is_number, is_positive_int
from ..requests import (
    DataAxis,
    ErrorFeedback,
    Masters,
    Order,
    RunPass,
    UpdateSharding,
    flat_update,
    owners_of,
    requested_passes,
)
from .transform import Transform


@explain_keywords
@dataclass(frozen=True)
class compress(Transform):
    """Send gathers of parameters and sums of gradients with fewer bytes: quantised in blocks (ZeRO++).

    The scale of a block is its largest absolute value divided by 127 for int8 and by 7 for int4, in float32. A gathered
    element differs by at most half of the scale of its block. A sum over one axis differs by at most the sum of these
    bounds for its summands, which are added in float32. For float32 and narrower values, the rounding of the dtype is
    added to the bounds. Blocks do not cross from one parameter to another, so buckets do not change the result.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> def loss(w, x):
    ...     return (x @ w).square().mean()
    >>> w, x = torch.randn(1024, 64), torch.randn(8, 1024)
    >>> plan = fp.chain(fp.zero(3, "data"), fp.compress("data"))
    >>> step = fp.compile(fp.grad(plan(loss)), Mesh(data=2))
    >>> exact = torch.func.grad(loss)(w, x)
    >>> (step(w, x) - exact).norm() < 0.2 * exact.norm()
    tensor(True)
    >>> step.program.bytes_sent()   # float32 sends 131072 bytes for each; a block of 64 has a scale of 4 bytes
    {('all_gather', ('data',)): 34816, ('all_to_all', ('data',)): 18432}

    A block with a value that is not finite becomes NaN, so a loss scale still detects an overflow. In the program, a
    gather sends bytes, and a reduce-scatter is an all-to-all of bytes. An all-reduce is an all-to-all of sums in the
    format of `reduce` and a gather in the format of `gather`. With a slow and a fast axis, ZeRO has separate
    collectives over each, so gradients are quantised again between the two.

    Args:
        axes: a data axis, or several.
        gather: the format of gathers of parameters: "int8", "int4", "identity", which keeps all bits, or None, which
            leaves these collectives unchanged. At ZeRO stages 1 and 2, new parameters are gathered. They need masters
            (`fp.mixed_precision`), and those that stay in float32 by `keep=` are sent unchanged.
        reduce: the format of sums of gradients.
        block: the number of elements per block, which is even.
        feedback: the weight of the newest error, up to 1, for error feedback (LoCo, arXiv 2407.04480) in
            `fp.train_step`: what a rank does not send of a gradient is added to its gradient of the next step. 1 keeps
            all; less keeps a moving average. None adds nothing. A rank then holds an error of each gradient, in float32
            and before its reduce-scatter, in the state.
        reset: the number of steps until errors begin at zero again; None for never.

    Raises:
        ValueError: if a format or the block is unknown, an axis is no data axis or has a format already, or the plan
            gathers new parameters without masters.
        OrderError: if no transform inside of this one splits the batch.
    """

    axes: str | Sequence[str]
    _: KW_ONLY
    gather: str | None = "int8"
    reduce: str | None = "int4"
    block: int = 64
    feedback: float | None = None
    reset: int | None = None
    order: ClassVar[Order] = Order.COMPRESS

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", self.axes if isinstance(self.axes, str) else tuple(self.axes))
        formats = (*WIRE_FORMATS, None)
        for what, given in (("gather", self.gather), ("reduce", self.reduce)):
            if given not in formats:
                raise ValueError(f"compress({what}={given!r}): it is {', '.join(map(repr, formats))}")
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 2 or self.block % 2:
            raise ValueError(f"compress(block={self.block!r}): it is an even number of elements")
        if self.feedback is not None and not (is_number(self.feedback) and 0 < self.feedback <= 1):
            raise ValueError(f"compress(feedback={self.feedback!r}): it is the weight of the newest error, up to 1")
        if self.reset is not None and (self.feedback is None or not is_positive_int(self.reset)):
            raise ValueError(f"compress(reset={self.reset!r}): it is a number of steps, and needs feedback=")

    def apply(self, f: LocalFunction) -> LocalFunction:
        axes = (self.axes,) if isinstance(self.axes, str) else tuple(self.axes)
        self._require_data_axes(f, axes)
        masters = f.applied.all(Masters)
        sharded = [each.axis for each in f.applied.all(UpdateSharding) if each.axis in axes]
        if sharded and not masters and self.gather not in (None, IDENTITY):
            raise ValueError(
                f"{self.name}: the plan gathers new parameters over {sharded[0]!r}, and without masters the error of "
                f"{self.gather!r} would stay in them: put fp.mixed_precision('bf16') first in the chain, or write "
                "gather=None"
            )
        stored = masters[0].dtype if masters else None
        texts, feeds_back = (self._text(self.gather), self._text(self.reduce)), self.feedback is not None
        f = f.requesting(self._feedback(f, axes)) if feeds_back else f
        return f.requesting(RunPass(WireFormats(axes, *texts, stored, feeds_back)))

    def _feedback(self, f: LocalFunction, axes: tuple[str, ...]) -> ErrorFeedback:
        assert self.feedback is not None
        without = {
            "reduce=None": self.reduce is None,
            "fp.zero(layout='flat')": flat_update(f.applied),
            "a rank that holds all": bool(owners_of(f.applied)),
            "another compress with feedback=, inside of this one": bool(f.applied.all(ErrorFeedback)),
        }
        for what in (words for words, is_there in without.items() if is_there):
            raise ValueError(f"{self.name}: feedback={self.feedback:g} does not go with {what}; leave one of them out")
        data = tuple(each.axis for each in f.applied.all(DataAxis))
        late = tuple(each.axis for each in f.applied.all(UpdateSharding))
        return ErrorFeedback(axes, data, late, self.feedback, self.reset)

    def _text(self, form: str | None) -> str:
        text = "" if form is None else IDENTITY if form == IDENTITY else f"{form}/{self.block}"
        if text:
            block_format(text)
        return text

    def _require_data_axes(self, f: LocalFunction, axes: Sequence[str]) -> None:
        data = [each.axis for each in f.applied.all(DataAxis)]
        if not data:
            raise OrderError(
                f"{self.name} changes collectives of fp.zero or fp.data_parallel, and {f} has none: apply one before "
                "it, as in fp.chain(fp.zero(3, 'data'), fp.compress('data'))"
            )
        unused = [axis for axis in axes if axis not in data]
        if unused or not axes:
            raise ValueError(
                f"{self.name}: no gather of parameters or sum of gradients is over {', '.join(map(repr, unused))}; "
                f"the data axes of the plan are {', '.join(map(repr, data))}"
            )
        for each in requested_passes(f.applied):
            twice = set(axes).intersection(each.axes) if isinstance(each, WireFormats) else ()
            if twice:
                raise ValueError(
                    f"{self.name}: another compress inside of this one has the axis {min(twice)!r}; leave one out"
                )
