"""Rows for scripts with `DistributedDataParallel`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import functional_parallel as fp

from .checks import close, counts, first_loss, in_precision, same_loop, trains
from .names import adamw, loss, loss_of, mesh, params, plan, x, y
from .row import Row

__all__ = ["LEFT", "ROWS"]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.distributed.optim uses a deprecated part of torch.jit
    from torch.distributed.optim import ZeroRedundancyOptimizer

LEFT: dict[str, Any] = {
    "DistributedDataParallel": DistributedDataParallel,
    "ZeroRedundancyOptimizer": ZeroRedundancyOptimizer,
    "SyncBatchNorm": nn.SyncBatchNorm,
    "DistributedSampler": torch.utils.data.DistributedSampler,
    "Join": Join,
    "GradScaler": torch.amp.GradScaler,
    "autocast": torch.autocast,
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
    "get_ema_multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn,
    "torch": torch,
    "dist": torch.distributed,
    "nn": nn,
    "model": DistributedDataParallel,
    "loss": torch.Tensor,
    "optimizer": torch.optim.Optimizer,
    "scheduler": torch.optim.lr_scheduler.LRScheduler,
}


def unused_is_named(_: object) -> bool:
    """A parameter without a path to the loss: a warning, no update, no error."""
    train = fp.train_step(loss, adamw, mesh, plan)
    state = train.init({**params, "unused": torch.ones(2)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state, _metrics = train(state, x, y)
    named = [one for one in caught if one.category is fp.NotTrainedWarning and "unused" in str(one.message)]
    return len(named) == 1 and torch.equal(train.params(state)["unused"], torch.ones(2))


def compiled_once(_: object) -> bool:
    train = fp.train_step(loss, adamw, mesh, plan)
    state, _ = train(train.init(params), x, y)
    first = train.program
    train(state, x, y)
    return train.program is first


def in_one_bucket(_: object) -> bool:
    return counts(plan)["psum"] < counts(plan, bucket=None)["psum"]


def fewer_sums(train: Any) -> bool:
    return same_loop(train) and sum(train.program.counts().values()) < counts(plan, bucket=1)["psum"]


def one_reduction(plan: Any) -> bool:
    return counts(plan) == counts(fp.data_parallel("data"))


def batch_norm_is_global(step: Any) -> bool:
    return close(step(x, y), loss_of(nn.BatchNorm1d(4), x, y).detach())


def buffers_are_state(step: Any) -> bool:
    parts = zip(x.chunk(2), y.chunk(2), strict=True)
    of_ranks = torch.stack([loss_of(nn.BatchNorm1d(4), *part) for part in parts])
    step(x, y)
    mean = step.train.buffers(step.state)["running_mean"]
    return close(step.metrics.loss, of_ranks.mean().detach()) and close(mean, 0.1 * x[:4].mean(0))


def pads(found: Any) -> bool:
    return [present.tolist() for _, present in found] == [[True] * 8]


ROWS = [
    Row(
        "DistributedDataParallel(module)",
        "step = fp.prepare(module, optimizer, scheduler, loss=loss_of)",
        lambda step: first_loss(step(x, y)),
        "For a script with a module and a loop. Without `mesh=`, all processes are on the axis `data`.",
    ),
    Row(
        "ema = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))\nema.update_parameters(module)",
        "step = fp.prepare(module, optimizer, scheduler, loss=loss_of, ema=0.9)\nstep.module(ema=True)",
        lambda averaged: isinstance(averaged, nn.Module),
        "Natively `fp.optim.ema(optimizer, 0.9)` and `train.params(state, ema=True)`.",
    ),
    Row(
        "loss.backward()\noptimizer.step()\noptimizer.zero_grad()",
        "value = step(x, y)",
        first_loss,
        "One call replaces forward, backward, clipping, update and schedule.",
    ),
    Row(
        "DistributedDataParallel(module)",
        'train = fp.train_step(loss, adamw, Mesh(data=2), fp.data_parallel("data"))\nstate = train.init(params)\n'
        "state, metrics = train(state, x, y)",
        lambda found: first_loss(found[1].loss),
        "For a loss that is a function of its parameters.",
    ),
    Row(
        "model.no_sync()",
        'fp.chain(fp.data_parallel("data"), fp.accumulate(4))',
        one_reduction,
        "A step takes the batch of all microbatches, and reduces once.",
    ),
    Row(
        "DistributedDataParallel(module, find_unused_parameters=True)",
        "",
        unused_is_named,
        "A parameter without a path to the loss keeps its value. A warning names it.",
    ),
    Row(
        "DistributedDataParallel(module, static_graph=True)",
        "",
        compiled_once,
        "A step is traced once per signature of its arguments.",
    ),
    Row(
        "DistributedDataParallel(module, gradient_as_bucket_view=True)",
        "",
        in_one_bucket,
        "Buckets are packed by the compiled program.",
    ),
    Row(
        "DistributedDataParallel(module, bucket_cap_mb=25)",
        "fp.train_step(loss, adamw, mesh, plan, bucket=25 * 2**20)",
        fewer_sums,
        'In bytes. The default, `"auto"`, depends on the size of the gradients.',
    ),
    Row(
        "DistributedDataParallel(module, broadcast_buffers=True)",
        "norm = nn.BatchNorm1d(4)\n"
        "sgd = torch.optim.SGD(norm.parameters(), lr=0.1)\n"
        "fp.prepare(norm, sgd, loss=loss_of, mesh=mesh, plan=plan)",
        buffers_are_state,
        "Buffers are in the state, and so in checkpoints. A batch norm uses the samples of its rank, and "
        "its running statistics are from rank 0, as under DDP.",
    ),
    Row(
        "SyncBatchNorm.convert_sync_batchnorm(module)",
        "norm = nn.SyncBatchNorm(4)\n"
        "sgd = torch.optim.SGD(norm.parameters(), lr=0.1)\n"
        "fp.prepare(norm, sgd, loss=loss_of, mesh=mesh, plan=plan)",
        batch_norm_is_global,
        'It works on CPUs too. `statistics="all"` does the same for modules that are not converted. Inside '
        "`fp.functional` without `groups`, every batch norm uses the statistics of the global batch.",
    ),
    Row(
        "Join([model])",
        "list(fp.even_batches([(x, y)], 8, mesh))",
        pads,
        "All ranks take equally many steps. The loss gets a mask of the real samples.",
    ),
    Row(
        "DistributedSampler(data)",
        "fp.Sampler(len(x), batch=4, mesh=mesh)",
        lambda sampler: len(sampler.epoch(0)) == 2,
        "The batch size is the size of the global batch.",
    ),
    Row(
        "nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
        "fp.train_step(loss, adamw, mesh, plan, clip=0.1)",
        lambda train: same_loop(train, clip=0.1),
        "`fp.prepare` takes `clip` too.",
    ),
    Row(
        'autocast("cuda", dtype=torch.bfloat16)',
        'fp.chain(fp.mixed_precision("bf16"), fp.data_parallel("data"))',
        in_precision("bf16"),
        "Parameters are stored in bfloat16, with float32 masters in the optimizer state.",
    ),
    Row(
        "GradScaler()",
        'fp.chain(fp.mixed_precision("fp16", loss_scale=fp.LossScale.like_torch()), plan)',
        in_precision("f16"),
        "A step that overflows is skipped on all ranks.",
    ),
    Row(
        "ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01)",
        'fp.zero(1, "data")',
        trains(kinds="psum psum_scatter all_gather"),
        "A dim of each parameter is sharded.",
    ),
    Row(
        "dist.all_reduce(loss)",
        "state, metrics = train(state, x, y)\nmetrics.loss",
        first_loss,
        "The loss is already the mean over the global batch, on every rank.",
    ),
    Row(
        "model.eval()",
        "step.eval(lambda model, x: model(x))",
        lambda predict: predict(x).shape == (8, 4),
        "Evaluates on the sharded state, with full tensors as results.",
    ),
    Row(
        "model.module.state_dict()",
        "step.module().state_dict()",
        lambda found: sorted(found) == sorted(params),
        "A collective: call it on all ranks.",
    ),
    Row("model.register_comm_hook(None, powerSGD_hook)", limit="compressed gradients"),
]
