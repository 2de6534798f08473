"""Continuous batching: each request has the text that it has alone, whenever others come and go, on any mesh."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from functional_parallel.stateful import own_shards
from sharding_specs import Mesh, rules

from ..processes import run_on_processes
from .models import CONFIG, FAMILIES, cached, generated_by_transformers, gpt, model_of, parameters

PARAMS, SPECS = parameters()
TENSOR = fp.tensor_parallel("tensor", SPECS)
LENGTH, MOST = 20, 6
MESHES: dict[str, tuple[Mesh, Any, int]] = {  # with a number of rows
    "data and pipe": (Mesh(data=2, pipe=2), fp.chain(fp.zero(3, "data"), fp.pipeline("pipe", microbatches=2)), 4),
    "tensor": (Mesh(tensor=2), TENSOR, 3),
    "data": (Mesh(data=2), fp.zero(3, "data"), 4),
    "both": (Mesh(data=2, tensor=2), fp.chain(TENSOR, fp.data_parallel("data")), 2),
    "pipe": (Mesh(pipe=2), fp.pipeline("pipe", microbatches=1), 4),
    "all": (
        Mesh(data=2, tensor=2, pipe=2),
        fp.chain(TENSOR, fp.zero(1, "data"), fp.pipeline("pipe", microbatches=2)),
        8,
    ),
}
DRAWS: dict[str, Any] = {"temperature": 1.3, "top_k": 20, "top_p": 0.9}


@cache
def generator_on(mesh: str, **options: Any) -> fp.Generator:
    return fp.Generator(**cached(), mesh=MESHES[mesh][0], plan=MESHES[mesh][1], **DRAWS, **options)


@cache
def alone(prompt: tuple[int, ...], key: int) -> list[int]:
    made = _single()
    found: list[int] = made(PARAMS, [list(prompt)], max_new_tokens=MOST, keys=torch.tensor([key])).tokens[0].tolist()
    return found


@cache
def _single() -> fp.Generator:
    return fp.Generator(**cached(), mesh=Mesh(data=1), **DRAWS)


@st.composite
def requests(draw: Any) -> list[tuple[int, list[int], int, int]]:
    """Requests in the order of arrival: steps before each, its prompt, new tokens, and its key."""
    prompt = st.lists(st.integers(0, 31), min_size=1, max_size=LENGTH - MOST)
    each = st.tuples(st.integers(0, 3), prompt, st.integers(1, MOST), st.integers(0, 3))
    found: list[tuple[int, list[int], int, int]] = draw(st.lists(each, max_size=9))
    return found


def check_requests(serving: fp.ContinuousBatch, arrivals: list[tuple[int, list[int], int, int]]) -> None:
    """Check a text against that of the request alone, while later requests arrive."""
    streamed, numbers = dict[int, list[int]](), dict[int, tuple[list[int], int, int]]()

    def step() -> None:
        for number, token in serving.step().items():
            streamed.setdefault(number, []).append(token)

    assert not serving.step(), "nothing to do"
    for pause, prompt, most, key in arrivals:
        for _ in range(pause):
            step()
        numbers[serving.add(prompt, max_new_tokens=most, key=torch.tensor(key))] = (prompt, most, key)
    for _ in range(200):
        step()
    assert serving.finished.keys() == numbers.keys(), "a request starves"
    for number, (prompt, most, key) in numbers.items():
        wanted = alone(tuple(prompt), key)[:most]
        assert streamed[number] == serving.finished.pop(number).tolist() == wanted
    assert not serving.step()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.every(6)
@settings(max_examples=4, deadline=None)
@given(arrivals=requests())
def test_a_request_has_its_text_whenever_others_come_and_go(mesh: str, arrivals: Any) -> None:
    check_requests(fp.ContinuousBatch(generator_on(mesh), PARAMS, rows=MESHES[mesh][2], length=LENGTH), arrivals)


MODELS: dict[str, tuple[Mesh, int]] = {"tensor": (Mesh(tensor=2), 2), "zero 3": (Mesh(data=2), 2)} | {
    "pipeline": (Mesh(pipe=2), 4)
}

PLANS: dict[str, Any] = {"zero 3": fp.zero(3, "data"), "pipeline": fp.pipeline("pipe", microbatches=2)}


def model_generator(family: str, kind: str) -> tuple[Any, fp.Generator]:
    model, (mesh, _) = model_of(family), MODELS[kind]
    if kind == "tensor":
        return model, fp.Generator(model, mesh, fp.tensor_parallel("tensor", rules.for_model(model, mesh=mesh)))
    return model, fp.Generator(model, mesh, PLANS[kind])


def model_requests() -> list[tuple[list[int], int]]:
    """Prompts and new tokens of requests of which the last begin after the clock has passed the last slot."""
    draw = torch.Generator().manual_seed(3)
    lengths = [1, 12, 3, 5, 9, 2, 7, 14, 1, 4]
    return [
        (torch.randint(3, 60, (length,), generator=draw).tolist(), 5 + number % 3)
        for number, length in enumerate(lengths)
    ]


def texts_of(family: str, kind: str) -> dict[int, list[int]]:
    model, generator = model_generator(family, kind)
    serving = fp.ContinuousBatch(generator, dict(fp.functional(model)[1]), rows=MODELS[kind][1], length=22)
    found = dict[int, list[int]]()
    for prompt, new in model_requests():
        serving.add(prompt, max_new_tokens=new)
        serving.step()
        found |= {number: serving.finished.pop(number).tolist() for number in list(serving.finished)}
    return found | {number: text.tolist() for number, text in serving.run()}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("T5", "BART")])
@pytest.mark.every(39)
def test_models_of_transformers_continue_requests(family: str, kind: str) -> None:
    wanted = [generated_by_transformers(model_of(family), [p], new)[0].tolist() for p, new in model_requests()]
    assert texts_of(family, kind) == dict(enumerate(wanted))


def test_a_free_row_stays_within_the_positions_of_the_model() -> None:
    model = model_of("GPT-2")  # which has an embedding for each of 32 positions
    serving = fp.ContinuousBatch(fp.Generator(model, Mesh(data=1)), dict(fp.functional(model)[1]), rows=2, length=20)
    wanted = generated_by_transformers(model, [[5, 6]], 18)[0].tolist()
    for _ in range(2):
        number = serving.add([5, 6])
        assert {each: text.tolist() for each, text in serving.run()} == {number: wanted}


def _on_a_rank(rank: int, kind: str) -> dict[int, list[int]]:
    torch.set_num_threads(1)
    return texts_of("Llama", kind)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.slow
def test_continuous_batchs_run_on_processes(kind: str) -> None:
    wanted = texts_of("Llama", kind)
    assert all(found == wanted for found in run_on_processes(_on_a_rank, 2, kind))


def test_the_cache_stays_in_its_memory_while_rows_come_and_move() -> None:
    model, generator = model_generator("Llama", "tensor")
    serving = fp.ContinuousBatch(generator, dict(fp.functional(model)[1]), rows=2, length=22)
    places, clocks, peak = set(), [], 0
    for prompt, new in model_requests():
        serving.add(prompt, max_new_tokens=new)
    while serving.step():
        assert serving._state is not None and serving._clock is not None
        cache = [each.shard for each in own_shards(serving._state) if each.shard.ndim == 4]
        places.add(tuple(shard.data_ptr() for shard in cache))
        clocks.append(serving._clock)
        peak = max(peak, sum(shard.nbytes for shard in cache))
    assert len(places) == 1 and peak == 2 * 2 * 2 * (2 * 32 * 8) * 4, "layers, k and v, ranks, a shard in float32"
    assert any(later < before for before, later in pairwise(clocks)), "rows moved back"
    decode = generator.programs()["decode"]
    assert sum("index_copy_" in line for line in decode.lines()) == 2 * 2 + 1, "two per layer, and the slots seen"


def test_programs_are_traced_once_per_bucket() -> None:
    traces: Counter[str] = Counter()
    f = gpt().cached_logits

    def counted(params: Any, cache: Any, tokens: Tensor, positions: Tensor) -> Any:
        rows, columns = tokens.shape
        traces[f"{rows} rows of {columns}"] += 1
        return f(params, cache, tokens, positions, gpt().Config(**CONFIG))

    plan = fp.chain(fp.zero(3, "data"))
    generator = fp.Generator(counted, Mesh(data=2), plan, cache=gpt().empty_cache, buckets=(8, 32))
    for _ in range(2):
        serving = fp.ContinuousBatch(generator, PARAMS, rows=6, length=20)
        for length in (2, 5, 1, 9, 3, 8, 4):
            serving.add([7] * length, max_new_tokens=4)
        assert len(dict(serving.run())) == 7
        assert traces == {"2 rows of 8": 1, "6 rows of 1": 1}, "prompts of at most 9 tokens"
    serving.add([7] * 12)
    assert len(dict(serving.run())) == 1
    assert traces == {"2 rows of 8": 1, "6 rows of 1": 1, "2 rows of 32": 1}, "a longer bucket, the same decode"


def test_rows_end_at_an_end_token_and_others_follow() -> None:
    end = alone((1, 2, 3), 5)[2]
    serving = fp.ContinuousBatch(generator_on("tensor", eos=end), PARAMS, rows=1, length=LENGTH)
    for _ in range(2):
        serving.add([1, 2, 3], key=torch.tensor(5))
    found = [(number, text.tolist()) for number, text in serving.run()]
    assert found == [(0, alone((1, 2, 3), 5)[:3]), (1, alone((1, 2, 3), 5)[:3])], "up to the end token"
    serving.add([4], key=torch.tensor(2))
    assert serving.step() == {2: alone((4,), 2)[0]} and not serving.finished


def test_requests_that_do_not_fit_are_refused() -> None:
    generator = generator_on("data")
    for rows, length in ((3, 20), (0, 20), (2, 1), (2, 0)):
        message = f"rows={rows}, length={length}: give rows as a multiple of 2, the data ranks · microbatches"
        with pytest.raises(ValueError, match=message):
            fp.ContinuousBatch(generator, PARAMS, rows=rows, length=length)
    serving = fp.ContinuousBatch(generator, PARAMS, rows=2, length=20)
    for prompt, named, message in (
        ([1] * 20, {}, "request 0: a prompt of 20 tokens and max_new_tokens=None; a request has a new token"),
        ([1] * 10, {"max_new_tokens": 11}, r"max_new_tokens=11; a request .* at most length=20 tokens: shorten it"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens=0; a request has a new token"),
        ([], {}, "prompt 0: .*; a prompt is a list of one or more token numbers"),
        ([1], {"key": 3}, "request 0: key=3; give an int64 scalar"),
        ([1], {"key": torch.ones(1)}, "request 0: key=tensor.*; give an int64 scalar"),
    ):
        with pytest.raises(ValueError, match=message):
            serving.add(prompt, **named)
    assert not serving.step() and not list(serving.run())


def test_models_without_rows_of_their_own_are_refused() -> None:
    model = model_of("T5")
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has an encoder, and a ContinuousBatch has rows"):
        fp.ContinuousBatch(fp.Generator(model, Mesh(data=1)), dict(fp.functional(model)[1]), rows=1, length=8)
    f, empty = cached()["fn"], gpt().empty_cache

    def counting(params: Any, cache: Any, tokens: Tensor, positions: Tensor) -> Any:
        logits, held = f(params, cache["layers"], tokens, positions)
        return logits, {"layers": held, "count": cache["count"] + 1}

    def made(params: Any, rows: int, length: int) -> Any:
        return {"layers": empty(params, rows, length), "count": torch.zeros(()).long()}

    with pytest.raises(ValueError, match="the cache has a tensor without rows at count: requests that come and go"):
        fp.ContinuousBatch(fp.Generator(counting, Mesh(data=1), cache=made), PARAMS, rows=1, length=8)


def test_a_prefill_that_fails_loses_no_request() -> None:
    def table(params: Any, cache: Any, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        x = torch.nn.functional.embedding(tokens, params)
        return x @ params.t(), cache.scatter(1, positions[..., None].expand(*positions.shape, 11), x)

    plan, empty = fp.data_parallel("data"), lambda params, rows, length: torch.zeros(rows, length, 11)
    generator = fp.Generator(table, Mesh(data=2), plan, cache=empty)
    batch = fp.ContinuousBatch(generator, torch.randn(11, 11), rows=2, length=16)
    numbers = [batch.add(prompt, max_new_tokens=2) for prompt in ([1, 2], [99, 1], [3])]
    with pytest.raises(IndexError):
        batch.step()
    assert [each.number for each in batch._waiting] == numbers
