"""What one rank has under way at once: what it holds for it is bounded, and is not written over."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import functional_parallel as fp
from functional_parallel.collectives import CollectiveCall
from functional_parallel.ir import Aval, NodeInfo, Traced, info, set_info
from functional_parallel.ops.packing import PACK, UNPACK
from functional_parallel.program import Program
from functional_parallel.runtime import RankProgram
from functional_parallel.shared_memory import ZeroCopyProgram
from functional_parallel.shared_memory.packed import LazyBucket, to_tensor
from functional_parallel.shared_memory.unpacked import BucketLayout, SlicedBucket
from sharding_specs import Mesh, P

LAYERS, WIDTH = 12, 8


class Watching:
    """Brings every rank what this one has, or a part of it, and counts what has started and not been waited for."""

    rank = 0

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {}
        self.most: dict[str, int] = {}

    def start(
        self, call: CollectiveCall, x: Tensor | LazyBucket, *, layout: BucketLayout | None = None, **_: Any
    ) -> _Held:
        held = self.held.setdefault(call.kind, set())
        pending = _Held(lambda: held.discard(id(pending)), lambda: self.result(call.kind, to_tensor(x), layout))
        held.add(id(pending))
        self.most[call.kind] = max(self.most.get(call.kind, 0), len(held))
        return pending

    def result(self, name: str, x: Tensor, layout: BucketLayout | None) -> Any:
        if name == "psum_scatter":
            return x.chunk(2)[0].clone()
        if name == "all_gather":
            return torch.cat([x, x]) if layout is None else SlicedBucket(layout, torch.cat([x, x]))
        return x


class _Held:
    def __init__(self, end: Callable[[], None], result: Callable[[], Any]) -> None:
        self._end, self._result = end, result

    def wait(self) -> Any:
        self._end()
        return self._result()


def loss(params: list[Tensor], x: Tensor) -> Tensor:
    for w in params:
        x = torch.tanh(x @ w)
    return x.square().mean()


@pytest.mark.parametrize("executable", [RankProgram, ZeroCopyProgram])
@pytest.mark.parametrize("bucket", [None, 2 * 4 * WIDTH * WIDTH, "auto"])
def test_one_gradient_at_a_time_waits_to_be_scattered(executable: type[RankProgram], bucket: int | str | None) -> None:
    params = [torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS)]
    step = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), fp.zero(3, "data"), bucket=bucket)
    program = step.lower(step.init(params), torch.zeros(4, WIDTH))
    carrier = Watching()
    executable(program, carrier).function()([torch.zeros(info(x).aval.shape) for x in program.traced.inputs])
    assert program.counts()["psum_scatter", ("data",)] == {None: LAYERS, "auto": 1}.get(bucket, LAYERS // 2)
    assert carrier.most["psum_scatter"] == 1
    assert carrier.most["all_gather"] <= 3


@pytest.mark.parametrize("executable", [RankProgram, ZeroCopyProgram])
def test_what_is_still_to_be_packed_is_not_written_over(executable: type[RankProgram]) -> None:
    """A large bucket is packed piece by piece, the last ones while it is waited for."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "xy"]
    packed = graph.call_function(PACK, (inputs, 1, [0, 0]))
    gathered = graph.call_function(torch.ops.fp.all_gather.default, (packed, ["data"], 0, "varying"))
    both = [graph.call_function(UNPACK, (gathered, 2, begin, [3], 0)) for begin in (0, 3)]
    written = graph.call_function(torch.ops.aten.add_.Tensor, tuple(inputs))
    for node, length in [(x, 3) for x in (*inputs, written)] + [(packed, 6), (gathered, 12)] + [(x, 6) for x in both]:
        set_info(node, NodeInfo(Aval((length,), torch.float32)))
    traced = Traced(graph, inputs, [*both, written])
    traced.seal()
    specs = {"in_specs": [P(), P()], "out_specs": [P()] * 3, "in_paths": ["x", "y"], "out_paths": ["a", "b", "c"]}
    program = Program(traced, mesh=Mesh(data=2), name="written", **specs)
    x, y = torch.ones(3), torch.full((3,), 2.0)
    found = executable(program, Watching()).function()([x.clone(), y.clone()])
    assert all(map(torch.equal, found, [x.repeat(2), y.repeat(2), x + y]))


@pytest.mark.parametrize("length", [4, 6, 24])
def test_what_is_packed_is_let_go_of_tensor_by_tensor(length: int) -> None:
    tensors = [torch.full((2, 6), float(number)) for number in range(3)]
    alive = [weakref.ref(x) for x in tensors]
    packed, found = LazyBucket(tensors, 2, [0, 0, 0]), torch.empty(2, 18)
    del tensors
    for begin in range(0, 18, length):
        packed.write(list(found[:, begin : begin + length]))
        assert [ref() is not None for ref in alive] == [min(begin + length, 18) < end for end in (6, 12, 18)]
    assert torch.equal(found, torch.arange(3.0).repeat_interleave(6).expand(2, 18))
