"""Real ds_config files train, as a loop in torch does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.interop.deepspeed.schema import KEYS

from .configs import (
    ARGUMENTS,
    MESH,
    MICRO,
    OF_SCHEDULER,
    PARAMS,
    SCHEDULER,
    STAGE,
    TYPE,
    batch,
    loss,
    nested,
    parameters,
    trained,
)

FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "minimal, with comments": (
        """{
            ## filled by the trainer
            "train_micro_batch_size_per_gpu": "auto",  // per GPU
            "zero_optimization": {"stage": 3}
        }""",
        {"per_device_train_batch_size": 2, "optimizer": fp.optim.adamw(1e-2)},
    ),
    "ZeRO-2": (
        """{
            "zero_optimization": {"stage": 2, "allgather_partitions": true, "allgather_bucket_size": 2e8,
                "overlap_comm": true, "reduce_scatter": true, "reduce_bucket_size": 2e8, "contiguous_gradients": true},
            "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto", "steps_per_print": 2000, "wall_clock_breakdown": false
        }""",
        {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 1.0,
            "optimizer": fp.optim.adamw(1e-2),
        },
    ),
    "transformers, ZeRO-3": (
        """{
            "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
                "hysteresis": 2, "min_loss_scale": 1},
            "bf16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
            "scheduler": {"type": "WarmupLR",
                "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "pin_memory": true},
                "offload_param": {"device": "none", "pin_memory": true}, "overlap_comm": true,
                "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": true},
            "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
            "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
        }""",
        ARGUMENTS | {"hidden_size": 4},
    ),
    "DeepSpeed's CIFAR tutorial": (
        """{
            "train_batch_size": 16, "steps_per_print": 2000,
            "optimizer": {"type": "Adam",
                "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
            "scheduler": {"type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
            "gradient_clipping": 1.0, "prescale_gradients": false,
            "fp16": {"enabled": true, "fp16_master_weights_and_grads": false, "loss_scale": 0,
                "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15},
            "wall_clock_breakdown": false,
            "zero_optimization": {"stage": 1, "allgather_partitions": true, "reduce_scatter": true,
                "allgather_bucket_size": 50000000, "reduce_bucket_size": 50000000, "overlap_comm": true,
                "contiguous_gradients": true, "cpu_offload": false}
        }""",
        {},
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_real_file_trains(name: str, tmp_path: Path) -> None:
    text, given = FILES[name]
    (tmp_path / "ds_config.json").write_text(text)
    config = fp.deepspeed.from_config(tmp_path / "ds_config.json", mesh=MESH, **given)
    _, losses, _ = trained(config, 20)
    assert losses[-1] < losses[0]
    assert set(config.not_applicable) == {
        path
        for path in flat_paths(json.loads(re.sub("##.*|//.*", "", text)))
        if KEYS[path].treatment == "not applicable"
    }


def flat_paths(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    paths: list[str] = []
    for name, value in config.items():
        paths += flat_paths(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]
    return paths


EQUAL = {
    "train_batch_size": 8,
    MICRO: 2,
    "gradient_clipping": 0.1,
    STAGE: 2,
    TYPE: "AdamW",
    f"{PARAMS}lr": 0.05,
    f"{PARAMS}weight_decay": 0.1,
    SCHEDULER: "WarmupLR",
    f"{OF_SCHEDULER}warmup_num_steps": 4,
    f"{OF_SCHEDULER}warmup_max_lr": 0.05,
    f"{OF_SCHEDULER}warmup_type": "linear",
}


def by_hand(params: Any, steps: int) -> list[float]:
    """Return the losses of a loop in torch with AdamW, clipping and DeepSpeed's linear warm-up."""
    leaves = optree.tree_leaves(params)
    optimizer, losses = torch.optim.AdamW(leaves, weight_decay=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(params, batch(8, step, torch.float64))
        value.backward()
        losses.append(value.item())
        torch.nn.utils.clip_grad_norm_(leaves, 0.1)
        optimizer.param_groups[0]["lr"] = 0.05 * min(max(step - 1, 0) / 4, 1)
        optimizer.step()
    return losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_file_trains_as_a_loop_in_torch(stage: int) -> None:
    config = fp.deepspeed.from_config(nested(EQUAL | {STAGE: stage}), mesh=MESH)
    assert config.optimizer is not None
    train = fp.train_step(loss, config.optimizer, MESH, config.plan, **config.options)
    state, losses = train.init(parameters(torch.float64)), []
    for step in range(8):
        state, metrics = train(state, batch(8, step, torch.float64))
        losses.append(metrics.loss.item())
    params = optree.tree_map(lambda leaf: leaf.requires_grad_(), parameters(torch.float64))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(by_hand(params, 8)))
