"""DeepSpeed itself as an outside oracle: two ranks on the CPU, five steps, each ZeRO stage.

It runs where DeepSpeed is installed: `pip install deepspeed` beside torch. `-s` prints its version.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import functional_parallel as fp

from ..processes import run_on_processes
from .configs import MESH, MICRO, PARAMS, STAGE, TYPE, batch, nested

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed, so it is not compared"
    ),
]
STEPS = 5
VALUES: dict[str, dict[str, Any]] = {
    "AdamW, clipped, accumulated": {
        MICRO: 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
        TYPE: "AdamW",
        f"{PARAMS}lr": 0.01,
        f"{PARAMS}betas": [0.8, 0.9],
        f"{PARAMS}weight_decay": 0.1,
        f"{PARAMS}torch_adam": True,
        "scheduler.type": "WarmupLR",
        "scheduler.params.warmup_num_steps": 3,
        "scheduler.params.warmup_max_lr": 0.01,
        "scheduler.params.warmup_type": "linear",
    },
    "SGD": {MICRO: 4, TYPE: "SGD", f"{PARAMS}lr": 0.1, "gradient_clipping": 0.0},
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh())


def losses_of_deepspeed(rank: int, values: dict[str, Any]) -> tuple[str, list[float]]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = str(rank)
    warnings.simplefilter("ignore")  # DeepSpeed's own, and those of what it imports
    import deepspeed

    module = model()
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=values)
    micro, times = values[MICRO], values.get("gradient_accumulation_steps", 1)
    losses = []
    for step in range(STEPS):
        mean = torch.zeros(())
        for part in batch(2 * times * micro, step).view(times, 2, micro, 4):
            value = ((engine(part[rank]) - 1) ** 2).mean()
            engine.backward(value)
            engine.step()
            mean += value.detach() / times
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / 2)
    return deepspeed.__version__, losses


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("values", VALUES.values(), ids=list(VALUES))
def test_a_file_trains_as_in_deepspeed(values: dict[str, Any], stage: int) -> None:
    config = nested(values | {STAGE: stage, "zero_allow_untested_optimizer": True})
    version, theirs = run_on_processes(losses_of_deepspeed, 2, config)[0]
    print("DeepSpeed", version)
    module, ours = model(), []
    call = lambda params, x: ((torch.func.functional_call(module, params, (x,)) - 1) ** 2).mean()  # noqa: E731
    settings = fp.deepspeed.from_config(config, mesh=MESH, deepspeed_version=version)
    assert settings.optimizer is not None
    train = fp.train_step(call, settings.optimizer, MESH, settings.plan, **settings.options)
    state = train.init({name: leaf.detach().clone() for name, leaf in module.named_parameters()})
    for step in range(STEPS):
        state, metrics = train(state, batch(settings.train_batch_size, step))
        ours.append(metrics.loss.item())
    assert ours == pytest.approx(theirs, rel=1e-5)
