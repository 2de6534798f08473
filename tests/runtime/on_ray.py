"""The script `training` under Ray: each rank of a TorchTrainer writes what it prints into a file of a folder."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import functional_parallel as fp
from tests.runtime import training


def loop(config: dict[str, Any]) -> None:
    with Path(config["folder"], f"rank{torch.distributed.get_rank()}").open("w") as file, redirect_stdout(file):
        training.main(data=2, tensor=1)
        print("rank", fp.rank(), torch.distributed.get_backend())


def main(folder: str) -> None:
    ray.init(num_cpus=2, include_dashboard=False)
    trainer = TorchTrainer(
        loop,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=folder),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
