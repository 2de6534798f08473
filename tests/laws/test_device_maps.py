"""Unmodified models of transformers under a device map have the bits of the run without, and hold what the map says."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, SpecError

from ..models.families import loss_of, made

ALONE = fp.data_parallel("data")


def with_map(model: Any, *shares: float, host: float = 1.0) -> Any:
    whole = sum(each.nbytes for each in model.parameters())
    devices = dict(enumerate(shares)) if len(shares) > 1 else {"device": shares[0]}
    return fp.device_map(model, {name: int(share * whole) for name, share in (devices | {"host": host}).items()})


@pytest.mark.parametrize("state", ["device", pytest.param("host", marks=pytest.mark.slow)])
def test_training_with_layers_on_the_host(state: str) -> None:
    model, batch = made("GPT-2")
    loss, params = loss_of(model, True)
    found = with_map(model, 0.7)
    on_host = sum(each.nbytes for name, each in params.items() if found.memories[name] == "host")
    assert 0 < on_host < sum(each.nbytes for each in params.values())
    moved = fp.chain(ALONE, fp.offload(state=state, parameters=found))
    assert fp.Plan.from_json(moved.to_json()) == moved
    runs = []
    for plan in (ALONE, moved):
        train = fp.train_step(loss, fp.optim.adamw(1e-2), Mesh(data=1), plan)
        start = train.init(params)
        after, metrics = train(start, batch)
        after, metrics = train(after, batch)
        runs.append([*optree.tree_leaves(train.params(after)), metrics.loss])
    assert all(map(torch.equal, *runs))
    forward = fp.compile(moved(loss), Mesh(data=1))
    assert torch.equal(forward(params, batch), fp.compile(ALONE(loss), Mesh(data=1))(params, batch))
    assert forward.program.memory().peaks["host"] == on_host
    assert forward.program.bytes_moved() == {("host", "device"): on_host}


def test_the_limits_of_a_map_are_those_of_the_program() -> None:
    model, batch = made("GPT-2")
    loss, params = loss_of(model, True)
    plan, mesh = fp.chain(ALONE, fp.offload(state="device", parameters=with_map(model, 0.7))), Mesh(data=1)
    peaks = fp.compile(plan(loss), mesh).lower(params, batch).memory().peaks
    whole = sum(each.nbytes for each in params.values())
    assert peaks["device"] < whole, "the model does not fit"
    fp.compile(plan(loss), mesh, memory=fp.Memory(**peaks)).lower(params, batch)
    with pytest.raises(fp.BudgetError, match="of the memory 'device'"):
        fp.compile(plan(loss), mesh, memory=fp.Memory(device=peaks["device"] - 1)).lower(params, batch)


def test_generation_with_layers_on_the_host() -> None:
    model = made("Llama")[0].to(torch.float32).eval()
    fn, params = fp.functional(model)
    found = with_map(model, 0.7)
    prompts = [[1, 2, 3], [4, 5]]
    generator = fp.Generator(fn, Mesh(data=1), fp.chain(ALONE, fp.offload(parameters=found)))
    text = generator(params, prompts, max_new_tokens=3)
    assert torch.equal(text.tokens, fp.generate(fn, params, prompts, Mesh(data=1), ALONE, max_new_tokens=3).tokens)
    on_host = sum(each.nbytes for name, each in params.items() if found.memories[name] == "host")
    assert generator.programs()["decode"].bytes_moved() == {("host", "device"): on_host}


@pytest.mark.slow
def test_two_devices_and_the_host_are_two_stages() -> None:
    """The last stage runs the layers of the host."""
    model, batch = made("GPT-2", n_layer=4)
    loss, params = loss_of(model, True)
    found = with_map(model, 0.3, 0.6)
    assert {*found.memories.values()} == {0, 1, "host"}
    plan = fp.chain(
        fp.offload(state="device", parameters=found), fp.pipeline("pipe", microbatches=2, stages=found.stages)
    )
    step = fp.compile(fp.grad_and_value(plan(loss)), Mesh(pipe=2))
    torch.testing.assert_close(
        step(params, batch), torch.func.grad_and_value(loss)(params, batch), rtol=1e-12, atol=1e-14
    )
    peaks = [memory.peaks.get("host", 0) for memory in step.program.memory().ranks]
    assert peaks[0] == 0 and peaks[1] >= found.bytes["host"]


@pytest.mark.parametrize("parameters", ["host", {"a": "host"}])
def test_parameters_on_the_host_are_updated_on_the_device(parameters: Any) -> None:
    """Without `state=`, the state is on the device."""
    params = {"a": torch.eye(4), "b": torch.ones(4, 4)}
    loss = lambda params, x: (x @ params["a"] @ params["b"]).square().mean()  # noqa: E731
    found = []
    for plan in (ALONE, fp.chain(ALONE, fp.offload(parameters=parameters))):
        train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=2), plan)
        state, _ = train(train.init(params), torch.ones(4, 4))
        found.append(train.params(state))
    assert all(torch.equal(found[0][name], found[1][name]) for name in params)
    on_host = 64 if isinstance(parameters, dict) else 128
    assert train.program.bytes_moved()["device", "host"] == on_host, "the new parameters"


def test_a_map_has_buffers_and_tied_weights() -> None:
    """Its rows that name no parameter are not patterns of parameters."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.BatchNorm1d(4, affine=False)})
    model["c"] = torch.nn.ModuleDict({"w": torch.nn.Linear(4, 4)})
    model["c"]["w"].weight = model["a"].weight
    found = fp.device_map(model, {"a": "host", "b": "host", "c.w.weight": "host", "c.w.bias": "device"})
    assert {*found.by_path} - {*found.of_parameters} == {"b", "c.w.weight"}
    plan, params = fp.chain(ALONE, fp.offload(parameters=found)), dict(model.named_parameters())
    step = fp.compile(plan(lambda w, x: sum((x * each).sum() for each in w.values())), Mesh(data=1))
    assert step.lower(params, torch.ones(4)).memory().peaks["host"] == 80


def test_patterns_that_move_nothing_are_an_error() -> None:
    for beside in ({}, {"layers": "host"}):
        plan = fp.chain(ALONE, fp.offload(parameters={**beside, "layer/*": "host"}))
        step = fp.compile(plan(lambda w, x: (w["layers"] * x).sum()), Mesh(data=1))
        with pytest.raises(SpecError, match=r"'layer/\*' is the first match of no parameter; the nearest are layers"):
            step({"layers": torch.ones(2)}, torch.ones(2))
    with pytest.raises(ValueError, match="give a folder on the disk"):
        fp.offload(parameters={"*": "disk"})
