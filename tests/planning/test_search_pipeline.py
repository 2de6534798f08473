"""The search weighs what the pipeline's programs do, to the byte, and what it finds runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import PipelineError, ScheduleError
from functional_parallel.ir import info
from functional_parallel.program.work import recompute_cost
from functional_parallel.schedules import Layer, Machine
from sharding_specs import Mesh, split

from ..pipelines.networks import SYNCHRONOUS

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import gpt


def chain_loss(params: Any, x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = x + torch.tanh(x @ layer["a"]) @ layer["b"]
    return (x**2).mean()


def chain_params(widths: list[int]) -> Any:
    return {"layers": [{"a": torch.randn(4, width), "b": torch.randn(width, 4) / width} for width in widths]}


def of_program(program: Any, kind: str, index: int) -> int:
    nodes = program.stages[index].works[kind].first.program.traced.nodes
    return sum(recompute_cost(node, program.mesh) for node in nodes)


@settings(max_examples=6)
@given(st.lists(st.sampled_from([4, 16, 64]), min_size=2, max_size=6), st.integers(1, 3), st.sampled_from([2, 6]))
def test_layers_add_up_to_the_stages_of_the_pipeline(widths: list[int], depth: int, samples: int) -> None:
    """Where the pipeline cuts between layers, a stage's times, kept values, messages and weights are theirs."""
    params, x = chain_params(widths), torch.randn(samples, 4)
    layers = fp.layer_costs(chain_loss, params, x, speed=1.0)
    plan = fp.pipeline("pipe", microbatches=1, schedule="zb-h1")
    program = fp.compile(fp.grad(plan(chain_loss)), Mesh(pipe=depth)).lower(params, x)
    ends = list(accumulate(round(samples * layer.forward) for layer in layers))
    first = 0
    for index, stage in enumerate(program.stages):
        done = sum(of_program(program, "F", earlier) for earlier in range(index + 1))
        assume(done in ends)  # the pipeline may cut at a wide place too, where that is better balanced by far
        last = ends.index(done) + 1
        own, first = layers[first:last], last
        back = sum(layer.input_gradient + layer.weight_gradient for layer in own)
        assert round(samples * back) == of_program(program, "I", index) + of_program(program, "W", index)
        kept = {name: size for layer in own for name, size in layer.kept.items()}
        residuals = [info(node).aval.nbytes for node in stage.after_forward if not info(node).backward]
        assert samples * sum(kept.values()) == sum(residuals)
        assert samples * own[-1].output == sum(info(node).aval.nbytes for node in stage.sends_forward)
        taken = {info(node).path for work in stage.works.values() for node in work.first.inputs if info(node).path}
        assert {f"0/{path}" for layer in own for path in layer.weights} == {p for p in taken if p.startswith("0/")}
    assert first == len(layers)


WITH_SEVERAL_RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "topk": lambda x: x.topk(4, -1).values,
    "sort": lambda x: x.sort(-1).values,
    "max": lambda x: x.max(-1, keepdim=True).values + x,
    "chunk": lambda x: torch.cat(x.chunk(2, -1), -1),
}


@pytest.mark.parametrize("op", WITH_SEVERAL_RESULTS)
@pytest.mark.parametrize("layers", [1, 3])
def test_of_ops_with_several_results_each_is_kept_by_itself(op: str, layers: int) -> None:
    """Of the batch alone, in the first layer, and of a stage."""

    def loss(params: Any, x: Tensor) -> Tensor:
        for weight in params:
            x = x + WITH_SEVERAL_RESULTS[op](x) @ weight
        return (x**2).mean()

    params, x = [torch.randn(4, 4, dtype=torch.float64) for _ in range(layers)], torch.randn(6, 4, dtype=torch.float64)
    plan = fp.pipeline("pipe", microbatches=1, schedule="zb-h1")
    (stage,) = fp.compile(fp.grad(plan(loss)), Mesh(pipe=1)).lower(params, x).stages
    kept = {name: size for layer in fp.layer_costs(loss, params, x) for name, size in layer.kept.items()}
    residuals = [info(node).aval.nbytes for node in stage.after_forward if not info(node).backward]
    assert len(x) * sum(kept.values()) == pytest.approx(sum(residuals))
    fp.testing.assert_equivalent(loss, plan, Mesh(pipe=layers), params, x)


def test_state_is_what_the_ranks_hold() -> None:
    """Bytes of parameters, gradients and AdamW's moments, per rank, of a training step that runs."""
    params, x = chain_params([8] * 8), torch.randn(8, 4)
    machine = Machine(ranks=4, reduce_bandwidth=1.0)
    optimizer = fp.optim.adamw(0.1)
    found = fp.search_pipeline(chain_loss, params, x, machine=machine, speed=1e9, optimizer=optimizer, names=["1f1b"])
    choice = next(each for each in found if each.plan.depth == 4)
    train = fp.train_step(chain_loss, optimizer, choice.mesh, choice.transform)
    state, _ = train(train.init(params), x)
    ranks = range(4)
    held = [sum(t.nbytes for h in state.handles if r in h.holders for t in h.parts[r] if t.ndim) for r in ranks]
    assert held == [3 * 2 * 2 * 4 * 8 * 4] * 4  # value and two moments, two layers of two matrices
    activations = max(choice.plan.timeline.peaks)
    assert choice.plan.memory == held[0] * 4 / 3 + activations + x.nbytes


@settings(max_examples=4)
@given(data=st.data())
def test_a_choice_fits_as_it_is_lowered(data: st.DataObject) -> None:
    """Batch, temporaries and messages included: what it says it holds is what the program of its training step says."""
    widths = data.draw(st.lists(st.sampled_from([4, 16]), min_size=2, max_size=4))
    params, x = chain_params(widths), torch.randn(data.draw(st.sampled_from([8, 32])), 4)
    optimizer = data.draw(st.sampled_from([fp.optim.sgd(0.1), fp.optim.adamw(0.1)]))
    inner = data.draw(st.sampled_from([None, fp.remat("nothing"), fp.mixed_precision("bf16")]))
    names = data.draw(st.sets(st.sampled_from(SYNCHRONOUS), min_size=1, max_size=2))
    ranks = data.draw(st.sampled_from([2, 4]))
    options: dict[str, Any] = {"optimizer": optimizer, "inner": inner, "names": sorted(names)}
    try:
        plans = fp.search_pipeline(chain_loss, params, x, machine=Machine(ranks), **options)
    except ScheduleError:
        assume(False)
    limit = data.draw(st.floats(1.0, 2.0)) * min(choice.plan.memory for choice in plans)
    try:
        found = fp.search_pipeline(chain_loss, params, x, machine=Machine(ranks, memory=limit), most=3, **options)
    except ScheduleError as error:
        assert re.search(r"no plan's training step fits in .* the smallest takes \d+", str(error))
        return
    assert 1 <= len(found) <= 3
    for choice in found:
        train = fp.train_step(chain_loss, optimizer, choice.mesh, choice.transform)
        assert train.lower(train.init(params), x).memory().peak == choice.memory().peak <= limit


def test_what_it_finds_runs_and_is_right() -> None:
    params, x = chain_params([8] * 4), torch.randn(8, 4)
    machine = Machine(ranks=4, latency=1e-8, bandwidth=1e9, reduce_bandwidth=1e9, overhead=1e-8)
    found = fp.search_pipeline(chain_loss, params, x, machine=machine)
    assert {choice.plan.depth for choice in found} == {1, 2, 4}
    assert [choice.plan.time for choice in found] == sorted(choice.plan.time for choice in found)
    wanted = fp.grad_and_value(chain_loss)(params, x)
    seen = set()
    for choice in found:
        if choice.plan.name in seen:
            continue
        seen.add(choice.plan.name)
        got = fp.compile(fp.grad_and_value(choice.transform(chain_loss)), choice.mesh)(params, x)
        for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(seen) > 8


def test_a_tied_weight_counts_once_where_both_its_uses_are() -> None:
    config = gpt.Config(1, 8, 2, 8, tied=True)
    params, _ = split(gpt.init(config, 0))
    tokens = torch.randint(0, 256, (4, 9))
    layers = fp.layer_costs(partial(gpt.loss, config=config), params, tokens)
    uses = [layer.weights["tokens"] for layer in layers if "tokens" in layer.weights]
    assert len(uses) == 2 and uses[0] == uses[1]

    def state(ranks: int) -> float:
        plans = fp.schedules.search(layers, Machine(ranks), 4, names=["naive"])
        plan = next(p for p in plans if p.depth == ranks and p.microbatch == 1)
        return plan.memory - max(plan.timeline.peaks)

    total = sum(leaf.nbytes for leaf in optree.tree_leaves(params))
    assert state(1) == 2 * total  # values and gradients
    assert state(2) > total  # both hold the table


def test_inner_transforms_count() -> None:
    """In bf16 half is sent; with remat less is kept and more computed."""
    params, x = chain_params([16] * 4), torch.randn(8, 4)
    plain, narrow, again = (
        fp.layer_costs(chain_loss, params, x, inner=inner)
        for inner in (None, fp.mixed_precision("bf16"), fp.remat("nothing"))
    )
    assert {layer.output for layer in narrow[1:-1]} < {8, 64} and max(layer.output for layer in plain) == 16
    assert sum(map(kept_bytes, again)) < sum(map(kept_bytes, plain))
    assert sum(layer.time for layer in again) > sum(layer.time for layer in plain)


def kept_bytes(layer: Layer) -> float:
    return sum(layer.kept.values())


def test_shapes_are_enough() -> None:
    meta = optree.tree_map(lambda leaf: leaf.to("meta"), chain_params([8] * 4))
    assert fp.layer_costs(chain_loss, meta, torch.empty(4, 4, device="meta"))


def test_what_is_refused() -> None:
    params, x = chain_params([8] * 4), torch.randn(8, 4)
    with pytest.raises(ScheduleError, match=r"no plan fits in 10 bytes per rank; the smallest takes"):
        fp.search_pipeline(chain_loss, params, x, machine=Machine(ranks=2, memory=10))
    with pytest.raises(ScheduleError, match="no schedule 'fastest'"):
        fp.search_pipeline(chain_loss, params, x, machine=Machine(ranks=2), names=["fastest"])
    with pytest.raises(ScheduleError, match=r"here it is \[6, 8\]"):
        fp.layer_costs(lambda p, b: chain_loss(p, b[0]) + b[1].sum(), params, (x, torch.ones(6)))
    with pytest.raises(ScheduleError, match="here it is missing"):
        fp.layer_costs(lambda p: p["layers"][0]["a"].sum(), params)
    with pytest.raises(ValueError, match=r"layer_costs\(speed=0\): give the flops per second"):
        fp.search_pipeline(chain_loss, params, x, machine=Machine(ranks=2), speed=0)
    with pytest.raises(ValueError, match=r"search_pipeline\(most=0\): how many choices"):
        fp.search_pipeline(chain_loss, params, x, machine=Machine(2), most=0)
    with pytest.raises(TypeError, match=r"takes an fp.schedules.Machine\(ranks=…, memory=…\), not None"):
        fp.search_pipeline(chain_loss, params, x, machine=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"takes an optimizer such as fp.optim.adamw\(1e-3\), not 'adam'"):
        fp.search_pipeline(chain_loss, params, x, machine=Machine(2), optimizer="adam")  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="no backward to pipeline"):
        fp.layer_costs(lambda p, x: (p * x).sum(), torch.arange(4), x)
