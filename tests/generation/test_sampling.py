"""Draws of the next token: the distribution, the tokens that are left out, and the same text everywhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.generation import Sampling
from sharding_specs import Mesh

from .models import cached, parameters

_, SPECS = parameters()
TENSOR = fp.tensor_parallel("tensor", SPECS)
MESHES: dict[str, tuple[Mesh, Any]] = {
    "tensor": (Mesh(tensor=4), TENSOR),
    "data": (Mesh(data=2), fp.data_parallel("data")),
    "both": (Mesh(data=2, tensor=2), fp.chain(TENSOR, fp.zero(1, "data"))),
    "zero 3": (Mesh(data=4), fp.zero(3, "data")),
    "pipeline": (Mesh(pipe=2), fp.pipeline("pipe", microbatches=2)),
    "all": (Mesh(data=2, tensor=2, pipe=2), fp.chain(TENSOR, fp.zero(3, "data"), fp.pipeline("pipe", microbatches=1))),
}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11], [12]]
NEW = 10
OPTIONS: dict[str, Any] = {"temperature": 1.3, "top_k": 20, "top_p": 0.9}


def text_on(mesh: Mesh, plan: Any, prompts: Any = PROMPTS, **named: Any) -> torch.Tensor:
    generator = fp.Generator(**cached(), mesh=mesh, plan=plan, **OPTIONS)
    return generator(parameters()[0], prompts, max_new_tokens=NEW, **named).tokens


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return text_on(Mesh(data=1), fp.data_parallel("data"))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.every(3)
def test_every_mesh_draws_the_same_text(mesh: str, text: torch.Tensor) -> None:
    assert torch.equal(text_on(*MESHES[mesh]), text)


def test_a_row_alone_draws_what_it_draws_in_the_batch(text: torch.Tensor) -> None:
    keys = fp.random.fold_in(fp.random.key(0), torch.arange(len(PROMPTS)))
    for row in (0, 2):
        alone = text_on(Mesh(data=1), fp.data_parallel("data"), PROMPTS[row : row + 1], keys=keys[row : row + 1])
        assert torch.equal(alone[0], text[row])
    assert not torch.equal(text_on(Mesh(data=1), fp.data_parallel("data"), seed=1), text)
    rows = [row.tolist() for row in text]
    assert len({tuple(row) for row in rows}) == len(rows), "rows have different keys"


def test_the_numbers_are_those_of_the_library() -> None:
    keys, scores = fp.random.fold_in(fp.random.key(7), torch.arange(3)), torch.randn(3, 11).double()
    positions = torch.tensor([4, 0, 9])
    uniform = torch.func.vmap(fp.random.uniform)(fp.random.fold_in(keys, positions), scores)
    wanted = (scores - (-uniform.log()).log()).argmax(-1)
    assert torch.equal(Sampling(1.0).draw(scores, keys, positions), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tokens_are_drawn_with_their_probabilities(dtype: torch.dtype) -> None:
    count, scores = 100_000, torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -math.inf])
    keys = fp.random.fold_in(fp.random.key(3), torch.arange(count))
    drawn = Sampling(0.7).draw(scores.to(dtype).expand(count, -1), keys, torch.full((count,), 5))
    expected = (scores / 0.7).softmax(-1) * count
    found = torch.bincount(drawn, minlength=6).double()
    assert found[-1] == 0
    chi = ((found[:-1] - expected[:-1]) ** 2 / expected[:-1]).sum()
    assert chi < 18.5, "beyond the 99.9 % quantile of 4 degrees of freedom"


@pytest.mark.parametrize(("top_k", "top_p"), [(3, None), (None, 0.7), (5, 0.5), (1, None), (None, 0.01), (7, 1.0)])
def test_the_same_tokens_are_left_out_as_by_transformers(top_k: int | None, top_p: float | None) -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    scores = torch.randn(20, 13, generator=torch.Generator().manual_seed(0)).double() * 2
    wanted = scores
    if top_k is not None:
        wanted = process.TopKLogitsWarper(top_k)(None, wanted)
    if top_p is not None and top_p < 1:
        wanted = process.TopPLogitsWarper(top_p)(None, wanted)
    torch.testing.assert_close(Sampling(1.0, top_k, top_p).kept(scores), wanted, rtol=0, atol=0)


def test_without_a_temperature_the_best_token_is_taken() -> None:
    scores = torch.randn(5, 9)
    assert torch.equal(Sampling().draw(scores, torch.arange(5), torch.arange(5)), scores.argmax(-1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, r"temperature=-1.0: it is 0 for the best token, or a positive number"),
        ({"temperature": "hot"}, "temperature='hot': it is 0 for the best token"),
        ({"temperature": 1.0, "top_k": "all"}, "top_k='all': it is a number of tokens"),
        ({"temperature": 1.0, "top_k": 2.0}, "top_k=2.0: it is a number of tokens"),
        ({"temperature": 1.0, "top_p": "0.9"}, "top_p='0.9': it is a probability above 0"),
        ({"temperature": 1.0, "top_k": 0}, r"top_k=0: it is a number of tokens, 1 or more"),
        ({"temperature": 1.0, "top_p": 1.5}, r"top_p=1.5: it is a probability above 0"),
        ({"top_k": 3}, "temperature=0 draws none: give a temperature"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp.Generator(**cached(), mesh=Mesh(data=1), **options)


def test_more_tokens_than_the_vocabulary_has_are_refused() -> None:
    generator = fp.Generator(**cached(), mesh=Mesh(data=1), temperature=1.0, top_k=33)
    with pytest.raises(ValueError, match=r"top_k=33: the vocabulary has 32 tokens"):
        generator(parameters()[0], [[1]], max_new_tokens=1)
