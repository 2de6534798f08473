"""A model with n places to cut is cut into any number of stages up to n + 1, in balance of work or of memory."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import PipelineError
from functional_parallel.pipelines import cut
from sharding_specs import Mesh

from .test_balanced_cut import tried

OPS = {
    "linear": lambda x, w: x @ w,
    "relu": lambda x, w: torch.relu(x),
    "double": lambda x, w: x * 2,
    "add": lambda x, w: x + 1,
    "view": lambda x, w: x.unflatten(0, (-1, 2)).flatten(0, 1),
    "bias": lambda x, w: x + w[0],
}


def model(names: list[str]) -> Any:
    def loss(params: list[Tensor], x: Tensor) -> Tensor:
        for name, weight in zip(names, params, strict=True):
            x = OPS[name](x, weight)
        return (x * x).sum()

    return loss


def arguments(names: list[str]) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.randint(-1, 2, (2, 2), generator=generator).double() for _ in names]
    return params, torch.randint(-2, 3, (4, 2), generator=generator).double()


def lowered(names: list[str], stages: int, balance: str) -> Any:
    plan = fp.pipeline("pipe", microbatches=2, balance=balance)
    return fp.compile(fp.grad(plan(model(names))), Mesh(pipe=stages)).lower(*arguments(names))


def most_stages(names: list[str], balance: str) -> int:
    """The number of stages that the refusal of far too many names."""
    with pytest.raises(PipelineError) as refused:
        lowered(names, 99, balance)
    found = re.search(r"cut into at most (\d+) stage", str(refused.value))
    assert found
    return int(found[1])


@settings(max_examples=8)
@given(st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=7).map(lambda names: ["linear", *names]), st.data())
def test_any_number_up_to_the_most_is_cut(names: list[str], data: st.DataObject) -> None:
    balance = data.draw(st.sampled_from(["work", "memory"]))
    most = most_stages(names, balance)
    for stages in range(2, most + 1):
        assert len(lowered(names, stages, balance).stages) == stages
    stages = data.draw(st.integers(1, most))
    plan = fp.pipeline("pipe", microbatches=2, balance=balance)
    fp.testing.assert_equivalent(model(names), plan, Mesh(pipe=stages), *arguments(names))


@given(st.lists(st.sampled_from([0, 0, 1, 3]), min_size=2, max_size=9), st.data())
def test_stages_are_free_only_where_they_must_be(costs: list[int], data: st.DataObject) -> None:
    places = dict.fromkeys(sorted(data.draw(st.sets(st.integers(1, len(costs) - 1), min_size=1))), 1)
    stages = data.draw(st.integers(2, len(places) + 1))
    nodes: list[Any] = list(range(len(costs)))
    sums = [float(sum(costs[:end])) for end in range(len(costs) + 1)]
    found = cut.bounds_of(places, list(map(float, costs)), stages)
    assert len(found) == stages - 1 == len(set(found)) and set(found) <= set(places)
    ends = [0, *found, len(nodes)]
    if tried(places, sums, stages) is not None:
        assert all(sums[end] > sums[start] for start, end in itertools.pairwise(ends))
