"""Specs of another structure than what they are for: the error says whose, where, and how to write a prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P, SpecError

MESH = Mesh(data=2)
X = torch.arange(4.0)


def f(x: Tensor) -> Any:
    return {"a": x, "b": (2 * x, x + 1)}


def loss(params: Any, batch: Any) -> Tensor:
    return (params["v"] * batch["x"]).sum()


def body(x: Tensor) -> Any:
    return fp.shard_map(f, Mesh(tensor=2), in_specs=P(), out_specs=[P(), P()])(x)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "results of a compiled function": (
        lambda: fp.compile(f, MESH, in_specs=P(), out_specs={"a": P(), "c": P()})(X),
        r"""out_specs of f: not of the structure of what it returned:
  b: there is no spec for it
  c: the tree has no such node
  .*\{'a': P\(…\), 'b': P\(…\)\} has one per child""",
    ),
    "results of a body": (
        lambda: fp.shard_map(f, MESH, in_specs=P(), out_specs={"a": P(), "b": (P(), P(), P())})(X),
        r"out_specs of f: .* what it returned:\n  b: a tuple of 2, but the specs have a tuple of 3\n",
    ),
    "results of a body in a plan": (
        lambda: fp.compile(fp.data_parallel("data")(lambda x: body(x)["a"].sum()), Mesh(data=2, tensor=2))(X),
        r"out_specs of f: .* what it returned:\n  the entire tree: a dict of 2, but the specs have a list of 2\n",
    ),
    "arguments": (
        lambda: fp.compile(loss, MESH, in_specs=({"v": P()}, {"y": P()}), out_specs=P())({"v": X}, {"x": X}),
        r"in_specs of loss, argument 1: .* what is given for it:\n  x: there is no spec for it\n  y: the tree has no",
    ),
    "a batch": (
        lambda: fp.compile(fp.data_parallel("data", batch={"y": P("data")})(loss), MESH)({"v": X}, {"x": X}),
        r"specs of data_parallel\('data'\), argument 1: .*\n  x: there is no spec for it\n",
    ),
    "parameters": (
        lambda: fp.compile(fp.tensor_parallel("data", {"v": {"w": P("data")}})(loss), MESH)({"v": X}, {"x": X}),
        r"spec tree of tensor_parallel\('data'\): .* the parameters:\n  v: a tensor of shape \(4,\), but the specs",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_said_whose_specs_differ_where(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises(SpecError, match=message):
        call()
