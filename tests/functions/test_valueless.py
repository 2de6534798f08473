"""A module on the meta device is lowered, for its price and its memory. Only running it needs values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import functional_parallel as fp
from sharding_specs import Mesh, rules

IDS = torch.zeros(4, 8, dtype=torch.long)
_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


class Normed(nn.Module):
    """Buffers that the loss reads, on both sides of a cut of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = fp.stage_boundary(torch.tanh(self.first(x) * self.scale))
        return (self.last(x) * self.scale).square().mean()


def llama(frozen: str = "") -> tuple[Callable[..., Any], dict[str, torch.Tensor]]:
    model = LlamaForCausalLM(LlamaConfig(**_SIZES, num_hidden_layers=1, vocab_size=32, use_cache=False))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and frozen in name))
    fn, params = fp.functional(model)
    return lambda p, ids: fn(p, input_ids=ids, labels=ids).loss, params


def normed() -> tuple[Callable[..., Any], dict[str, torch.Tensor]]:
    return fp.functional(Normed().eval())


TENSOR = fp.chain(fp.tensor_parallel("tensor", rules.llama()), fp.zero(3, "data"))
CASES: dict[str, tuple[Callable[[], Any], torch.Tensor, Mesh, Any]] = {
    "llama": (llama, IDS, Mesh(data=2, tensor=2), TENSOR),
    "frozen": (lambda: llama("q_proj"), IDS, Mesh(data=2), fp.chain(fp.mixed_precision("bf16"), fp.zero(1, "data"))),
    "pipeline": (normed, torch.ones(4, 4), Mesh(pipe=2), fp.pipeline("pipe", microbatches=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_module_on_meta_has_the_memory_and_the_price_of_one_with_values(name: str) -> None:
    make, batch, mesh, plan = CASES[name]
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            loss, params = make()
        program = fp.train_step(loss, fp.optim.adamw(1e-3), mesh, plan).lower(params, batch)
        found.append((program.memory().peak, str(program.price("h100"))))
        assert (" without values" in str(program)) == (device == "meta")
    assert found[0] == found[1]


def test_compile_lowers_it() -> None:
    counts = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            loss, params = llama()
        counts.append(fp.compile(fp.grad(fp.zero(3, "data")(loss)), Mesh(data=2)).lower(params, IDS).counts())
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", CASES)
def test_running_it_is_refused_by_name_before_anything_runs(name: str) -> None:
    make, batch, mesh, plan = CASES[name]
    with torch.device("meta"):
        loss, params = make()
    values = {path: torch.ones(param.shape) for path, param in params.items()}
    train = fp.train_step(loss, fp.optim.adamw(1e-3), mesh, plan)
    state = train.init(values)
    buffer = "Normed.scale" if name == "pipeline" else "LlamaForCausalLM.model.rotary_emb.inv_freq"
    refused = rf"{buffer}.* are on the meta device, and have no values"
    with pytest.raises(ValueError, match=refused):
        train(state, batch)
    assert torch.equal(train.params(state)[next(iter(values))], values[next(iter(values))])  # it was not donated
    with pytest.raises(ValueError, match=refused):
        fp.compile(fp.grad(fp.data_parallel("data")(loss)), Mesh(data=2))(values, batch)
    with pytest.raises(ValueError, match=refused):
        loss(values, batch)
    if name == "llama":
        with pytest.raises(ValueError, match=r"q_proj.* and 1 more .buffers, or parameters"):
            many(values, batch)


def many(values: dict[str, torch.Tensor], batch: torch.Tensor) -> None:
    with torch.device("meta"):
        loss, params = llama("proj")
    loss({path: values[path] for path in params}, batch)


def test_reading_a_value_while_lowering_is_refused() -> None:
    class Asks(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("depth", torch.ones((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).mean() * int(self.depth)

    with torch.device("meta"):
        fn, params = fp.functional(Asks())
    with pytest.raises(fp.errors.TracingError, match="needs a tensor's values"):
        fp.train_step(fn, fp.optim.sgd(0.1), Mesh(data=2), fp.zero(2, "data")).lower(params, torch.ones(4, 4))
