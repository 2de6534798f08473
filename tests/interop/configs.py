"""Configurations of DeepSpeed for tests, and a model to train by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.interop.deepspeed import Config
from sharding_specs import Mesh

MESH = Mesh(data=2)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=dtype) / 2  # noqa: E731
    return {"layers": [{"w": draw(4, 6), "bias": draw(6)}, {"w": draw(6, 4), "bias": draw(4)}]}


def batch(size: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(step), dtype=dtype)


def loss(params: dict[str, Any], x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = torch.tanh(x @ layer["w"] + layer["bias"])
    return ((x - 1) ** 2).mean()


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration from its values by path."""
    found: dict[str, Any] = {}
    for path, value in flat.items():
        *blocks, name = path.split(".")
        inside = found
        for block in blocks:
            inside = inside.setdefault(block, {})
        inside[name] = value
    return found


def trained(config: Config, steps: int = 3, mesh: Mesh = MESH) -> tuple[Any, list[Tensor], Any]:
    """Return the parameters after some steps, the losses, and the training step."""
    assert config.optimizer is not None
    train = fp.train_step(loss, config.optimizer, mesh, config.plan, **config.options)
    state, losses = train.init(parameters()), []
    for _ in range(steps):
        state, metrics = train(state, batch(config.train_batch_size, 0))
        losses.append(metrics.loss)
    return train.params(state), losses, train


MICRO, TYPE, PARAMS = "train_micro_batch_size_per_gpu", "optimizer.type", "optimizer.params."
STAGE, SCHEDULER, OF_SCHEDULER = "zero_optimization.stage", "scheduler.type", "scheduler.params."
BASE = {MICRO: 2, TYPE: "SGD", f"{PARAMS}lr": 0.1, "gradient_clipping": 0.0}
FP16 = {"fp16.enabled": True, STAGE: 1, "fp16.initial_scale_power": 4}
BF16 = {"bf16.enabled": True}
WARMUP = {SCHEDULER: "WarmupLR", f"{OF_SCHEDULER}warmup_num_steps": 4}
CYCLE = {SCHEDULER: "OneCycle", f"{OF_SCHEDULER}cycle_min_lr": 0.1, f"{OF_SCHEDULER}cycle_max_lr": 1.0}
CYCLE |= {f"{OF_SCHEDULER}cycle_first_step_size": 2, f"{OF_SCHEDULER}cycle_momentum": False}

ARGUMENTS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "learning_rate": 0.01,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.1,
    "warmup_steps": 3,
    "max_steps": 9,
    "fp16": False,
    "bf16": True,
}
