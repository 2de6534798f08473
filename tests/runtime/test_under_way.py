"""What one rank has under way at once: what it holds for collectives that have not ended is bounded."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.runtime.algorithms import Packed, starting, whole
from functional_parallel.runtime.processes import _OneRank
from sharding_specs import Mesh

LAYERS, WIDTH = 12, 8


class Watching:
    """Brings every rank what this one has, or a part of it, and counts what has started and not been waited for."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {}
        self.most: dict[str, int] = {}

    def start(self, name: str, x: Tensor | Packed, *, params: list[Any], **_: Any) -> _Held:
        held = self.held.setdefault(name, set())
        pending = _Held(lambda: held.discard(id(pending)), self.result(name, whole(x), params))
        held.add(id(pending))
        self.most[name] = max(self.most.get(name, 0), len(held))
        return pending

    def result(self, name: str, x: Tensor, params: list[Any]) -> Any:
        if name == "psum_scatter":
            return x.chunk(2)[0].clone()
        if name == "all_gather":
            return starting.taken_apart(torch.cat([x, x]), *params[1:])
        return x


class _Held:
    def __init__(self, end: Callable[[], None], result: Any) -> None:
        self._end, self._result = end, result

    def wait(self) -> Any:
        self._end()
        return self._result


def loss(params: list[Tensor], x: Tensor) -> Tensor:
    for w in params:
        x = torch.tanh(x @ w)
    return x.square().mean()


@pytest.mark.parametrize("bucket", [None, 2 * 4 * WIDTH * WIDTH, "auto"])
def test_one_gradient_at_a_time_waits_to_be_scattered(bucket: int | str | None) -> None:
    params = [torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS)]
    step = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), fp.zero(3, "data"), bucket=bucket)
    program = step.lower(step.init(params), torch.zeros(4, WIDTH))
    carrier = Watching()
    _OneRank(program, carrier).function()([torch.zeros(x.meta["val"].shape) for x in program.traced.inputs])
    assert program.counts()["psum_scatter", ("data",)] == {None: LAYERS, "auto": 1}.get(bucket, LAYERS // 2)
    assert carrier.most["psum_scatter"] == 1
    assert carrier.most["all_gather"] <= 3


@pytest.mark.parametrize("length", [4, 6, 24])
def test_what_is_packed_is_let_go_of_tensor_by_tensor(length: int) -> None:
    tensors = [torch.full((2, 6), float(number)) for number in range(3)]
    alive = [weakref.ref(x) for x in tensors]
    packed, found = Packed(tensors, 2, [0, 0, 0]), torch.empty(2, 18)
    del tensors
    for begin in range(0, 18, length):
        packed.write(list(found[:, begin : begin + length]))
        assert [ref() is not None for ref in alive] == [min(begin + length, 18) < end for end in (6, 12, 18)]
    assert torch.equal(found, torch.arange(3.0).repeat_interleave(6).expand(2, 18))
