"""The requests in their legal order, innermost first. No request of an inner transform follows an outer one's."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from ..errors import OrderError
from ..functions import Request
from ..passes import (
    CastBeforeGather,
    GatherAgain,
    GatherPlacement,
    ProgramPass,
    ReduceDtype,
    ReducePerMicrobatch,
    ReduceScatterFirst,
    Remat,
    RematToBudget,
    WidenedAndNarrowed,
)
from ..pipelines import PipelineRequest
from .axes import DataAxis, Master, Microbatches, Replicas
from .loss_scaling import ScaleLoss
from .run_pass import RunPass
from .stored_type import StoredType
from .update_sharding import SummedApart, UpdateSharding


class Order(IntEnum):
    """Position of a transform in the legal order of a chain, innermost first."""

    PRECISION = 0
    TENSOR = 1
    DATA = 2
    ACCUMULATE = 3
    PIPELINE = 4
    REPLICAS = 5

    @property
    def words(self) -> str:
        return (
            *("precision and remat", "tensor and sequence", "zero / data", "accumulate", "pipeline"),
            "local SGD",
        )[self]


REQUESTS: dict[type[Request] | type[ProgramPass], Order] = {  # a request of a pass stands under the pass
    StoredType: Order.PRECISION,
    ScaleLoss: Order.PRECISION,
    SummedApart: Order.PRECISION,
    CastBeforeGather: Order.PRECISION,
    ReduceDtype: Order.PRECISION,
    WidenedAndNarrowed: Order.PRECISION,
    Remat: Order.PRECISION,
    RematToBudget: Order.PRECISION,
    GatherAgain: Order.TENSOR,
    DataAxis: Order.DATA,
    Master: Order.DATA,
    UpdateSharding: Order.DATA,
    GatherPlacement: Order.DATA,
    ReduceScatterFirst: Order.DATA,
    Microbatches: Order.ACCUMULATE,
    ReducePerMicrobatch: Order.ACCUMULATE,
    PipelineRequest: Order.PIPELINE,
    Replicas: Order.REPLICAS,
}


def require_order(requests: Sequence[Request]) -> None:
    outermost: Request | None = None
    for each in requests:
        order, highest = _order_of(each), None if outermost is None else _order_of(outermost)
        if order is not None and highest is not None and order < highest:
            raise OrderError(
                f"{each} ({order.words}) is requested outside of {outermost} ({highest.words}), but belongs inside it: "
                "apply the transforms by fp.chain, which names the legal order"
            )
        outermost = each if order is not None else outermost


def _order_of(request: Request) -> Order | None:
    kind = type(request.run) if isinstance(request, RunPass) else type(request)
    return next((REQUESTS[each] for each in kind.__mro__ if each in REQUESTS), None)
