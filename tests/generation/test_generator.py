"""Programs, memory, layouts and calls of a generator, with the GPT of the examples."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from threading import Barrier
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.ir import info
from sharding_specs import Mesh, P, split

from .models import CONFIG, cached, forward, gpt, parameters

PARAMS, SPECS = parameters()
TENSOR = fp.tensor_parallel("tensor", SPECS)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]
BOTH = (Mesh(data=2, tensor=2), fp.chain(TENSOR, fp.zero(3, "data")))


def greedy(prompt: list[int], new: int) -> list[int]:
    """The text by full forwards, one token after another."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(forward(PARAMS, torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def generator(mesh: Mesh = BOTH[0], plan: Any = BOTH[1], **options: Any) -> fp.Generator:
    return fp.Generator(**cached(), mesh=mesh, plan=plan, **options)


@cache
def shared() -> fp.Generator:
    """That of `BOTH`, whose programs several tests use."""
    return generator()


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    return [greedy(prompt, 12) for prompt in PROMPTS]


def test_text_is_that_of_full_forwards(wanted: list[list[int]]) -> None:
    made = shared()
    assert made(PARAMS, PROMPTS, max_new_tokens=12).tokens.tolist() == wanted
    assert made(PARAMS, PROMPTS[2:3], max_new_tokens=5).tokens.tolist() == [wanted[2][:5]], "a row beside padding rows"


def test_each_program_is_traced_once_per_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: Counter[str] = Counter()
    f = gpt().cached_logits

    def counted(params: Any, cache: Any, tokens: Tensor, positions: Tensor) -> Any:
        traces[f"{tokens.shape[1]} of {cache[0][0].shape[2]}"] += 1
        return f(params, cache, tokens, positions, gpt().Config(**CONFIG))

    made = fp.Generator(counted, Mesh(data=2), fp.zero(3, "data"), cache=gpt().empty_cache)
    made(PARAMS, PROMPTS, max_new_tokens=100)
    assert traces == {"16 of 128": 1, "1 of 128": 1}
    made(optree.tree_map(lambda x: x * 2, PARAMS), [[7] * 9, [3], [4, 5]], max_new_tokens=100)
    assert traces == {"16 of 128": 1, "1 of 128": 1}, "other parameters and prompts"
    made(PARAMS, [[7] * 18] * 4, max_new_tokens=90)
    assert traces == {"16 of 128": 1, "1 of 128": 1, "32 of 128": 1}, "longer prompts, the same cache"


def test_threads_share_the_programs_of_a_generator(wanted: list[list[int]]) -> None:
    traces, f = Counter[int](), gpt().cached_logits

    def counted(params: Any, cache: Any, tokens: Tensor, positions: Tensor) -> Any:
        traces[tokens.shape[1]] += 1
        return f(params, cache, tokens, positions, gpt().Config(**CONFIG))

    made, start = fp.Generator(counted, Mesh(data=1), cache=gpt().empty_cache), Barrier(4)

    def work(number: int) -> list[list[int]]:
        start.wait()
        found: list[list[int]] = made(PARAMS, PROMPTS[number:] + PROMPTS[:number], max_new_tokens=12).tokens.tolist()
        return found

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(work, range(4)))
    assert found == [wanted[number:] + wanted[:number] for number in range(4)]
    assert traces == {16: 1, 1: 1}


def test_the_cache_is_laid_out_like_keys_and_written_in_place() -> None:
    made = shared()
    made(PARAMS, PROMPTS, max_new_tokens=2)
    program = made.programs()["decode"]
    cache = [info(node) for node in program.traced.inputs if info(node).path.startswith("1/cache")]
    specs = [spec for path, spec in zip(program.in_paths, program.in_specs, strict=True) if path.startswith("1/cache")]
    assert specs == [P("data", "tensor")] * 4 and all(known.donated for known in cache)
    kinds = Counter(str(node.target) for node in program.traced.nodes if "scatter" in str(node.target))
    assert kinds == {"aten.scatter_.src": 2 * CONFIG["layers"]}


def test_the_peak_is_parameters_and_cache() -> None:
    options: Any = {"layers": 2, "embed": 64, "heads": 4, "vocab": 64}
    config = gpt().Config(**options)
    params, _ = split(gpt().init(config))
    f = partial(gpt().cached_logits, config=config)
    made = fp.Generator(f, Mesh(data=2), fp.zero(3, "data"), cache=gpt().empty_cache, buckets=(16, 1024))
    made(params, PROMPTS, max_new_tokens=2)
    program = made.programs()["decode"]
    held = sum(x.numel() * x.element_size() for x in optree.tree_leaves(params))
    cache = 2 * config.layers * len(PROMPTS) // 2 * config.embed * 1024 * 4
    assert held + cache < program.memory().peak < 1.05 * (held + cache)


@pytest.mark.parametrize(("mesh", "plan"), [(Mesh(data=2), [fp.zero(3, "data")]), (Mesh(tensor=2), [TENSOR])])
def test_mixed_precision_holds_parameters_and_cache_in_its_dtype(mesh: Mesh, plan: list[Any]) -> None:
    config = gpt().Config(layers=2, embed=64, heads=4, vocab=64)
    params, _ = split(gpt().init(config))
    f, plan = partial(gpt().cached_logits, config=config), [fp.mixed_precision("bf16"), *plan]
    made = fp.Generator(f, mesh, fp.chain(*plan), cache=gpt().empty_cache, buckets=(16, 1024))
    made(params, PROMPTS, max_new_tokens=2)
    program = made.programs()["decode"]
    dtypes = {info(node).aval.dtype for node in program.traced.inputs if info(node).aval.dtype.is_floating_point}
    assert dtypes == {torch.bfloat16}
    assert sum(" = scatter_" in line for line in program.lines()) == 2 * config.layers
    rows, ways = (2, 1) if "data" in mesh.axis_names else (4, 2)
    held = sum(info(node).aval.nbytes for node in program.traced.inputs if info(node).path.startswith("0/"))
    cache = 2 * config.layers * rows * config.embed // ways * 1024 * 2
    assert held <= sum(x.numel() for x in optree.tree_leaves(params)) * 2
    assert held + cache < program.memory().peak < 1.05 * (held + cache)


def test_parameters_of_any_kind_are_cast_once() -> None:
    mesh, plan = Mesh(data=2), fp.chain(fp.mixed_precision("bf16", keep="norm"), fp.zero(3, "data"))
    params = parameters(torch.float32)[0]
    train = fp.train_step(partial(gpt().loss, config=gpt().Config(**CONFIG)), fp.optim.sgd(0.0), mesh, plan)
    held = fp.Sharded.of(params, mesh, optree.tree_map(lambda x: P("data") if x.ndim > 1 else P(), params))
    made = generator(mesh, plan)
    texts = [made(each, PROMPTS, max_new_tokens=6).tokens.tolist() for each in (params, held, train.init(params))]
    assert texts[0] == texts[1] == texts[2]
    program = made.programs()["decode"]
    known = {info(node).path: info(node).aval.dtype for node in program.traced.inputs}
    assert known["0/norm"] is torch.float32 and known["0/head"] is known["1/cache/0/0"] is torch.bfloat16
    drift = fp.testing.same_logits(
        fp.compile(plan(forward), mesh), made, params, torch.randint(0, 32, (2, 8)), tolerance=1e9
    )
    assert drift < 0.05 * float(forward(params, torch.arange(8)[None]).std())


def test_each_stage_peaks_at_its_parameters_and_cache() -> None:
    config = gpt().Config(layers=2, embed=64, heads=4, vocab=64)
    params, _ = split(gpt().init(config))
    f = partial(gpt().cached_logits, config=config)
    plan = fp.pipeline("pipe", microbatches=2)
    made = fp.Generator(f, Mesh(pipe=2), plan, cache=gpt().empty_cache, buckets=(16, 1024))
    program = made.lower(params, rows=4, prompt=9, max_new_tokens=900)["decode"]
    nodes = list(zip(program.in_paths, program.inputs, strict=True))
    shapes = dict(zip((path for path, _ in nodes), map(info, program.inputs), strict=True))
    for rank, memory in enumerate(program.memory().ranks):
        mine = [path for path, node in nodes if rank in program.holders(node)]
        held = sum(shapes[path].aval.nbytes for path in mine if path.startswith("0/"))
        cache = 2 * 4 * config.embed * 1024 * 4
        assert held + cache < memory.peak < 1.05 * (held + cache)
    lines = [line for program in program.every_program() for line in program.lines()]
    assert sum(" = scatter_" in line for line in lines) == 2 * config.layers


def test_parameters_of_zero_3_are_gathered_once() -> None:
    made = shared()
    made(PARAMS, PROMPTS, max_new_tokens=2)
    assert made.programs()["decode"].counts() == {
        ("psum", ("tensor",)): 2 * CONFIG["layers"] + 1,
        ("all_gather", ("tensor",)): 1,
    }


def test_parameters_come_from_a_step_or_the_ranks(wanted: list[list[int]]) -> None:
    mesh, plan = BOTH
    made = shared()

    def loss(params: Any, tokens: Tensor) -> Tensor:
        found: Tensor = gpt().loss(params, tokens, gpt().Config(**CONFIG))
        return found

    train = fp.train_step(loss, fp.optim.sgd(0.0), mesh, plan)
    state = train.init(PARAMS)
    held = fp.Sharded.of(PARAMS, mesh, optree.tree_map(lambda x: P(), PARAMS))
    for params in (state, train.sharded(state)[0], train.frozen(state), held):
        assert made(params, PROMPTS, max_new_tokens=12).tokens.tolist() == wanted
    state, _ = train(state, torch.randint(0, 32, (4, 9)))
    assert made(state, PROMPTS, max_new_tokens=12).tokens.tolist() == wanted, "after a step with rate 0"


def test_tokens_stream_and_rows_end(wanted: list[list[int]]) -> None:
    steps = shared().stream(PARAMS, PROMPTS, max_new_tokens=12)
    first, second = next(steps), next(steps)
    assert torch.stack([first, second], 1).tolist() == [row[:2] for row in wanted]
    end = wanted[0][4]
    found = generator(eos=end, pad=31, look_every=2)(PARAMS, PROMPTS, max_new_tokens=12)
    lengths = [row.index(end) + 1 if end in row else 12 for row in wanted]
    assert found.lengths.tolist() == lengths
    assert [row.tolist() for row in found.rows()] == [row[:n] for row, n in zip(wanted, lengths, strict=True)]
    assert all((row[n:] == 31).all() for row, n in zip(found.tokens, lengths, strict=True))


def test_generation_stops_when_all_rows_have_ended(wanted: list[list[int]]) -> None:
    steps = list(generator(eos=wanted[1][1], look_every=3).stream(PARAMS, PROMPTS[1:2], max_new_tokens=12))
    assert len(steps) == 3


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mesh", [Mesh(pipe=2), Mesh(data=2, pipe=2)])
def test_stages_hold_their_layers(mesh: Mesh, microbatches: int, wanted: list[list[int]]) -> None:
    zero = [fp.zero(3, "data")] if "data" in mesh.axis_names else []
    made = generator(mesh, fp.chain(*zero, fp.pipeline("pipe", microbatches=microbatches)))
    assert made(PARAMS, PROMPTS, max_new_tokens=12).tokens.tolist() == wanted
    program = made.programs()["decode"]
    holders = {path: program.holders(node) for path, node in zip(program.in_paths, program.inputs, strict=True)}
    assert [holders[f"1/cache/{layer}/0"] for layer in range(2)] == [{0}, {1}]
    assert [holders[f"0/blocks/{layer}/k"] for layer in range(2)] == [{0}, {1}]


@pytest.mark.parametrize("plan", [fp.chain(fp.remat(), fp.zero(3, "data"), fp.accumulate(2)), fp.zero(2, "data")])
def test_transforms_of_training_alone_are_left_out(plan: Any, wanted: list[list[int]]) -> None:
    assert generator(Mesh(data=2), plan)(PARAMS, PROMPTS, max_new_tokens=12).tokens.tolist() == wanted


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'forward' is a function without a cache of keys and values: give cache="):
        fp.Generator(forward, Mesh(data=1))
    with pytest.raises(ValueError, match=r"buckets=\(64, 32\): give ascending lengths"):
        generator(buckets=(64, 32))
    for options, text in (
        ({"eos": "a"}, "eos='a', pad=0: an end token or several, and a padding token, are numbers from 0"),
        ({"eos": [1, 2.5]}, r"eos=\[1, 2.5\], pad=0"),
        ({"pad": None}, "eos=None, pad=None"),
        ({"pad": -1}, "eos=None, pad=-1"),
    ):
        with pytest.raises(ValueError, match=text):
            generator(**options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"plan='zero3': give a transform such as fp.zero\(3, 'data'\)"):
        generator(plan="zero3")
    with pytest.raises(
        TypeError, match=r"Generator takes a sharding_specs.Mesh, not str: write Mesh.parse\('data=1'\)"
    ):
        generator(mesh="data=1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="look_every=0: it is a number of steps"):
        generator(look_every=0)
    with pytest.raises(ValueError, match=r"local_sgd\(.*leaves ranks with different parameters"):
        generator(Mesh(data=2), fp.local_sgd("data", inner=2))(PARAMS, PROMPTS, max_new_tokens=1)
    made = generator(buckets=(8, 16))
    for prompts, new, message in (
        ([], 1, "there are no prompts"),
        ("text", 1, "prompts='text': give a list with the tokens of each row, such as tokenizer"),
        (["some", "texts"], 1, "prompt 0 is 'some': give a list with the tokens of each row"),
        (None, 1, "prompts=NoneType: give a list"),
        ([5, 6], 1, r"prompt 0: \(\) int64; a prompt is a list"),
        (torch.zeros(2, 0).long(), 1, r"prompt 0: \(0,\) int64; a prompt is a list of one or more token numbers"),
        ([[3], [4, -1]], 1, "prompt 1 has token -1: tokens are numbers from 0; leave padding out"),
        ([[1], []], 1, "prompt 1: .*; a prompt is a list of one or more token numbers"),
        ([[1.5]], 1, r"prompt 0: \(1,\) float32; a prompt is a list"),
        (torch.ones(3, dtype=torch.int64), 1, r"prompts of shape \(3,\): give rows of tokens"),
        ([[1]], 0, "max_new_tokens=0: it is a number of tokens, 1 or more"),
        ([[1] * 18], 1, "a prompt of 17 tokens is longer than the longest bucket, 16"),
        ([[1] * 7], 10, "a cache of 18 tokens is longer than the longest bucket, 16"),
    ):
        with pytest.raises(ValueError, match=message):
            made(PARAMS, prompts, max_new_tokens=new)
    for keys, message in (
        (torch.arange(1), r"keys of 2 prompts: torch.int64 \(1,\); give an int64 tensor with a key per row"),
        (torch.arange(3), r"keys of 2 prompts: torch.int64 \(3,\)"),
        (torch.ones(2), r"keys of 2 prompts: torch.float32 \(2,\)"),
        (torch.ones(2).int(), r"keys of 2 prompts: torch.int32 \(2,\)"),
        ([1, 2], "keys of 2 prompts: list; give an int64 tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            generator(temperature=1.0)(PARAMS, PROMPTS[:2], max_new_tokens=1, keys=keys)
    with pytest.raises(ValueError, match=r"seed=1\.5: it is an integer, of which each row has a key; or give keys"):
        made(PARAMS, PROMPTS[:2], max_new_tokens=1, seed=1.5)  # type: ignore[arg-type]
