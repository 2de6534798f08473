"""Stages given by paths, as a device map has them: parameters lie there, and values are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.errors import PipelineError
from sharding_specs import Mesh

from ..models.families import loss_of, made
from .networks import residuals


def exact(layers: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    made = [torch.randint(-1, 2, (3, 3), generator=draw).double() for _ in range(2 * layers + 1)]
    return {"layers": [{"w": made[2 * i], "skip": made[2 * i + 1]} for i in range(layers)], "table": made[-1]}


def network(params: Any, x: torch.Tensor) -> torch.Tensor:
    """Exact on integers. The table is used first and last."""
    x = x @ params["table"]
    for layer in params["layers"]:
        x = x @ layer["skip"] + torch.relu(x @ layer["w"])
    return (x @ params["table"]).sum()


@settings(max_examples=2, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=3), st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
def test_layers_lie_on_their_stages_with_the_values_of_one_device(drawn: list[int], schedule: str) -> None:
    stages = sorted([0, 1, 2, *drawn])
    params, x = exact(len(stages)), torch.arange(12.0, dtype=torch.float64).reshape(4, 3) - 6
    places = {"table": 0, **{f"layers/{layer}": stage for layer, stage in enumerate(stages)}}
    plan = fp.pipeline("pipe", microbatches=2, schedule=schedule, stages=places)
    step = fp.compile(fp.grad_and_value(plan(network)), Mesh(pipe=3))
    grads, value = step(params, x)
    expected = torch.func.grad_and_value(network)(params, x)
    torch.testing.assert_close((grads, value), expected, rtol=0, atol=0)
    program = step.program
    held = {path: program.holders(node) for path, node in zip(program.in_paths, program.inputs, strict=True)}
    for layer, stage in enumerate(stages):
        assert held[f"0/layers/{layer}/w"] == held[f"0/layers/{layer}/skip"] == {stage}
    assert held["0/table"] == {0, 2}, "a tied weight is on the stages that use it"
    assert fp.Plan.from_json(plan.to_json()).transforms == (plan,)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["BART", "GPT-2", "BERT", "T5", "ViT"])
def test_a_device_map_of_several_devices_is_a_pipeline(family: str) -> None:
    """BART names the first norm of its encoder after the layers, so this norm alone changes its stage."""
    model, batch = made(family)
    moved = "encoder.layernorm_embedding" if family == "BART" else ""
    loss, params = loss_of(model, True)
    whole = sum(each.numel() * each.itemsize for each in model.parameters())
    found = fp.device_map(model, {0: whole * 11 // 20, 1: whole})
    step = fp.compile(
        fp.grad_and_value(fp.pipeline("pipe", microbatches=2, stages=found.stages)(loss)),
        Mesh(pipe=len(found.devices)),
    )
    grads, value = step(params, batch)
    torch.testing.assert_close((grads, value), torch.func.grad_and_value(loss)(params, batch), rtol=1e-12, atol=1e-14)
    program = step.program
    notes = "".join(note for note in program.notes if "other stages" in note)
    assert moved in notes and bool(notes) == bool(moved)
    for rank, memory in enumerate(program.memory().ranks):
        held = {path_of(node) for node in program.inputs if rank in program.holders(node)} & params.keys()
        mapped = {name for name in params if found.memories[name] == found.devices[rank]}
        assert all((moved and moved in name) or is_tied(model, name) for name in held ^ mapped)
        assert memory.alive["parameters"] == sum(params[name].nbytes for name in held)


def is_tied(model: Any, name: str) -> bool:
    names = dict(model.named_parameters(remove_duplicate=False))
    return sum(each is names[name] for each in names.values()) > 1


def path_of(node: Any) -> str:
    from functional_parallel.ir import info

    return str(info(node).param_path)


def test_a_parameter_that_is_used_earlier_than_its_stage_is_moved_and_noted() -> None:
    params = exact(4)
    plan = fp.pipeline("pipe", microbatches=2, stages={"layers/0-1": 0, "*": 1})
    program = fp.compile(fp.grad(plan(network)), Mesh(pipe=2)).lower(params, torch.ones(4, 3, dtype=torch.float64))
    held = {path: program.holders(node) for path, node in zip(program.in_paths, program.inputs, strict=True)}
    assert held["0/layers/1/w"] == {0} and held["0/layers/2/w"] == {1} and held["0/table"] == {0, 1}
    params["first"] = params.pop("table")
    by_name = fp.pipeline("pipe", microbatches=2, stages={"layers/0-1": 0, "*": 1})(
        lambda params, x: network({**params, "table": torch.eye(3).double()}, x @ params["first"])
    )
    program = fp.compile(fp.grad(by_name), Mesh(pipe=2)).lower(params, torch.ones(4, 3, dtype=torch.float64))
    assert program.notes[-1] == "used on other stages than theirs: first (stage 1)"


def test_the_cut_is_before_a_layer_whose_first_ops_have_no_weights() -> None:
    """One value crosses: the layer's input. A cut at its first weight would send its half-done norm too."""

    def f(params: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in params["layers"]:
            normed = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1)
            x = x + normed * layer["scale"] @ layer["w"]
        return (x * x).sum()

    layers = [{"scale": torch.ones(4), "w": torch.eye(4)} for _ in range(4)]
    plan = fp.pipeline("pipe", microbatches=2, stages={"layers/0-2": 0, "layers/3": 1})
    program = fp.compile(fp.grad(plan(f)), Mesh(pipe=2)).lower({"layers": layers}, torch.ones(4, 4))
    assert len(program.stages[0].sends_forward) == 1


@pytest.mark.parametrize("stages", [{"layers/*": 0}, {"layers/0": 0, "layers/*": 2}, {"table": 1}, {"layer": 0}])
def test_stages_without_parameters_are_an_error(stages: dict[str, int]) -> None:
    step = fp.compile(fp.grad(fp.pipeline("pipe", microbatches=2, stages=stages)(network)), Mesh(pipe=2))
    with pytest.raises(
        PipelineError, match=r"the schedule has 2 stages, and .* every stage from 0 to 1 must have some"
    ):
        step(exact(3), torch.ones(4, 3, dtype=torch.float64))


def test_text_is_generated_on_the_stages_of_a_map() -> None:
    model = made("Llama")[0].to(torch.float32).eval()
    fn, params = fp.functional(model)
    whole = sum(each.numel() * each.itemsize for each in model.parameters())
    found = fp.device_map(model, {0: whole * 4 // 5, 1: whole})
    plan = fp.pipeline("pipe", microbatches=1, stages=found.stages)
    prompts = [[1, 2, 3], [4, 5]]
    texts = [
        fp.generate(fn, params, prompts, mesh, plan, max_new_tokens=2)
        for mesh, plan in ((Mesh(pipe=2), plan), (Mesh(data=1), fp.data_parallel("data")))
    ]
    assert torch.equal(texts[0].tokens, texts[1].tokens)


def test_the_bits_are_those_of_the_same_microbatches_on_one_rank() -> None:
    torch.manual_seed(0)
    layers = [{"w": torch.randn(4, 4), "b": torch.randn(4)} for _ in range(5)]
    params, x = {"layers": layers}, torch.randn(6, 4)
    piped = fp.pipeline("pipe", microbatches=3, stages={"layers/0-3": 0, "layers/4": 1})
    alone = fp.chain(fp.data_parallel("data"), fp.accumulate(3))
    found = []
    for mesh, plan in ((Mesh(pipe=2), piped), (Mesh(data=1), alone)):
        train = fp.train_step(residuals, fp.optim.adamw(0.1), mesh, plan, reduction="ordered")
        state = train.init(params)
        for _ in range(3):
            state, _ = train(state, x)
        found.append(train.params(state))
    torch.testing.assert_close(*found, rtol=0, atol=0)
