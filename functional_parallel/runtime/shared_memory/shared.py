"""Collectives through memory that the ranks of one host share: each byte is written once and read where it is needed.

To send, a rank copies into its own memory; who needs the bytes reads them there, and adds while reading, in rank order.
What is packed of several tensors is packed there, and held nowhere else. A collective of up to `AT_ONCE` bytes is
written when it starts, so that a rank which comes later finds it there. A larger one goes in pieces that stay in the
processor's cache: the first two when it starts, the others while it is waited for. Piece `t + 2` is written after piece
`t` was read, over piece `t - 2`: that a rank has sent piece `t` says that it has read piece `t - 2`, so nobody has to
say what was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...collectives import AHEAD, aligned, places, slot_bytes
from ..buffers import ConcatReader, DirectOutputs, LazyBucket, ordered_sum
from ..calls import CollectiveSteps
from .memory import SharedMemory

__all__ = ["ONE_ROUND", "all_gather", "all_reduce", "all_to_all", "reduce_scatter"]

ONE_ROUND = 128 << 10  # below, a second round of signals costs more than that every rank adds everything


def all_gather(
    memory: SharedMemory, mine: Tensor | LazyBucket, parts: Sequence[Tensor] | DirectOutputs
) -> CollectiveSteps:
    """`parts[i]`, contiguous, becomes the value of rank i; or tensors get their parts of it."""
    for piece in _pieces(memory, mine if isinstance(mine, LazyBucket) else [mine]):
        _put(piece, piece.own(0), parts, memory.rank)
        yield [memory.all_gave(piece.sent)]
        for rank in _others(memory):
            _put(piece, piece.read(rank, 0), parts, rank)


def _put(piece: _Chunk, values: Tensor, parts: Sequence[Tensor] | DirectOutputs, rank: int) -> None:
    if isinstance(parts, DirectOutputs):
        parts.write(rank, piece.begin, values)
    else:
        piece.of(parts[rank]).copy_(values)


def all_to_all(memory: SharedMemory, chunks: Sequence[Tensor], parts: Sequence[Tensor]) -> CollectiveSteps:
    """Chunk i goes to rank i; `parts[i]`, contiguous, becomes what rank i sent here."""
    parts[memory.rank].copy_(chunks[memory.rank])
    for piece in _pieces(memory, chunks, keep=parts[memory.rank]):
        yield [memory.all_gave(piece.sent)]
        for rank in _others(memory):
            piece.of(parts[rank]).copy_(piece.read(rank, memory.rank))


def reduce_scatter(
    memory: SharedMemory, chunks: Sequence[Tensor] | LazyBucket, result: Tensor, accumulated: torch.dtype | None = None
) -> CollectiveSteps:
    """Chunk i of the sum on rank i, into `result`, which is contiguous."""
    for piece in _pieces(memory, chunks, keep=result):
        yield [memory.all_gave(piece.sent)]
        me = memory.rank
        parts = [piece.own(me) if rank == me else piece.read(rank, me) for rank in range(memory.size)]
        ordered_sum(parts, piece.of(result), accumulated)


def all_reduce(
    memory: SharedMemory,
    x: Tensor | LazyBucket,
    result: Tensor | Sequence[Tensor],
    accumulated: torch.dtype | None = None,
) -> CollectiveSteps:
    """The sum, into `result`, which is contiguous and may be `x`; or into flat tensors, which lie end to end.

    Two ranks, and more of them with little to add, each add everything. Else each adds a part and reads the others.
    """
    results = ConcatReader([result.view(-1)] if isinstance(result, Tensor) else result)
    if memory.size == 2 or x.nbytes <= ONE_ROUND:
        for piece in _pieces(memory, x if isinstance(x, LazyBucket) else [x]):
            yield [memory.all_gave(piece.sent)]
            for out, parts in _beside(results, [piece.read(rank, 0).view(-1) for rank in range(memory.size)]):
                ordered_sum(parts, out, accumulated)
        return
    for piece in _pieces(memory, x if isinstance(x, LazyBucket) else [x.reshape(-1)]):
        yield [memory.all_gave(piece.sent)]
        written = [piece.read(rank, 0).tensor_split(memory.size) for rank in range(memory.size)]
        mine = [parts[memory.rank] for parts in written]
        mine[memory.rank].copy_(ordered_sum(mine, torch.empty_like(mine[0]), accumulated))
        memory.signal(piece.added)
        yield [memory.all_gave(piece.added)]
        for rank in range(memory.size):
            for out, (part,) in _beside(results, [written[rank][rank]]):
                out.copy_(part)


def _beside(results: ConcatReader, values: Sequence[Tensor]) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
    """The stretches of the results that come next, each with what belongs there of every value."""
    begin = 0
    for out in (stretches := results.next(values[0].numel())):
        end = begin + out.numel()
        yield out, values if len(stretches) == 1 else [each[begin:end] for each in values]
        begin = end


def _others(memory: SharedMemory) -> list[int]:
    return [rank for rank in range(memory.size) if rank != memory.rank]


class _Chunk:
    """A piece of each of several tensors alike, in the memory of every rank.

    Attributes:
        sent: the number that a rank signals when it has written its piece.
        added: a second number, for algorithms of two rounds.
    """

    def __init__(
        self,
        memory: SharedMemory,
        likes: Sequence[Tensor],
        where: slice | None,
        buffers: Sequence[Tensor],
        keeps_own: bool,
    ) -> None:
        self._memory, self._likes, self._where, self._buffers = memory, likes, where, buffers
        self._keeps_own = keeps_own
        self.sent, self.added = memory.next_number(), memory.next_number()

    @property
    def begin(self) -> int:
        """Where it begins in a tensor, as a number of elements."""
        return 0 if self._where is None else self._where.start

    def of(self, x: Tensor) -> Tensor:
        """This piece of a tensor like those that are sent."""
        return x if self._where is None else x.view(-1)[self._where]

    def read(self, rank: int, index: int) -> Tensor:
        """What a rank wrote of its tensor of this index."""
        like = self.own(index)
        return self._lies(rank, index, _stride(like))[: like.nbytes].view(like.dtype).view(like.shape)

    def _lies(self, rank: int, index: int, stride: int) -> Tensor:
        """Where: one behind the other, without the one that a rank keeps for itself."""
        begin = (index - (self._keeps_own and index > rank)) * stride
        return self._buffers[rank][begin : begin + stride]

    def own(self, index: int) -> Tensor:
        """This rank's own, where it lies."""
        return self.of(self._likes[index])

    def write(self) -> None:
        """Write this rank's, but for one that no other reads, and tell the others."""
        for index in range(len(self._likes)):
            if not (self._keeps_own and index == self._memory.rank):
                self.read(self._memory.rank, index).copy_(self.own(index))
        self._memory.signal(self.sent)


class _PackedPiece(_Chunk):
    """A piece of each run of what is packed where it is sent from: a rank reads its own there, as the others do."""

    def __init__(
        self, memory: SharedMemory, packed: LazyBucket, where: slice, buffers: Sequence[Tensor], keep: Tensor | None
    ) -> None:
        super().__init__(memory, (), where, buffers, keep is not None)
        self._packed, self._kept = packed, keep
        self._length = (where.stop - where.start) * packed.dtype.itemsize

    def read(self, rank: int, index: int) -> Tensor:
        return self._lies(rank, index, aligned(self._length))[: self._length].view(self._packed.dtype)

    def own(self, index: int) -> Tensor:
        if self._kept is not None and index == self._memory.rank:
            return self.of(self._kept)
        return self.read(self._memory.rank, index)

    def write(self) -> None:
        self._packed.write([self.own(index) for index in range(self._packed.parts)])
        self._memory.signal(self.sent)


def _pieces(memory: SharedMemory, sent: Sequence[Tensor] | LazyBucket, keep: Tensor | None = None) -> Iterator[_Chunk]:
    """The pieces of what this rank sends, one after the other, each to be read before the next is asked for.

    Where a rank needs one of the tensors for itself alone, the one with its number, this is not written: it stays where
    it is, or is packed into `keep`.
    """
    if isinstance(sent, LazyBucket):
        count, length, itemsize = sent.parts, sent.length, sent.dtype.itemsize
    else:
        count, length, itemsize = len(sent), sent[0].numel(), sent[0].element_size()
    written = count - (keep is not None)
    stretches = places(written, length, itemsize)
    size = written * aligned(stretches[0].stop * itemsize)
    under_way = min(len(stretches), 2 * AHEAD)
    slot = memory.slot(slot_bytes(written, length, itemsize))
    if len(stretches) > 1 and not isinstance(sent, LazyBucket):
        sent = [tensor.reshape(-1) for tensor in sent]
    pieces: list[_Chunk] = []
    for index, place in enumerate(stretches):
        begin = index % under_way * size
        buffers = [part[begin : begin + size] for part in slot.parts]
        if isinstance(sent, LazyBucket):
            pieces.append(_PackedPiece(memory, sent, place, buffers, keep))
        else:
            pieces.append(_Chunk(memory, sent, place if len(stretches) > 1 else None, buffers, keep is not None))
    for piece in pieces[:AHEAD]:
        piece.write()
    for index, piece in enumerate(pieces):
        yield piece
        if index + AHEAD < len(pieces):
            pieces[index + AHEAD].write()
    slot.done()


def _stride(like: Tensor) -> int:
    return aligned(like.nbytes)
