"""Training state in another memory than the device's (ZeRO-Offload, arXiv 2101.06840)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from ..functions import LocalFunction, explain_keywords
from ..ops import MEMORIES
from ..quantities import is_number
from ..requests import OffloadedState, Order
from .transform import Transform


@explain_keywords
@dataclass(frozen=True)
class offload(Transform):
    """Keep the state of the optimizer in the memory of the host, and update there (ZeRO-Offload).

    A step moves the gradients to the host, after their sum over ranks. It updates there, and moves the new parameters
    back, in the type in which they are stored. The results have the bits of the step without it.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> def loss(w, x):
    ...     return (x @ w).square().mean()
    >>> plan = fp.chain(fp.mixed_precision("bf16"), fp.zero(2, "data"), fp.offload(state="host"))
    >>> train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=2), plan)
    >>> state, _ = train(train.init(torch.ones(64)), torch.ones(4, 64))
    >>> train.program.bytes_moved()          # per rank, 32 gradients in float32 and 32 new parameters in bfloat16
    {('device', 'host'): 128, ('host', 'device'): 64}

    Args:
        state: memory of the optimizer's state and masters, and of the update: "host" or "device".
        fraction: share of the parameters, by bytes, to which it applies.

    Raises:
        ValueError: for an unknown memory, or a fraction that is not above 0 and at most 1.
    """

    _: KW_ONLY
    state: str = "host"
    fraction: float = 1.0
    order: ClassVar[Order] = Order.MEMORY

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state not in MEMORIES:
            raise ValueError(f"offload(state={self.state!r}): the memories are {', '.join(map(repr, MEMORIES))}")
        if not (is_number(self.fraction) and 0 < self.fraction <= 1):
            raise ValueError(f"{self.name}: fraction is the share of the parameters, above 0 and at most 1")

    def apply(self, f: LocalFunction) -> LocalFunction:
        return f.requesting(OffloadedState(self.state, self.fraction))
