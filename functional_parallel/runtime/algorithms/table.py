"""Table of the algorithms, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..buffers import DirectOutputs, LazyBucket, Operand
from ..calls import CollectiveSteps
from ..shared_memory import SharedMemory, shared
from . import direct, ring, two_level
from .algorithm_group import AlgorithmGroup, TaggedMessages

# The first of two types is that of every algorithm, the other that of one that packs.
Chunks = Sequence[Tensor] | LazyBucket
GatherOutput = Sequence[Tensor] | DirectOutputs
Result = Tensor | Sequence[Tensor]
AllReduce = Callable[[AlgorithmGroup, Operand, Result], CollectiveSteps]
ReduceScatter = Callable[[AlgorithmGroup, Chunks, Tensor], CollectiveSteps]
AllGatherFn = Callable[[AlgorithmGroup, Operand, GatherOutput], CollectiveSteps]
AllToAllFn = Callable[[AlgorithmGroup, Sequence[Tensor], Sequence[Tensor]], CollectiveSteps]


@dataclass(frozen=True)
class Algorithm:
    """Implementation of the collectives of a group. Results are written into contiguous tensors of the caller.

    An `all_reduce` may write over its operand, or over the tensors packed in it. An algorithm that `packs` supports
    buckets. The operand of a sum or gather and the chunks of a scatter may be a `LazyBucket`. The parts of a gather may
    be `DirectOutputs`, and the result of a sum several flat tensors.
    """

    name: str  # in the argument `algorithm` and in `FUNCTIONAL_PARALLEL_ALGORITHM`
    is_ordered: bool  # whether it adds in rank order
    refuses: Callable[[AlgorithmGroup], str | None]  # returns the reason why it cannot serve a group
    all_reduce: AllReduce  # writes the sum into the third argument
    reduce_scatter: ReduceScatter  # adds chunks by rank, equal in shape; writes this rank's sum into the third argument
    all_gather: AllGatherFn  # gathers operands into contiguous parts by rank
    all_to_all: AllToAllFn | None = None  # exchanges chunks by rank into parts by rank; None: no better method
    packs: bool = False
    signals: bool = False  # whether ranks see the calls of the others before they read their data


# --- Algorithms of messages: a reduce phase and a gather phase; an all-reduce runs both ---

Reduce = Callable[[AlgorithmGroup, TaggedMessages, Sequence[Tensor], Tensor], CollectiveSteps]
Gather = Callable[[AlgorithmGroup, TaggedMessages, Sequence[Tensor]], CollectiveSteps]


def _of_messages(
    name: str,
    reduce: Reduce,
    gather: Gather,
    *,
    is_ordered: bool = False,
    refuses: Callable[[AlgorithmGroup], str | None] = lambda team: None,
    all_to_all: AllToAllFn | None = None,
) -> Algorithm:
    def all_reduce(team: AlgorithmGroup, x: Operand, result: Result) -> CollectiveSteps:
        assert isinstance(x, Tensor) and isinstance(result, Tensor)
        messages = team.messages()
        flat = result.as_strided((result.numel(),), (1,))  # a single element may have any stride
        parts = flat.tensor_split(team.size)
        yield from reduce(team, messages, x.reshape(-1).tensor_split(team.size), parts[team.rank])
        yield from gather(team, messages, parts)

    def reduce_scatter(team: AlgorithmGroup, chunks: Chunks, result: Tensor) -> CollectiveSteps:
        assert not isinstance(chunks, LazyBucket)
        return reduce(team, team.messages(), chunks, result)

    def all_gather(team: AlgorithmGroup, mine: Operand, parts: GatherOutput) -> CollectiveSteps:
        assert isinstance(mine, Tensor) and not isinstance(parts, DirectOutputs)
        parts[team.rank].copy_(mine)
        yield from gather(team, team.messages(), parts)

    return Algorithm(name, is_ordered, refuses, all_reduce, reduce_scatter, all_gather, all_to_all)


# --- Shared memory ---


def _share_nothing(team: AlgorithmGroup) -> str | None:
    return None if team.is_on_one_host and team.shared is not None else "its ranks share no memory"


def _memory(team: AlgorithmGroup) -> SharedMemory:
    assert team.shared is not None
    return team.shared


_SHARED = Algorithm(
    "shared",
    True,
    _share_nothing,
    lambda team, *rest: shared.all_reduce(_memory(team), *rest),
    lambda team, *rest: shared.reduce_scatter(_memory(team), *rest),
    lambda team, *rest: shared.all_gather(_memory(team), *rest),
    lambda team, *rest: shared.all_to_all(_memory(team), *rest),
    packs=True,
    signals=True,
)

ALGORITHMS: dict[str, Algorithm] = {
    each.name: each
    for each in (
        _SHARED,
        _of_messages("two_level", two_level.reduce, two_level.gather, refuses=two_level.refuses),
        _of_messages("direct", direct.reduce, direct.gather, is_ordered=True, all_to_all=direct.all_to_all),
        _of_messages("ring", ring.reduce_scatter_steps, ring.all_gather_steps),
    )
}
