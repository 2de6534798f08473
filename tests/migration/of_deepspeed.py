"""Rows for a `ds_config.json` and the calls of a DeepSpeed engine."""

from __future__ import annotations

from typing import Any

import torch

import functional_parallel as fp
from sharding_specs import Mesh

from .checks import (
    DATA,
    UNCHANGED,
    close,
    counts,
    first_loss,
    in_precision,
    moves_activations,
    products,
    same_loop,
    splits_activations,
    trained,
    trains,
)
from .names import adamw, loss, module, params, x, y
from .of_fsdp2 import gathers_earlier, keeps_small_parameters
from .row import Row

__all__ = ["ROWS"]


def scaled(initial: float) -> Any:
    """Check of a plan in float16: it trains, from this loss scale on."""

    def check(plan: Any) -> bool:
        train = trained(plan, rtol=3e-2)
        _, metrics = train(train.init(params), x, y)
        return metrics.loss_scale.item() == initial and not metrics.skipped

    return check


def reduces_early(_: object) -> bool:
    """The first gradients are summed before the last ones are computed."""
    lines = trained(fp.zero(2, "data"), bucket=1).program.lines()
    sums = [number for number, line in enumerate(lines) if "psum_scatter" in line]
    return any("mm" in line for line in lines[sums[0] : sums[-1]])


def one_bucket(_: object) -> bool:
    return counts(fp.zero(2, "data"))["psum_scatter"] == 1


def same_moments(optimizer: fp.optim.Optimizer) -> bool:
    return same_loop(fp.train_step(loss, optimizer, DATA, fp.data_parallel("data")))


def sends_bytes(plan: Any) -> bool:
    """Parameters and gradients are sent as bytes."""
    program = fp.train_step(loss, adamw, Mesh(node=2, local=2), plan).lower(params, x, y)
    return all(one.operand.dtype == torch.uint8 for one in program.collectives() if one.parameters)


def repeats_product(f: Any) -> bool:
    """A marked function has the same gradients, and its inner product is computed twice."""

    def of(g: Any) -> Any:
        return lambda params, x: g(x @ params["up"], params["down"]).square().mean()

    arguments = {"up": torch.randn(4, 8), "down": torch.randn(8, 8)}, x
    marked, plain = (products(UNCHANGED, of(g), arguments) for g in (f, lambda h, w: torch.sin(h @ w)))
    return marked > plain


ROWS = [
    Row(
        "engine, optimizer, loader, scheduler = deepspeed.initialize(model=module, config=config)",
        "fp.prepare(module, optimizer, scheduler, loss=loss_of, mesh=mesh, plan=plan)",
        lambda step: first_loss(step(x, y)),
    ),
    Row(
        "engine.backward(loss)\nengine.step()",
        "step(x, y)",
        first_loss,
        "`step.metrics` has the norm of the gradient, the learning rates and the loss scale.",
    ),
    Row('"zero_optimization": {"stage": 0}', 'fp.data_parallel("data")', trains(kinds="psum")),
    Row('"zero_optimization": {"stage": 1}', 'fp.zero(1, "data")', trains(kinds="psum psum_scatter all_gather")),
    Row(
        '"zero_optimization": {"stage": 2}',
        'fp.zero(2, "data")',
        trains(kinds="psum psum_scatter all_gather"),
        'The same program as stage 1, unless `fp.accumulate(n, reduce="each")` reduces every microbatch.',
    ),
    Row('"zero_optimization": {"stage": 3}', 'fp.zero(3, "data")', trains(kinds="psum psum_scatter all_gather")),
    Row(
        '"overlap_comm": true',
        "",
        reduces_early,
        "A bucket of gradients is reduced when it is complete.",
    ),
    Row('"contiguous_gradients": true', "", one_bucket, "Gradients are packed into buckets."),
    Row(
        '"reduce_bucket_size": 500000000',
        'fp.train_step(loss, adamw, mesh, fp.zero(1, "data"), bucket=500_000_000)',
        same_loop,
        "Here in bytes.",
    ),
    Row(
        '"stage3_prefetch_bucket_size": 50000000',
        'fp.zero(3, "data", prefetch=2)',
        gathers_earlier,
        "Here in layers.",
    ),
    Row(
        '"stage3_param_persistence_threshold": 16',
        'fp.zero(3, "data", whole_below=16)',
        keeps_small_parameters,
        "In elements. Smaller parameters stay replicated.",
    ),
    Row(
        '"mics_shard_size": 2',
        'fp.chain(fp.zero(3, "shard"), fp.data_parallel("replica"))',
        trains(Mesh(replica=2, shard=2)),
        "The size of the group is the size of the axis `shard`.",
    ),
    Row(
        '"zero_hpz_partition_size": 2',
        'fp.chain(fp.zero(3, "local"), fp.zero(3, "node", keep_gathered=True))',
        trains(Mesh(node=2, local=2)),
        "Secondary shards: the backward gathers over the fast axis alone.",
    ),
    Row(
        '"zero_quantized_weights": true\n"zero_quantized_gradients": true',
        'fp.chain(fp.zero(3, "local"), fp.zero(3, "node"), fp.compress(("node", "local")))',
        sends_bytes,
        "Gathers in int8, sums in int4, with a scale per block of 64. Any number of ranks and any shape.",
    ),
    Row(
        '"gradient_accumulation_steps": 4',
        'fp.chain(fp.zero(1, "data"), fp.accumulate(4))',
        lambda plan: counts(plan) == counts(fp.zero(1, "data")),
        "A step takes the batch of all microbatches.",
    ),
    Row(
        '"train_batch_size": 8\n"train_micro_batch_size_per_gpu": 1',
        'train = fp.train_step(loss, adamw, Mesh(data=2), fp.chain(fp.zero(1, "data"), fp.accumulate(4)))\n'
        "state, metrics = train(train.init(params), x, y)",
        lambda found: first_loss(found[1].loss),
        "Global batch = microbatch · microbatches · data ranks: 8 = 1 · 4 · 2. A step takes a batch of 8.",
    ),
    Row(
        '"gradient_clipping": 0.1',
        'fp.train_step(loss, adamw, mesh, fp.zero(1, "data"), clip=0.1)',
        lambda train: same_loop(train, clip=0.1),
    ),
    Row(
        '"bf16": {"enabled": true}',
        'fp.chain(fp.mixed_precision("bf16"), fp.zero(1, "data"))',
        in_precision("bf16"),
    ),
    Row(
        '"fp16": {"enabled": true, "initial_scale_power": 10, "loss_scale_window": 1000, "hysteresis": 2}',
        "scale = fp.LossScale(initial=2**10, window=1000, hysteresis=2)\n"
        'fp.chain(fp.mixed_precision("fp16", loss_scale=scale), fp.zero(1, "data"))',
        scaled(2**10),
    ),
    Row(
        '"fp16": {"enabled": true, "loss_scale": 128}',
        'fp.chain(fp.mixed_precision("fp16", loss_scale=128.0), fp.zero(1, "data"))',
        scaled(128),
    ),
    Row(
        '"communication_data_type": "bf16"',
        'fp.chain(fp.mixed_precision("bf16", reduce="bf16"), fp.zero(1, "data"))',
        in_precision("bf16", sums="bf16"),
    ),
    Row(
        '"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}',
        "fp.optim.adamw(0.01, weight_decay=0.01)",
        same_moments,
    ),
    Row(
        '"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}}',
        "fp.optim.schedules.warmup_lr(0.01, 5, compat=True)",
        lambda rate: close(float(rate(5)), 0.01),
        "`compat=True` has DeepSpeed's rates entry by entry. [All schedules](optimizers.md#learning-rate-schedules)",
    ),
    Row(
        "deepspeed.checkpointing.checkpoint(f, x)",
        "fp.recompute(lambda h, w: torch.sin(h @ w))",
        repeats_product,
        '`fp.remat("layers")` in the plan needs no change of the model.',
    ),
    Row(
        "deepspeed.zero.Init()",
        "state = train.init(lambda: fp.functional(Model())[1])\ntrain(state, x, y)",
        lambda found: found[0].step == 1,
    ),
    Row(
        "PipelineModule(layers, num_stages=2)",
        'fp.pipeline("pipe", microbatches=4)',
        trains(Mesh(pipe=2), "send"),
        "The number of microbatches is `gradient_accumulation_steps`. `fp.stage_boundary` marks a cut.",
    ),
    Row(
        '"tensor_parallel": {"autotp_size": 2}',
        'rules = {"*up.*": P("tensor"), "*down.weight": P(None, "tensor"), "*": P()}\n'
        'fp.tensor_parallel("tensor", rules)',
        trains(Mesh(tensor=2), "psum"),
        "`sharding_specs.rules.for_model` reads the rules of a model of transformers from the model.",
    ),
    Row(
        'engine.save_checkpoint("folder")',
        "train.save(state, folder)\ntrain.restore(folder)",
        lambda loaded: loaded.step == 0,
        "Every process calls both. Any mesh and plan can restore it.",
    ),
    Row(
        '"zero_allow_untested_optimizer": true',
        "fp.optim.Optimizer(lambda params: (), lambda grads, state, params: (params, state))",
        lambda optimizer: fp.train_step(loss, optimizer, DATA, fp.zero(1, "data")).init(params).step == 0,
        "Any pair of pure functions. An update that is not elementwise is partitioned like a loss.",
    ),
    Row(
        '"offload_optimizer": {"device": "cpu"}',
        'fp.chain(fp.zero(2, "data"), fp.offload(state="host"))',
        trains(DATA, "psum psum_scatter all_gather"),
        "`fraction` is `ratio`. [Memory tiers](memory_tiers.md) has peaks and bytes.",
    ),
    Row(
        '"offload_param": {"device": "cpu"}',
        'fp.chain(fp.zero(3, "data"), fp.offload(state="host", parameters="host"))',
        trains(DATA, "psum all_gather psum_scatter"),
    ),
    Row(
        '"offload_param": {"device": "nvme", "nvme_path": "/tmp"}',
        'fp.chain(fp.zero(3, "data"), fp.offload(state="disk", parameters="disk", path="/tmp"))',
        trains(DATA, "psum all_gather psum_scatter"),
        "A killed run leaves no files. `group=` bounds what the host holds of the state.",
    ),
    Row(
        "deepspeed.zero.TiledLinear(4, 8, in_splits=2, out_splits=2)",
        'up = fp.into_tiles(params["layers.0.up.weight"], params["layers.0.up.bias"], inputs=2, outputs=2)\n'
        "fp.tiled(x, up)",
        lambda found: close(found, module.layers[0].up(x)),
        "Each tile is a parameter. `fp.zero(3, axis, prefetch=0)` gathers one at a time.",
    ),
    Row(
        '"activation_checkpointing": {"cpu_checkpointing": true}',
        'fp.offload(activations="host")',
        moves_activations,
        '`fp.partition_activations("tensor", memory="host")` moves the parts of split ones.',
    ),
    Row(
        '"activation_checkpointing": {"partition_activations": true}',
        'fp.partition_activations("tensor")',
        splits_activations,
    ),
    Row('"optimizer": {"type": "onebitadam"}', limit="compressed gradients"),
    Row('"sparse_gradients": true', limit="sparse gradients"),
]
