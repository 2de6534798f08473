"""What `tests/test_cli.py` names on the command line."""

from __future__ import annotations

from typing import Any

import torch

import functional_parallel as fp
from sharding_specs import Mesh, P

RULES = {"w1": P(None, "tensor"), "w2": P("tensor", None)}


def parameters() -> dict[str, torch.Tensor]:
    return {"w1": torch.empty(4, 8, device="meta"), "w2": torch.empty(8, 4, device="meta")}


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return ((x @ params["w1"]).relu() @ params["w2"]).sum()


def plan() -> Any:
    return fp.chain(fp.tensor_parallel("tensor", RULES), fp.data_parallel("data"))


def gradient(mesh: Mesh) -> Any:
    return fp.compile(fp.grad_and_value(plan()(loss)), mesh), (parameters(), torch.empty(2, 4, device="meta"))


def training(mesh: Mesh) -> Any:
    train = fp.train_step(loss, fp.optim.sgd(0.1), mesh, plan())
    return train, (train.init({"w1": torch.ones(4, 8), "w2": torch.ones(8, 4)}), torch.ones(2, 4))


def model(mesh: Mesh) -> Any:
    return parameters(), RULES


def misspelt(mesh: Mesh) -> Any:
    return parameters(), {"w1": P(None, "tensor"), "w_2": P("tensor")}


def wrong(mesh: Mesh) -> Any:
    return parameters()


def turned_round(mesh: Mesh) -> Any:
    return fp.compile(fp.chain(fp.zero(3, "data"), fp.mixed_precision("bf16"))(loss), mesh), ()


def layers(mesh: Mesh) -> Any:
    params = {"w": torch.empty(8, 4, 6, device="meta"), "head": torch.empty(4, 2, device="meta")}
    return params, {"w": P("pipe"), "head": P()}


def pipelined(mesh: Mesh) -> Any:
    plan = fp.pipeline("pipe", microbatches=2)
    return fp.compile(fp.grad(plan(loss)), mesh), (parameters(), torch.empty(2, 4, device="meta"))
