"""A GPT that is trained on a device under plans."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.multiprocessing as multiprocessing

import functional_parallel as fp
from sharding_specs import Mesh, split

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import gpt

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CONFIG = gpt.Config(2, 32, 4, 16)
SPECS = split(gpt.init(CONFIG, 0))[1]
PLANS: dict[str, tuple[Any, Mesh]] = {
    "one rank": (None, Mesh()),
    "data parallel": (fp.data_parallel("data"), Mesh(data=2)),
    "zero 3": (fp.zero(3, "data"), Mesh(data=2)),
    "flat": (fp.zero(2, "data", layout="flat"), Mesh(data=2)),
    "tensor": (fp.tensor_parallel("tensor", SPECS), Mesh(tensor=2)),
    "state and activations on the host": (
        fp.chain(fp.zero(2, "data"), fp.offload(state="host", activations="host", at_least=1)),
        Mesh(data=2),
    ),
    "parameters on the host": (
        fp.chain(fp.zero(3, "data"), fp.offload(state="host", parameters="host")),
        Mesh(data=2),
    ),
    "on disk": (
        fp.chain(fp.zero(3, "data"), fp.offload(state="disk", parameters="disk", path=tempfile.gettempdir())),
        Mesh(data=2),
    ),
    "partitioned activations": (
        fp.chain(fp.partition_activations("tensor", at_least=1), fp.tensor_parallel("tensor", SPECS)),
        Mesh(tensor=2),
    ),
    "compressed": (
        fp.chain(fp.zero(3, "data"), fp.compress("data", gather="identity", reduce="identity")),
        Mesh(data=2),
    ),
    "unequal microbatches": (fp.pipeline("pipe", microbatches=3), Mesh(pipe=2)),
    "all": (
        fp.chain(
            fp.remat(), fp.tensor_parallel("tensor", SPECS), fp.zero(1, "data"), fp.pipeline("pipe", microbatches=2)
        ),
        Mesh(pipe=2, data=2, tensor=2),
    ),
}


def step(plan: Any, mesh: Mesh, optimizer: Any = None, **options: Any) -> fp.TrainStep:
    loss = partial(gpt.loss, config=CONFIG)
    return fp.train_step(loss, optimizer or fp.optim.adamw(1e-2), mesh, plan, clip=1.0, **options)


def arguments(device: str, dtype: torch.dtype = torch.float64) -> tuple[Any, torch.Tensor]:
    params, _ = split(gpt.init(CONFIG, 0))
    tokens = torch.randint(0, 256, (8, 17), generator=torch.Generator().manual_seed(0))
    return optree.tree_map(lambda x: x.to(device, dtype), params), tokens.to(device)


def trained(
    device: str, plan: Any, mesh: Mesh, dtype: torch.dtype = torch.float64, **options: Any
) -> list[torch.Tensor]:
    """The parameters after five steps, and the losses."""
    params, tokens = arguments(device, dtype)
    train = step(plan, mesh, **options)
    state, losses = train.init(params), []
    for _ in range(5):
        state, metrics = train(state, tokens)
        losses.append(metrics.loss)
    leaves = optree.tree_leaves((train.params(state), losses))
    assert {leaf.device.type for leaf in leaves} == {torch.device(device).type}
    return [leaf.cpu() for leaf in leaves]


def on_nccl(f: Callable[[], Any], port: int) -> Any:
    """Call a function in a process that is the only rank of an nccl group."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    worker = context.Process(target=_rank, args=(f, port, results))
    worker.start()
    try:
        found = results.get(timeout=240)
    finally:
        worker.join(20)
    if isinstance(found, Exception):
        raise found
    return found


def _rank(f: Callable[[], Any], port: int, results: Any) -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        results.put(optree.tree_map(lambda x: x.numpy() if isinstance(x, torch.Tensor) else x, f()))
    except Exception as error:
        results.put(RuntimeError(f"{type(error).__name__}: {error}"))
    torch.distributed.destroy_process_group()
