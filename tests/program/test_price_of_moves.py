"""Moves of a price: they run beside computation, one after another on each link, as on processes; and the picture."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel import Hardware, Line
from functional_parallel.program import Item, Price
from sharding_specs import Mesh, P

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import step_picture

H100 = Hardware.named("h100")
SIZE = 512


def product(moved_early: bool) -> Price:
    def f(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        first = fp.to_memory(a, "device")
        second = fp.to_memory(b, "device") if moved_early else None
        y = x @ first
        return y @ (fp.to_memory(b, "device") if second is None else second)

    on_host = P(memory="host")
    step = fp.compile(f, Mesh(), in_specs=(on_host, on_host, P()), out_specs=P())
    return step.lower(*(torch.empty(SIZE, SIZE, device="meta") for _ in range(3))).price(H100)


def times(price: Price) -> tuple[list[float], list[float]]:
    moves = [item.seconds for item in price.items if item.is_move]
    return moves, [item.seconds for item in price.items if not item.is_move]


def test_a_move_runs_beside_what_does_not_need_it() -> None:
    early, late = product(moved_early=True), product(moved_early=False)
    for price in (early, late):
        assert [item.lane for item in price.items].count("host → device") == 2
    (m1, m2), (c1, c2) = times(early)
    assert early.seconds == pytest.approx(m1 + max(m2, c1) + c2)
    assert late.seconds == pytest.approx(m1 + c1 + m2 + c2), "the device's stream runs to the move first"
    assert early.moving == late.moving == pytest.approx(m1 + m2)


@cache
def on_disk() -> fp.Program:
    layers = [torch.empty(256, 256, device="meta") for _ in range(4)]
    away = fp.offload(state="disk", parameters="disk", path=tempfile.gettempdir(), group="256KiB")
    plan = fp.chain(fp.remat(), fp.mixed_precision("bf16"), fp.zero(3, "data"), away)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for w in params["layers"]:
            x = x + torch.tanh(x @ w)
        return x.square().mean()

    train = fp.train_step(loss, fp.optim.adamw(1e-3), Mesh(data=4), plan)
    found = train.lower({"layers": layers}, torch.empty(4096, 256, device="meta"))
    assert isinstance(found, fp.Program)
    return found


def on_lanes(price: Price) -> dict[str, list[Item]]:
    lanes = defaultdict(list)
    for item in price.items:
        lanes[item.lane].append(item)
    return {lane: sorted(items, key=lambda item: item.start) for lane, items in lanes.items()}


def test_each_lane_runs_one_thing_at_a_time() -> None:
    price = on_disk().price(H100)
    lanes = on_lanes(price)
    assert lanes.keys() == {f"{a} → {b}" for a, b in on_disk().bytes_moved()} | {"device", "host", "between ranks"}
    for lane, items in lanes.items():
        assert all(a.end <= b.start for a, b in itertools.pairwise(items)), lane
        assert sum(item.seconds for item in items) <= price.seconds * (1 + 1e-9)
    assert max(item.end for item in price.items) == price.seconds < sum(item.seconds for item in price.items)
    assert sum(item.exposed for item in price.items) == pytest.approx(price.seconds)
    assert all(0 <= item.exposed <= item.seconds * (1 + 1e-9) for item in price.items)
    layers = {path for item in lanes["host → disk"] for path in item.parameters}
    assert all("layers/" in path for path in layers), "a stored value is named by the state that it replaces"


def test_an_update_names_its_phase() -> None:
    """Also where groups of it run within the backward."""
    state = [item for item in on_disk().price(H100).items if item.lane == "host → disk"]
    assert state and {item.phase for item in state} == {"update"}
    reads = {item.phase for item in on_disk().price(H100).items if item.lane == "disk → host"}
    assert reads == {"forward", "backward", "update"}
    moved = sum(item.moved for item in on_disk().price(H100).items if item.phase == "forward" and item.is_move)
    assert moved == 2 * 2 * 4 * 256 * 256 // 4, "parameters in bfloat16, over both links"


def test_links_are_hidden_or_all_there_is() -> None:
    nothing = Line(0.0, 1e-30)
    fast = on_disk().price(replace(H100, host=nothing, disk=nothing))
    assert sum(item.exposed for item in fast.items if item.is_move) < 1e-9 * fast.seconds
    slow = on_disk().price(replace(H100, disk=Line(1.0, 1e-9)))
    assert sum(item.exposed for item in slow.items if item.is_move) > 0.9 * slow.seconds


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(1, 1000), min_size=6, max_size=6))
def test_nothing_faster_makes_a_step_slower(by: list[float]) -> None:
    better = replace(
        H100,
        bandwidth=H100.bandwidth * by[0],
        host_bandwidth=H100.host_bandwidth * by[1],
        host=Line(H100.host.alpha / by[2], H100.host.beta / by[3]),
        disk=Line(H100.disk.alpha / by[4], H100.disk.beta / by[5]),
    )
    assert on_disk().price(better).seconds <= on_disk().price(H100).seconds * (1 + 1e-9)


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(step_picture, "LAYERS", 2)
    step_picture.main(["--out", str(tmp_path / "step.svg")])
    text = (tmp_path / "step.svg").read_text()
    for word in ("disk → host", "between ranks", "device → host", "host → disk", "forward", "update", "busy", "ms"):
        assert f"<!-- {word} -->" in text or f"<!-- {word}" in text, word


def test_a_pipeline_is_drawn_elsewhere(tmp_path: Path) -> None:
    plan = fp.pipeline("pipe", microbatches=2)
    step = fp.compile(fp.grad_and_value(plan(lambda p, x: ((x @ p[0]) @ p[1]).square().sum())), Mesh(pipe=2))
    price = step.lower([torch.empty(4, 4, device="meta")] * 2, torch.empty(4, 4)).price()
    with pytest.raises(ValueError, match=r"a pipeline is drawn by fp\.schedules\.plot"):
        price.draw(tmp_path / "step.png")
