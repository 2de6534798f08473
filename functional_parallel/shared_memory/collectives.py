"""Collectives through memory shared by the ranks of one host: each byte is written once and read where it is needed.

Large ones are sent in pieces that stay in the cache. Piece `t + 2` is written after piece `t` was read, over piece
`t - 2`: the signal for piece `t` implies that its sender has read piece `t - 2`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .mapped_memory import CollectiveSteps, SharedMemory
from .packed import ConcatReader, LazyBucket, Operand
from .slots import AHEAD, aligned, places, slot_bytes
from .unpacked import DirectOutputs

ONE_ROUND = 128 << 10  # below this size, adding everything on every rank is cheaper than a second round of signals


def all_gather(memory: SharedMemory, mine: Operand, parts: Sequence[Tensor] | DirectOutputs) -> CollectiveSteps:
    """Gather the value of rank i into `parts[i]`, which is contiguous, or into the tensors of `DirectOutputs`."""
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
    parts[memory.rank].copy_(chunks[memory.rank])
    for piece in _pieces(memory, chunks, keep=parts[memory.rank]):
        yield [memory.all_gave(piece.sent)]
        for rank in _others(memory):
            piece.of(parts[rank]).copy_(piece.read(rank, memory.rank))


def reduce_scatter(memory: SharedMemory, chunks: Sequence[Tensor] | LazyBucket, result: Tensor) -> CollectiveSteps:
    for piece in _pieces(memory, chunks, keep=result):
        yield [memory.all_gave(piece.sent)]
        me = memory.rank
        parts = [piece.own(me) if rank == me else piece.read(rank, me) for rank in range(memory.size)]
        _ordered_sum(parts, piece.of(result))


def all_reduce(memory: SharedMemory, x: Operand, result: Tensor | Sequence[Tensor]) -> CollectiveSteps:
    """Write the sum into `result`, which is contiguous and may be `x`, or into concatenated flat tensors."""
    results = ConcatReader([result.view(-1)] if isinstance(result, Tensor) else result)
    if memory.size == 2 or x.nbytes <= ONE_ROUND:
        for piece in _pieces(memory, x if isinstance(x, LazyBucket) else [x]):
            yield [memory.all_gave(piece.sent)]
            for out, parts in _beside(results, [piece.read(rank, 0).view(-1) for rank in range(memory.size)]):
                _ordered_sum(parts, out)
        return
    for piece in _pieces(memory, x if isinstance(x, LazyBucket) else [x.reshape(-1)]):
        yield [memory.all_gave(piece.sent)]
        written = [piece.read(rank, 0).tensor_split(memory.size) for rank in range(memory.size)]
        mine = [parts[memory.rank] for parts in written]
        mine[memory.rank].copy_(_ordered_sum(mine, torch.empty_like(mine[0])))
        memory.signal(piece.added)
        yield [memory.all_gave(piece.added)]
        for rank in range(memory.size):
            for out, (part,) in _beside(results, [written[rank][rank]]):
                out.copy_(part)


def _ordered_sum(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """Sum in rank order, with the bits of `collectives.reference`. `out` may be one of the parts."""
    disturbs = any(part.data_ptr() == out.data_ptr() for part in parts[2:])
    total = torch.add(parts[0], parts[1], out=torch.empty_like(out) if disturbs else out)
    for part in parts[2:]:
        total += part
    return out.copy_(total) if disturbs else out


def _beside(results: ConcatReader, values: Sequence[Tensor]) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
    begin = 0
    for out in (stretches := results.next(values[0].numel())):
        end = begin + out.numel()
        yield out, values if len(stretches) == 1 else [each[begin:end] for each in values]
        begin = end


def _others(memory: SharedMemory) -> list[int]:
    return [rank for rank in range(memory.size) if rank != memory.rank]


class _Chunk:
    def __init__(
        self, memory: SharedMemory, likes: Sequence[Tensor], where: slice | None, buffers: Sequence[Tensor], keeps: bool
    ) -> None:
        self._memory, self._likes, self._where, self._buffers, self._keeps_own = memory, likes, where, buffers, keeps
        # signalled when a rank has written its piece, and by algorithms of two rounds once more
        self.sent, self.added = memory.next_number(), memory.next_number()

    @property
    def begin(self) -> int:
        return 0 if self._where is None else self._where.start

    def of(self, x: Tensor) -> Tensor:
        return x if self._where is None else x.view(-1)[self._where]

    def read(self, rank: int, index: int) -> Tensor:
        like = self.own(index)
        return self._lies(rank, index, aligned(like.nbytes))[: like.nbytes].view(like.dtype).view(like.shape)

    def _lies(self, rank: int, index: int, stride: int) -> Tensor:
        begin = (index - (self._keeps_own and index > rank)) * stride
        return self._buffers[rank][begin : begin + stride]

    def own(self, index: int) -> Tensor:
        return self.of(self._likes[index])

    def write(self) -> None:
        for index in range(len(self._likes)):
            if not (self._keeps_own and index == self._memory.rank):
                self.read(self._memory.rank, index).copy_(self.own(index))
        self._memory.signal(self.sent)


class _PackedPiece(_Chunk):
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
    """Yield pieces, each to be read before the next. This rank's own tensor stays in place, or goes to `keep`."""
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
