"""The law of generation: prefill and decode, in any split of a text, have the logits of the training forward."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import NotEquivalentError
from sharding_specs import Mesh, rules
from tests.models.families import KeepDouble, made

from .models import CONFIG, cached, forward, parameters

TOKENS = torch.randint(3, 32, (8, 12), generator=torch.Generator().manual_seed(0))
MESHES = [(d, t, p) for d in (1, 2, 4, 8) for t in (1, 2, 4) for p in (1, 2) if d * t * p <= 8]


def drawn_plan(draw: Any, axes: tuple[int, int, int], specs: Any) -> tuple[Mesh, Any]:
    """A mesh of these sizes, with any ZeRO stage and any number of microbatches."""
    data, tensor, pipe = axes
    plan: list[Any] = [fp.tensor_parallel("tensor", specs)] if tensor > 1 else []
    plan.append(fp.zero(draw(st.integers(0, 3)), "data"))
    if pipe > 1:
        plan.append(fp.pipeline("pipe", microbatches=draw(st.sampled_from([1, 2])) if data < 8 else 1))
    sizes = {"data": data} | ({"tensor": tensor} if tensor > 1 else {}) | ({"pipe": pipe} if pipe > 1 else {})
    return Mesh(sizes), fp.chain(*plan)


@st.composite
def splits(draw: Any) -> list[int]:
    """A split of a text into a prefill and calls of one or more tokens."""
    total, calls = draw(st.integers(2, 12)), list[int]()
    while sum(calls) < total:
        calls.append(draw(st.integers(1, total - sum(calls))))
    return calls


@settings(max_examples=3, deadline=None)
@given(data=st.data(), axes=st.sampled_from(MESHES), calls=splits())
def test_a_function_with_a_cache(data: st.DataObject, axes: tuple[int, int, int], calls: list[int]) -> None:
    check_function(data, axes, calls)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data(), axes=st.sampled_from(MESHES), calls=splits())
def test_a_function_with_a_cache_often(data: st.DataObject, axes: tuple[int, int, int], calls: list[int]) -> None:
    check_function(data, axes, calls)


def check_function(data: st.DataObject, axes: tuple[int, int, int], calls: list[int]) -> None:
    params, specs = parameters()
    mesh, plan = drawn_plan(data.draw, axes, specs)
    generator = fp.Generator(**cached(), mesh=mesh, plan=plan)
    drift = fp.testing.same_logits(forward, generator, params, TOKENS[:, : sum(calls)], calls=calls)
    assert drift < 1e-12


@cache
def double(family: str) -> tuple[Any, Any, dict[str, Tensor]]:
    """A model in float64, and its function of all parameters, in which its own casts to float32 do nothing."""
    model: Any = made(family)[0].eval()
    fn, params = fp.functional(model)

    def kept(params: Any, *args: Any, **named: Any) -> Any:
        with KeepDouble():
            return fn(params, *args, **named)

    kept.module = model  # type: ignore[attr-defined]
    return model, kept, params


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "GPT-2", "Mistral", "GPT-Neo", "Gemma3"])
@settings(max_examples=10, deadline=None)
@given(data=st.data(), axes=st.sampled_from([axes for axes in MESHES if axes[1] < 4]), calls=splits())
def test_a_model_of_transformers(
    family: str, data: st.DataObject, axes: tuple[int, int, int], calls: list[int]
) -> None:
    model, fn, params = double(family)
    mesh, plan = drawn_plan(data.draw, axes, rules.for_model(model, mesh=Mesh(tensor=2)))

    def forward(params: Any, tokens: Tensor) -> Tensor:
        found: Tensor = fn(params, input_ids=tokens, use_cache=False).logits
        return found

    generator = fp.Generator(fn, mesh, plan)
    fp.testing.same_logits(forward, generator, params, TOKENS[:, : sum(calls)], calls=calls)


def test_another_model_is_found_out() -> None:
    params, _ = parameters()
    generator = fp.Generator(**cached(), mesh=Mesh(data=2), plan=fp.data_parallel("data"))

    def other(params: Any, tokens: Tensor) -> Tensor:
        logits = forward(params, tokens)
        logits[:, 5] += 1e-9
        return logits

    with pytest.raises(NotEquivalentError, match=r"by 1.0e-09, most in column 5; at most 1.0e-12 is rounding"):
        fp.testing.same_logits(other, generator, params, TOKENS)
    with pytest.raises(ValueError, match=r"calls=\[5\]: they read 5 columns, and the tokens have 12"):
        fp.testing.same_logits(forward, generator, params, TOKENS, calls=[5])


def test_the_drift_of_float32_is_reported() -> None:
    params, _ = parameters(torch.float32)
    generator = fp.Generator(**cached(), mesh=Mesh(data=2), plan=fp.data_parallel("data"))
    drift = fp.testing.same_logits(forward, generator, params, TOKENS)
    assert 0 < drift < 1e-4
    with pytest.raises(NotEquivalentError):
        fp.testing.same_logits(forward, generator, params, TOKENS, tolerance=drift / 2)
    assert CONFIG["layers"] == 2
