"""A spec with more dims than its tensor is refused wherever specs are given, unsharded dims at its end included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P, SpecError, annotate, local_shape, memory_table, shard, unshard, validate

MESH = Mesh(i=2)
X, LONG = torch.ones(4), P("i", None)


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (params["b"] * x).sum()


def gradient(plan: Callable[..., Any]) -> Any:
    return fp.compile(fp.grad(plan(loss)), MESH)({"b": X}, X)


ENTRIES: dict[str, tuple[str, Callable[[], Any]]] = {  # the path that the error names, and a call
    "validate": ("b", lambda: validate({"b": X}, {"b": LONG}, MESH)),
    "shard": ("b", lambda: shard({"b": X}, {"b": LONG}, MESH, 0)),
    "unshard": ("b", lambda: unshard([{"b": X}] * 2, {"b": LONG}, MESH)),
    "local_shape": ("", lambda: local_shape((4,), LONG, MESH)),
    "memory_table": ("b", lambda: memory_table({"b": X}, {"b": LONG}, MESH)),
    "annotate": ("", lambda: annotate(X, LONG)),
    "in_specs": (
        "b",
        lambda: fp.compile(lambda p: p["b"] * 2, MESH, in_specs=({"b": LONG},), out_specs=P("i"))({"b": X}),
    ),
    "out_specs": ("b", lambda: fp.compile(lambda x: {"b": x}, MESH, in_specs=P("i"), out_specs={"b": LONG})(X)),
    "unsharded in_specs": (
        "the value",
        lambda: fp.compile(lambda x: x * 2, MESH, in_specs=P(None, None), out_specs=P())(X),
    ),
    "shard_map": ("the value", lambda: fp.shard_map(lambda x: x * 2, MESH, in_specs=LONG, out_specs=P("i"))(X)),
    "shard_map inside a plan": (
        "the value",
        lambda: fp.compile(
            fp.partition(
                lambda x: fp.shard_map(lambda y: y * 2, Mesh(i=2, j=2), in_specs=P(), out_specs=P(None, None))(x),
                "j",
                (P("j"),),
                P(),
            ),
            Mesh(i=2, j=2),
        )(X),
    ),
    "partition": ("the value", lambda: fp.compile(fp.partition(lambda x: x * 2, "i", (LONG,)), MESH)(X)),
    "partition, results": (
        "the value",
        lambda: fp.compile(fp.partition(lambda x: x * 2, "i", (P("i"),), LONG), MESH)(X),
    ),
    "a spec tree": ("b", lambda: gradient(fp.tensor_parallel("i", {"b": LONG}))),
    "rules": ("b", lambda: gradient(fp.tensor_parallel("i", [("*", LONG)]))),
    "zero": ("b", lambda: gradient(fp.zero(3, "i", {"b": LONG}))),
    "a batch": ("the value", lambda: gradient(fp.data_parallel("i", batch=LONG))),
    "from_specs": ("b", lambda: gradient(fp.from_specs({"b": LONG}, MESH))),
    "constrain": ("", lambda: fp.constrain(X, LONG)),
    "constrain in a plan": (
        "",
        lambda: fp.compile(fp.partition(lambda x: fp.constrain(x * 2, LONG), "i", (P(),), P()), MESH)(X),
    ),
}


@pytest.mark.parametrize("entry", sorted(ENTRIES))
def test_more_dims_than_the_tensor_has(entry: str) -> None:
    path, call = ENTRIES[entry]
    with pytest.raises(SpecError) as caught:
        call()
    text = str(caught.value)
    shape = "(2,)" if entry == "out_specs" else "(4,)"  # the shard that a body returns
    assert (f"{path}: shape {shape}" if path else shape) in text
    assert "P('i', None)" in text or "P(None, None)" in text


@given(st.lists(st.sampled_from([None, "i", ("i", 2), (3, "i")]), max_size=4), st.integers(0, 4))
def test_a_spec_fits_tensors_of_as_many_dims(dims: list[Any], ndim: int) -> None:
    if sum(dim is not None for dim in dims) > 1:
        return
    spec, x = P(*dims), torch.ones([6] * ndim)
    assert eval(spec.as_written(), {"P": P}).named == len(dims)
    if len(dims) > ndim:
        with pytest.raises(SpecError, match=f"the spec has {len(dims)} dims, the tensor has {ndim}"):
            shard(x, spec, MESH, 0)
    else:
        assert shard(x, spec, MESH, 0).ndim == ndim


def test_a_restricted_spec_does_not_need_trailing_unsharded_dims() -> None:
    for axes in ({"i"}, {"i", "j"}, set()):
        assert P("i", None).only(axes).named == 1
