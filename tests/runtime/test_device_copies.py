"""Copies from main memory to a device do not make the host wait. Here the meta device is in the place of the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.runtime.execution import codegen
from functional_parallel.runtime.execution.regions import _is_pure
from sharding_specs import Mesh, P

Moves = list[tuple[int, ...]]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Iterator[Moves]:
    """The shapes that were copied to a device."""
    found: Moves = []

    def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert device.type == "cuda"
        found.append(tuple(x.shape))
        return x.to("meta")

    monkeypatch.setattr(codegen, "to_device", to_device)
    yield found


def f(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return x * n.to(x.device) + torch.tensor([1.0, 2.0], device=x.device) * torch.tensor(3.0, device=x.device)


def program() -> Any:
    arguments = fp.abstract(torch.ones(2), "cuda"), torch.tensor(2.0)
    return fp.compile(f, Mesh(), in_specs=(P(), P()), out_specs=P()).lower(*arguments)


def function(recorded: bool) -> Any:
    def line(node: Any, writer: codegen.Writer) -> str:
        return writer.call(node, writer.names.__getitem__)

    return codegen.Writer(program().traced, line, recorded=recorded).function()


def inputs() -> list[torch.Tensor]:
    return [torch.ones(2, device="meta"), torch.tensor(2.0)]


def test_each_run_copies(moves: Moves) -> None:
    run = function(recorded=False)
    assert moves == []
    for _ in range(2):
        run(inputs())
    assert sorted(moves) == sorted([(), (2,), ()] * 2)


def test_constants_are_copied_before_kernels_are_recorded(moves: Moves) -> None:
    run = function(recorded=True)
    assert sorted(moves) == [(), (2,)]
    for _ in range(2):
        run(inputs())
    assert sorted(moves) == [(), (), (), (2,)]  # the input each time


def test_a_region_has_no_such_copy() -> None:
    copies = [node for node in program().traced.nodes if node.target is torch.ops.aten._to_copy.default]
    assert len(copies) == 3 and all(map(codegen.is_moved_to_device, copies)) and not any(map(_is_pure, copies))


def test_other_copies_are_torchs() -> None:
    step = fp.compile(lambda x: x.double() + x.cpu().to(x.device), Mesh(), in_specs=P(), out_specs=P())
    here = step.lower(torch.ones(2))
    assert not any(map(codegen.is_moved_to_device, here.traced.nodes))
    there = step.lower(fp.abstract(torch.ones(2), "cuda"))
    assert [codegen.is_moved_to_device(node) for node in there.traced.nodes if "_to_copy" in str(node.target)] == [
        *(False, False),
        True,
    ]
