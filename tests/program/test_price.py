"""What a step will take: closed forms, laws that hold for every program, and meshes of 16,384 ranks."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.program.hardware import HARDWARE, Line, group_topology
from functional_parallel.program.work import flops
from functional_parallel.schedules.families import FAMILIES
from sharding_specs import Mesh, P, split

from ..passes import networks

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import gpt

H100 = HARDWARE["h100"]
CONFIG = gpt.Config(layers=1, embed=64, heads=8, time=16, vocab=64)


def model(config: gpt.Config = CONFIG) -> tuple[Any, Any]:
    with torch.device("meta"):
        params, specs = split(gpt.init(config))
    return params, specs


def tokens(samples: int, config: gpt.Config = CONFIG) -> torch.Tensor:
    return torch.empty(samples, config.time + 1, dtype=torch.int64, device="meta")


def chain(*plans: Any) -> Any:
    specs = model()[1]
    return fp.chain(*(fp.tensor_parallel("tensor", specs) if plan == "tensor" else plan for plan in plans))


def step(mesh: Mesh, plan: Any, samples: int | None = None, **options: Any) -> Any:
    """The program of a training step of the GPT."""
    train = fp.train_step(partial(gpt.loss, config=CONFIG), fp.optim.adamw(1e-3), mesh, plan, **options)
    return train.lower(model()[0], tokens(samples or mesh.size))


def small(mesh: Mesh, plan: Any, samples: int | None = None, **options: Any) -> Any:
    """The program of a training step of a residual network, which takes less time to make."""
    train = fp.train_step(networks.loss, fp.optim.adamw(1e-3), mesh, plan, **options)
    batch = networks.batch(samples or mesh.size, width=16)
    params = networks.parameters(2, width=16)
    return train.lower(*optree.tree_map(lambda leaf: torch.empty_like(leaf, device="meta"), (params, *batch)))


# -----------------------------------------------------------------------------
# One collective
# -----------------------------------------------------------------------------


def one(kind: str, mesh: Mesh, axes: Any, hardware: fp.Hardware = H100, size: int = 1 << 20) -> fp.Price:
    """A program of one collective, of a value of `size` bytes over the group."""
    bodies: dict[str, tuple[Callable[[Any], Any], P, P]] = {
        "psum": (lambda x: fp.psum(x, axes), P(axes), P()),
        "all_gather": (lambda x: fp.all_gather(x, axes, to="invariant"), P(axes), P()),
        "psum_scatter": (lambda x: fp.psum_scatter(x, axes), P(axes), P(axes)),
        "all_to_all": (lambda x: fp.all_to_all(x, axes, 0, 0), P(axes), P(axes)),
    }
    body, wanted, made = bodies[kind]
    elements = size // 4 * (1 if kind == "all_gather" else mesh.axis_size(axes))
    f = fp.compile(body, mesh, in_specs=wanted, out_specs=made)
    return f.lower(torch.empty(elements, device="meta")).price(hardware)


RING = replace(H100, start=0.0, links_share=1.0, ring=True)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize(("kind", "halves"), [("psum", 2), ("all_gather", 1), ("psum_scatter", 1)])
def test_within_a_host_a_collective_takes_what_a_ring_takes(kind: str, halves: int, n: int) -> None:
    """(n−1) α + (n−1)/n S β for a gather or a reduce-scatter, twice that for an all-reduce."""
    size, line = 1 << 20, RING.inside
    price = one(kind, Mesh(tensor=n), "tensor", RING, size)
    assert price.seconds == pytest.approx(halves * ((n - 1) * line.alpha + (n - 1) / n * size * line.beta), rel=1e-12)
    assert price.sent == halves * size * (n - 1) // n
    logarithmic = one(kind, Mesh(tensor=n), "tensor", replace(RING, ring=False), size)
    saved = halves * (n - 1 - math.log2(n)) * line.alpha
    assert logarithmic.seconds == pytest.approx(price.seconds - saved, rel=1e-12)


@pytest.mark.parametrize("hosts", [2, 2048])
def test_between_hosts_each_rank_carries_its_part(hosts: int) -> None:
    """Reduce-scatter inside, all-reduce of S/g between hosts, gather inside."""
    size, g, inside, between = 1 << 20, 8, RING.inside, RING.between
    expected = 2 * ((g - 1) * inside.alpha + (g - 1) / g * size * inside.beta)
    expected += 2 * ((hosts - 1) * between.alpha + (hosts - 1) / hosts * size / g * between.beta)
    price = one("psum", Mesh(data=g * hosts), "data", RING, size)
    assert price.seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("hosts", [1, 4])
def test_an_exchange_sends_each_part_once(hosts: int) -> None:
    n, size = 8 * hosts, 1 << 20
    near, far = RING.inside, RING.between
    expected = 7 * near.alpha + 7 / n * size * near.beta + (n - 8) * (far.alpha + size / n * far.beta)
    assert one("all_to_all", Mesh(data=n), "data", RING, size).seconds == pytest.approx(expected, rel=1e-12)


@given(st.data())
def test_a_groups_reach_is_what_counting_its_ranks_gives(data: st.DataObject) -> None:
    names = data.draw(st.permutations(["a", "b", "c"]))
    mesh = Mesh({name: 2 ** data.draw(st.integers(0, 3)) for name in names})
    on_each = 2 ** data.draw(st.integers(0, 4))
    axes = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    for group in mesh.groups(axes):
        found = Counter(rank // on_each for rank in group)
        assert group_topology(mesh, axes, on_each) == (found.most_common(1)[0][1], len(found))


# -----------------------------------------------------------------------------
# Volumes of the papers
# -----------------------------------------------------------------------------


def square(params: Any, x: torch.Tensor) -> torch.Tensor:
    for w in params:
        x = torch.relu(x @ w)
    return x.square().mean()


@pytest.mark.parametrize("n", [2, 8, 512])
@pytest.mark.parametrize(("stage", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_volumes_are_those_of_the_zero_paper(stage: int, times: int, n: int) -> None:
    """2Ψ(n−1)/n for DDP and ZeRO-1 and 2, 3Ψ(n−1)/n for ZeRO-3 (arXiv 1910.02054 §7), a step of training."""
    params = [torch.empty(512, 512, device="meta") for _ in range(4)]
    train = fp.train_step(square, fp.optim.sgd(0.1), Mesh(data=n), fp.zero(stage, "data"))
    price = train.lower(params, torch.empty(n, 512, device="meta")).price()
    scalars = sum(item.sent for item in price.items if item.sent < 1024)  # the loss, the norm
    volume = sum(w.nbytes for w in params)
    assert price.sent - scalars == times * volume * (n - 1) // n - (stage == 3) * params[0].nbytes * (n - 1) // n


# -----------------------------------------------------------------------------
# Laws of every program
# -----------------------------------------------------------------------------

PLANS: dict[str, Callable[[], tuple[Mesh, Any]]] = {
    "one rank": lambda: (Mesh(), None),
    "ddp": lambda: (Mesh(data=4), fp.data_parallel("data")),
    "zero 1": lambda: (Mesh(data=16), fp.zero(1, "data")),
    "zero 3": lambda: (Mesh(data=16), fp.zero(3, "data")),
    "hsdp": lambda: (Mesh(replica=4, data=8), chain(fp.zero(3, "data"), fp.data_parallel("replica"))),
    "tensor": lambda: (Mesh(data=2, tensor=8), chain("tensor", fp.zero(1, "data"))),
    "accumulate": lambda: (Mesh(data=4), chain(fp.zero(2, "data"), fp.accumulate(2))),
    "remat": lambda: (Mesh(data=4), chain(fp.remat(), fp.zero(3, "data"))),
}


@pytest.fixture(scope="module")
def programs() -> dict[str, Any]:
    """The GPT's with one rank and under tensor parallelism, the small network's under the other plans."""
    return {
        name: (step if name in ("one rank", "tensor") else small)(mesh, plan, 2 * mesh.size, clip=1.0)
        for name, (mesh, plan) in ((n, f()) for n, f in PLANS.items())
    }


@pytest.mark.parametrize("name", PLANS)
def test_a_price_says_what_its_program_does(name: str, programs: dict[str, Any]) -> None:
    program, price = programs[name], programs[name].price()
    assert price.bytes_sent() == program.bytes_sent()
    assert price.flops == sum(map(flops, program.traced.nodes)) > 0
    assert price.memory == program.memory().peak
    assert sum(1 for item in price.items if item.axes) == sum(program.counts().values())


@pytest.mark.parametrize("name", PLANS)
def test_the_parts_of_a_price_are_the_whole(name: str, programs: dict[str, Any]) -> None:
    price = programs[name].price()
    assert price.seconds == pytest.approx(price.computing + price.exposed)
    assert 0 <= price.exposed <= price.communicating * (1 + 1e-9)
    assert (price.exposed > 0) == (price.mesh.size > 1)
    assert 0 < price.utilization < H100.flops_share
    for group in ("kind", "line"):
        rows = price.rows(group)
        assert sum(row.exposed for row in rows) == pytest.approx(price.seconds)
        assert sum(row.count for row in rows) == len(price.items)
        assert all(item.exposed <= item.seconds * (1 + 1e-9) for item in price.items)


@pytest.mark.parametrize("name", ["ddp", "zero 3", "hsdp", "tensor"])
@settings(max_examples=6)
@given(st.lists(st.floats(1, 100), min_size=8, max_size=8))
def test_nothing_faster_makes_a_step_slower(name: str, programs: dict[str, Any], by: list[float]) -> None:
    better = replace(
        H100,
        flops={dtype: rate * by[0] for dtype, rate in H100.flops.items()},
        bandwidth=H100.bandwidth * by[1],
        inside=Line(H100.inside.alpha / by[2], H100.inside.beta / by[3]),
        between=Line(H100.between.alpha / by[4], H100.between.beta / by[5]),
        launch=H100.launch / by[6],
        start=H100.start / by[7],
    )
    program = programs[name]
    assert program.price(better).seconds <= program.price().seconds * (1 + 1e-9)


def test_communication_hides_behind_what_does_not_need_it() -> None:
    """With links as fast as they may be, a step takes what it computes; as slow as they may be, what they take."""
    program = step(Mesh(data=64), fp.data_parallel("data"))
    fast = replace(H100, inside=Line(0.0, 1e-30), between=Line(0.0, 1e-30), start=0.0)
    assert program.price(fast).seconds == pytest.approx(program.price(fast).computing)
    slow = program.price(replace(H100, between=Line(1e-3, 1e-6)))
    assert slow.exposed / slow.seconds > 0.9
    hidden = program.price().communicating - program.price().exposed
    assert hidden > 0  # gradients travel while others are computed


# -----------------------------------------------------------------------------
# Thousands of ranks
# -----------------------------------------------------------------------------


LARGE: dict[str, Callable[[], tuple[Mesh, Any]]] = {
    "zero 3": lambda: (Mesh(data=16384), fp.zero(3, "data")),
    "hsdp": lambda: (Mesh(replica=2048, data=8), chain(fp.zero(3, "data"), fp.data_parallel("replica"))),
    "tensor": lambda: (Mesh(data=2048, tensor=8), chain("tensor", fp.zero(1, "data"))),
    "pipeline": lambda: (
        Mesh(data=512, tensor=8, pipe=4),
        chain("tensor", fp.zero(1, "data"), fp.pipeline("pipe", schedule="gpipe", microbatches=4)),
    ),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.every(2)
def test_sixteen_thousand_ranks_are_never_listed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From function to price nobody asks the mesh for its ranks, and the program is no longer than on few of them."""
    mesh, plan = LARGE[name]()
    assert mesh.size == 16384

    def listed(*_: Any) -> Any:
        raise AssertionError("somebody lists ranks")

    for method in ("groups", "coordinates", "rank", "axis_index"):
        monkeypatch.setattr(Mesh, method, listed)
    monkeypatch.setattr(Mesh, "ranks", property(listed))
    make = small if name in ("zero 3", "hsdp") else step
    price = make(mesh, plan, 4 * 16384).price()
    few = Mesh({axis: size // 4 if size > 8 else size for axis, size in mesh.shape.items()})  # pads the same dims
    assert len(price.items) == len(make(few, plan, 4 * few.size).price().items)
    assert "16384 ranks of h100" in str(price)
    assert 0 < price.seconds < 10


def test_more_ranks_with_as_much_each_take_longer_but_by_latency_alone() -> None:
    few, many = (small(Mesh(data=n), fp.data_parallel("data"), 4 * n).price() for n in (64, 16384))
    assert few.computing == many.computing
    assert few.seconds < many.seconds
    rounds = math.log2(16384) - math.log2(64)
    collectives = sum(1 for item in many.items if item.axes)
    sent = 2 * few.sent * H100.between.beta / H100.links_share / 64
    assert many.communicating - few.communicating <= 2 * collectives * rounds * H100.between.alpha + sent


# -----------------------------------------------------------------------------
# Pipelines
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [4, 16])
def test_a_pipelines_bubble_is_that_of_the_formula(microbatches: int) -> None:
    """(p−1)/(m+p−1) of a step when stages are equal and messages take no time (GPipe, arXiv 1811.06965)."""
    params = [torch.empty(256, 256, device="meta") for _ in range(4)], torch.empty(256, device="meta")

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        weights, scale = params
        x = x * scale  # so that the first stage has a gradient of its input to compute, as all others
        for index, w in enumerate(weights):
            x = torch.relu(x @ w)
            x = fp.stage_boundary(x) if index < 3 else x
        return x.mean()

    free = replace(H100, inside=Line(0.0, 1e-30), between=Line(0.0, 1e-30), start=0.0, launch=0.0)
    only_products = replace(free, bandwidth=1e30)
    plan = fp.pipeline("pipe", schedule="gpipe", microbatches=microbatches)
    f = fp.compile(fp.grad_and_value(plan(loss)), Mesh(pipe=4))
    price = f.lower(params, torch.empty(64 * microbatches, 256, device="meta")).price(only_products)
    assert price.idle / price.seconds == pytest.approx(3 / (microbatches + 3), rel=1e-6)
    assert price.seconds == pytest.approx(price.computing + price.idle)


def test_a_pipelines_rank_does_what_is_listed() -> None:
    mesh, plan = Mesh(data=2, pipe=2), chain(fp.zero(1, "data"), fp.pipeline("pipe", schedule="1f1b", microbatches=4))
    program = small(mesh, plan, 32)
    price = program.price()
    assert price.seconds == pytest.approx(price.computing + price.exposed + price.idle)
    assert {item.what for item in price.items} >= {"products", "send", "psum", "idle"}
    assert price.sent < sum(program.bytes_sent().values())  # one rank of two
    assert "which works longest" in str(price)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_schedule_has_a_price(family: str) -> None:
    """Asynchronous ones and those with two chains too."""
    params = [torch.empty(64, 64, device="meta") for _ in range(4)]

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for w in params:
            x = torch.tanh(x @ w)
        return x.square().mean()

    plan = fp.pipeline("pipe", schedule=family, microbatches=4)
    price = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(pipe=2), plan).lower(params, torch.empty(64, 64)).price()
    assert price.seconds == pytest.approx(price.computing + price.exposed + price.idle)
    assert 0 < price.idle < price.seconds


def test_a_step_is_priced_without_a_state() -> None:
    """`lower` takes parameters, on the meta device too, and what it says is what a state would say."""
    params, batch = networks.parameters(2), networks.batch(4)
    made = [fp.train_step(networks.loss, fp.optim.adamw(1e-3), Mesh(data=2), fp.zero(3, "data")) for _ in range(2)]
    with_state = made[0].lower(made[0].init(params), *batch)
    assert made[1].lower(params, *batch).lines() == with_state.lines()


# -----------------------------------------------------------------------------
# Published
# -----------------------------------------------------------------------------


@pytest.mark.parametrize(("sequence_parallel", "published"), [(False, 1.42), (True, 1.10)])
def test_a_published_step_is_near_its_price(sequence_parallel: bool, published: float) -> None:
    """A GPT of 22 billion parameters on 8 A100s, 4 samples of 2048 tokens, everything recomputed or sequence-parallel
    (Korthikanti et al., arXiv 2205.05198, table 5). A price knows of no dropout, and its attention is one kernel.
    """

    def seconds(layers: int) -> float:
        config = gpt.Config(layers, 6144, 64, 2048, 51200, sequence_parallel, tied=True)
        params, specs = model(config)
        parts = [] if sequence_parallel else [fp.remat()]
        plan = fp.chain(*parts, fp.mixed_precision("bf16"), fp.tensor_parallel("tensor", specs))
        train = fp.train_step(partial(gpt.loss, config=config), fp.optim.adamw(1e-3), Mesh(tensor=8), plan)
        return float(train.lower(params, tokens(4, config)).price("a100").seconds)

    one, two = seconds(1), seconds(2)
    priced = one + 47 * (two - one)
    print(f"priced {priced:.3f} s, published {published} s")
    assert 0.75 < priced / published < 1.1


# -----------------------------------------------------------------------------
# Errors and text
# -----------------------------------------------------------------------------


def test_unknown_hardware_says_what_is_known() -> None:
    program = small(Mesh(data=2), fp.data_parallel("data"))
    with pytest.raises(ValueError, match=r"no hardware is known as 'abacus', only 'h100', 'a100', 'v100'; or describe"):
        program.price("abacus")
    with pytest.raises(TypeError, match=r"hardware known by name, such as 'h100', or an fp.Hardware\(…\), not None"):
        program.price(None)
    with pytest.raises(ValueError, match=r"price\.rows\(group='day'\): it is 'kind' or 'line'"):
        program.price().rows("day")


@pytest.mark.parametrize("wrong", [{"bandwidth": 0.0}, {"ranks_per_host": 0}, {"flops": {}}, {"links_share": -1.0}])
def test_rates_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Hardware 'h100': rates are positive, not"):
        replace(H100, **wrong)


def test_what_does_not_fit_is_said() -> None:
    price = small(Mesh(data=2), fp.data_parallel("data")).price(replace(H100, capacity=1000))
    assert "note: that is more than the 1000 B that a rank has" in str(price)
    assert price.to_dict()["memory"] == price.memory


@pytest.mark.parametrize(
    "plan", [fp.zero(1, "data"), fp.zero(3, "data"), fp.chain(fp.zero(2, "data"), fp.accumulate(2))], ids=repr
)
def test_a_price_and_a_table_name_the_same_phases(plan: Any) -> None:
    """What the optimizer sends is no part of a forward."""
    train = fp.train_step(lambda w, x: (x @ w).square().mean(), fp.optim.adamw(0.1), Mesh(data=2), plan, clip=1.0)
    program = train.lower(torch.empty(4, 4, device="meta"), torch.empty(4, 4, device="meta"))
    told = {(row.kind, row.phase) for row in program.explain(group="axis").rows}
    assert told == {(item.what, item.phase) for item in program.price("h100").items if item.axes}
    assert ("psum", "update") in told  # of the norm
    assert (("all_gather", "update") in told) == ("zero(3" not in repr(plan))


@pytest.mark.parametrize(("rate", "shown"), [(48e9, "48 GFLOP/s"), (0.4e12, "400 GFLOP/s"), (1.5e12, "1.5 TFLOP/s")])
def test_a_slow_rank_has_a_rate_above_zero(rate: float, shown: str) -> None:
    text = str(replace(H100, flops={torch.float32: rate}, bandwidth=0.2e9, capacity=500 * 10**6))
    assert f"h100: {shown}, 500 MB at 200 MB/s;" in text
    assert "80 GB at 3350 GB/s" in str(H100) and "989 TFLOP/s" in str(H100)
