"""The bytes that a program counts for a collective are those that a run on processes passes to the transport.

Counted from outside are messages, calls of the backend, and writes to shared memory. Each counter knows one call of the
transport and none of the library's formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import functional_parallel as fp
from functional_parallel.collectives import COMMUNICATING, apply_primitive
from functional_parallel.runtime import TRANSPORTS, communicator
from functional_parallel.runtime.processes.torch_messages import ROLL_CALL
from functional_parallel.shared_memory import collectives as shared
from functional_parallel.shared_memory.channels import Channels
from sharding_specs import Mesh, P
from tests.processes import run_on_processes

ELEMENTS = 40_000  # on a rank; pmax and pmin of more than 1 MiB on all ranks do not gather all of it
SOURCE = 1
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "psum": lambda x: fp.psum(x, "i"),
    "psum_scatter": lambda x: fp.psum_scatter(x, "i", 0),
    "all_gather": lambda x: fp.all_gather(x, "i", 0),
    "all_to_all": lambda x: fp.all_to_all(x, "i", 0, 0),
    "ppermute": lambda x: fp.ppermute(x, "i", [(0, 1), (1, 0)]),
    "pmax": lambda x: fp.pmax(x, "i"),
    "pmin": lambda x: fp.pmin(x, "i"),
    "pbroadcast": lambda x: fp.pbroadcast(x, "i", SOURCE),
    "broadcast": lambda x: apply_primitive("broadcast", x, ("i",), SOURCE, "varying"),
    "scatter": lambda x: apply_primitive("scatter", x, ("i",), 0, SOURCE),
    "gather": lambda x: apply_primitive("gather", x, ("i",), 0, SOURCE),
    "reduce": lambda x: apply_primitive("reduce", x, ("i",), SOURCE, "varying"),
}
ON_SOURCE = P(owner={"i": SOURCE})
REPLICATED = ("psum", "pmax", "pmin", "pbroadcast")
SETTINGS = list(TRANSPORTS)


def counted(kind: str, ranks: int) -> int:
    """The bytes that a program with this collective counts for one rank."""
    from_owner, to_owner = kind in ("broadcast", "scatter"), kind in ("gather", "reduce")
    out = P() if kind in REPLICATED else ON_SOURCE if to_owner else P("i")
    program = fp.shard_map(KINDS[kind], Mesh(i=ranks), in_specs=ON_SOURCE if from_owner else P("i"), out_specs=out)
    elements = ELEMENTS if from_owner else ranks * ELEMENTS
    found = program.lower(torch.empty(elements, dtype=torch.float64, device="meta"))
    (row,) = found.explain().rows
    assert {(kind, ("i",)): row.bytes} == found.bytes_sent() == found.price().bytes_sent()
    return int(row.bytes)


def test_every_primitive_that_communicates_is_measured() -> None:
    assert set(KINDS) == set(COMMUNICATING)


# -----------------------------------------------------------------------------
# The transport
# -----------------------------------------------------------------------------


class Passed:
    """The bytes that this process passes to the transport for other ranks."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.bytes = rank, ranks, 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside a `with` block."""
        with ExitStack() as stack:
            for name in ("isend", "all_reduce", "all_gather", "all_to_all_single", "broadcast"):
                stack.enter_context(patch.object(dist, name, self._noted(name, getattr(dist, name))))
            stack.enter_context(patch.object(Channels, "send", self._noted("channel", Channels.send)))
            for piece in (shared._Chunk, shared._PackedPiece):
                stack.enter_context(patch.object(piece, "write", self._written(piece.write)))
            yield

    def _noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **named: Any) -> Any:
            if named.get("tag") != ROLL_CALL:
                self.bytes += getattr(self, name)(*args)
            return call(*args, **named)

        return noted

    def _written(self, write: Callable[[Any], None]) -> Callable[[Any], None]:
        def written(piece: Any) -> None:
            with _Copies() as copies:
                write(piece)
            self.bytes += copies.bytes

        return written

    # --- per call, what a ring sends for one rank ---

    def isend(self, x: Tensor, *_: Any) -> int:
        return x.nbytes

    def channel(self, channels: Channels, x: Tensor, to: int) -> int:
        return x.nbytes

    def all_reduce(self, x: Tensor, *_: Any) -> int:
        """A part of `x` goes to the next rank as often as there are others, twice."""
        return 2 * (self.ranks - 1) * (x.nbytes // self.ranks)

    def all_gather(self, parts: list[Tensor], mine: Tensor, *_: Any) -> int:
        """The parts of all ranks but the next one go to it."""
        return sum(part.nbytes for part in parts) - parts[(self.rank + 1) % self.ranks].nbytes

    def all_to_all_single(self, received: Tensor, sent: Tensor, sizes: Any, lengths: list[int], *_: Any) -> int:
        return sent.element_size() * (sum(lengths) - lengths[self.rank])

    def broadcast(self, x: Tensor, source: int, *_: Any) -> int:
        return x.nbytes if source == self.rank else 0


class _Copies(TorchDispatchMode):
    """The bytes of what is copied into other memory."""

    bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.copy_.default:
            self.bytes += args[0].nbytes
        return op(*args, **(kwargs or {}))


def passed(rank: int, ranks: int) -> dict[tuple[str, str], int]:
    """Per algorithm and collective, the bytes that this rank passes on."""
    found = {}
    for name in SETTINGS:
        carrier = communicator(Mesh(i=ranks), algorithm=name)
        for kind, body in KINDS.items():
            x = torch.full((ELEMENTS,), float(rank), dtype=torch.float64)
            with carrier.bound():
                body(x)  # the first use makes groups
                transport = Passed(rank, ranks)
                with transport.counting():
                    body(x)
            found[name, kind] = transport.bytes
    return found


# -----------------------------------------------------------------------------
# The laws
# -----------------------------------------------------------------------------


def is_written_once(name: str, kind: str, ranks: int) -> bool:
    """Memory that more than two ranks share is written once for all readers, where a ring has each byte go round."""
    return name == "shared" and ranks > 2 and kind in ("psum", "all_gather", "pmax", "pmin")


def sends(kind: str, rank: int) -> bool:
    """Two ranks exchange in the ppermute, and one is the source of a broadcast, or the root of a reduction."""
    is_source = rank == SOURCE
    from_or_to_one = {"pbroadcast": is_source, "broadcast": is_source, "scatter": is_source}
    return {"ppermute": rank < 2, **from_or_to_one, "gather": not is_source, "reduce": not is_source}.get(kind, True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_counted_bytes_are_passed_to_the_transport(ranks: int) -> None:
    found = run_on_processes(passed, ranks, ranks)
    compared = [(name, kind) for name in SETTINGS for kind in KINDS if not is_written_once(name, kind, ranks)]
    wanted = {
        (name, kind): [counted(kind, ranks) * sends(kind, rank) for rank in range(ranks)] for name, kind in compared
    }
    assert {key: [each[key] for each in found] for key in compared} == wanted
    own = 8 * ELEMENTS
    once = {(name, kind): own for name in SETTINGS for kind in KINDS if is_written_once(name, kind, ranks)}
    assert [{key: each[key] for key in once} for each in found] == [once] * ranks


# -----------------------------------------------------------------------------
# Pipelines
# -----------------------------------------------------------------------------


def deep(params: list[Tensor], x: Tensor) -> Tensor:
    for weight in params:
        x = torch.tanh(x @ weight)
    return x.square().mean()


def training() -> tuple[Any, Any, Tensor]:
    """A step whose results stay on their ranks."""
    train = fp.train_step(deep, fp.optim.sgd(0.1), Mesh(i=2), fp.pipeline("i", microbatches=4))
    return train, train.init([torch.full((8, 8), 0.125) for _ in range(4)]), torch.ones(16, 8)


def sent_by_stages(rank: int) -> int:
    train, state, x = training()
    state, _ = train(state, x)
    transport = Passed(rank, 2)
    with transport.counting():
        train(state, x)
    return transport.bytes


def test_sends_of_a_pipeline_are_passed_to_the_transport() -> None:
    train, state, x = training()
    counts = train.lower(state, x).bytes_sent()
    assert counts["send", ("i",)] > 0
    assert sum(counts.values()) == sum(run_on_processes(sent_by_stages, 2))
