"""Contestants of the GPU benchmarks: each makes a training step of a workload, in bfloat16, by AdamW."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu_workloads import Workload
from model import ADAMW
from torch import nn

import functional_parallel as fp
from sharding_specs import Mesh

Step = Callable[[torch.Tensor], torch.Tensor]


class Torch:
    """torch with autocast, and the module as `wrap` changes it."""

    program: Any = None

    def __init__(self, workload: Workload, device: str, wrap: Callable[[nn.Module, str], nn.Module]) -> None:
        self.module = made(workload, device)
        self.parameters = sum(p.numel() for p in self.module.parameters())
        self.device, self.loss, self.wrapped = device, workload.loss, wrap(self.module, device)
        self.casts = wrap is not fully_sharded  # which casts by a policy of its own
        self.optimizer = torch.optim.AdamW(self.module.parameters(), fused=True, **ADAMW)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.casts):
            loss = self.loss(self.wrapped, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class Ours:
    """Ours on one rank."""

    def __init__(self, workload: Workload, device: str, stage: int = 0, backend: str = "eager") -> None:
        module = made(workload, device)
        model, params = fp.functional(module)
        self.parameters = sum(p.numel() for p in module.parameters())

        def loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
            return workload.loss(lambda x: model(params, x), batch)

        plan = fp.chain(fp.mixed_precision("bf16"), fp.zero(stage, "data"))
        self.train = fp.train_step(loss, fp.optim.adamw(**ADAMW), Mesh(data=1), plan, backend=backend)
        self.state = self.train.init(params)
        module.to("meta")  # the state has parameters of its own

    @property
    def program(self) -> Any:
        return self.train.program

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        self.state, metrics = self.train(self.state, batch)
        return metrics.loss


def made(workload: Workload, device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return workload.make()


def start_group(device: str) -> None:
    """Make a process group of this process alone: nccl on CUDA."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")


def data_parallel(module: nn.Module, device: str) -> nn.Module:
    start_group(device)
    return nn.parallel.DistributedDataParallel(module)


def fully_sharded(module: nn.Module, device: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    start_group(device)
    mesh = init_device_mesh(device, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.bfloat16()
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(module, mesh=mesh, mp_policy=policy)


def _with_nccl(workload: Workload, device: str) -> Ours:
    start_group(device)
    return Ours(workload, device)


def _compiled(**options: str) -> Callable[..., Torch]:
    return lambda workload, device: Torch(workload, device, lambda module, _: torch.compile(module, **options))


EAGER = "eager torch"
CONTESTANTS: dict[str, Callable[[Workload, str], Any]] = {
    EAGER: lambda workload, device: Torch(workload, device, lambda module, _: module),
    "torch.compile": _compiled(),
    "torch.compile, CUDA graphs": _compiled(mode="reduce-overhead"),
    "DDP": lambda workload, device: Torch(workload, device, data_parallel),
    "FSDP2": lambda workload, device: Torch(workload, device, fully_sharded),
    "ours": Ours,
    "ours, zero 3": lambda workload, device: Ours(workload, device, stage=3),
    "ours, nccl": _with_nccl,
    "ours, inductor": lambda workload, device: Ours(workload, device, backend="inductor"),
    "ours, CUDA graph": lambda workload, device: Ours(workload, device, backend="cudagraphs"),
    "ours, inductor, CUDA graph": lambda workload, device: Ours(workload, device, backend="inductor+cudagraphs"),
}
