"""The library without its package for shared memory: gloo carries everything, with the same results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..layout_of_code import graph

ROOT = Path(__file__).parents[2]
TRAIN = """
import json, sys
if sys.argv[1] == "without":
    sys.modules["functional_parallel.shared_memory"] = None  # an import of it fails
import torch
import functional_parallel as fp
from sharding_specs import Mesh

def loss(layers, x):
    for w in layers:
        x = torch.tanh(x @ w)
    return x.square().sum()

def train():
    mesh = Mesh(data=2) if sys.argv[2] == "zero" else Mesh(pipe=2)
    plan = fp.zero(3, "data") if sys.argv[2] == "zero" else fp.pipeline("pipe", microbatches=2)
    step = fp.train_step(loss, fp.optim.adamw(0.1), mesh, plan, reduction="ordered")
    state = step.init([torch.full((4, 4), 0.1 * (1 + layer), dtype=torch.float64) for layer in range(4)])
    for _ in range(2):
        state, metrics = step(state, torch.arange(16, dtype=torch.float64).reshape(4, 4) / 16)
    memory = step.program.memory()
    return metrics.loss.item(), [w.tolist() for w in step.params(state)], memory.shared

loaded = [name for name, module in sys.modules.items() if "shared_memory" in name and module is not None]
print(json.dumps([fp.launch(train, 2)[0], [name for name in loaded if name.startswith("functional_parallel")]]))
"""


@pytest.mark.parametrize("plan", ["zero", "pipeline"])
def test_training_without_shared_memory(plan: str) -> None:
    (loss, params, shared), loaded = trained("without", plan)
    assert loaded == [] and shared == 0
    (loss_with, params_with, shared_with), loaded_with = trained("with", plan)
    assert loaded_with and shared_with > 0
    assert (loss, params) == (loss_with, params_with), "bit for bit"


def trained(package: str, plan: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, package, plan], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_package_imports_it() -> None:
    assert [own for own, others in graph().items() if "shared_memory" in others] == ["__init__"]
