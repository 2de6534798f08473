"""The keys of ds_config.json (DeepSpeed 0.19.6) with their defaults, and what becomes of each."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple


class Key(NamedTuple):
    """Row of the schema. The default of a refused key is the value that is accepted."""

    path: str  # with dots
    kind: str | tuple[str, ...]  # an entry of `checks`, or choices
    default: Any
    text: str  # the effect of an honoured key, or the reason
    treatment: str = "honoured"  # or "not applicable" or "refused"


def _rows(treatment: str, block: str, reason: str, **keys: Any) -> list[Key]:
    """Return the rows of keys with one reason. A value is a default, which shows the kind, or (kind, default)."""
    kinds = {bool: "bool", int: "int", float: "number", str: "text", list: "list"}
    rows = []
    for name, value in keys.items():
        kind, default = value if isinstance(value, tuple) else (kinds[type(value)], value)
        rows.append(Key(f"{block}.{name}" if block else name, kind, default, reason, treatment))
    return rows


_not_applicable, _refused = partial(_rows, "not applicable"), partial(_rows, "refused")
_FLOATS = ("fp32", "fp16", "bf16")
_BLOCK, _TEXT, _COUNT = ("block", None), ("text", None), ("count", None)
_ZERO = "zero_optimization"

_GATHERS = "the program decides when a layer is gathered and freed"
_SUMS = "gradients are always laid out, reduced and overlapped by the program"
_FILES = "it configures DeepSpeed's checkpoints; train.params(state) returns full parameters"
_LOGS = "it configures DeepSpeed's logs; a step returns its metrics"
_OFF = "it configures DeepSpeed's buffers and reads; the host's memory is pinned on CUDA, and a bucket moves at once"
_DEVICES = ("none", "cpu", "nvme")
_LOCO = "chain config.plan anew, with fp.compress(axes, feedback=…, reset=…) for error feedback"
_PLUS = "it is not supported"
_PIPELINE = "fp.pipeline cuts the model into stages"
_SPECS = "chain fp.tensor_parallel(axis, specs) with config.plan"
_SAVED = "it configures deepspeed.checkpointing; fp.remat in the plan recomputes"
_INFERENCE = "it configures inference"
_TRAINS = "it changes what is trained, and is not supported"
_MOMENTUM = "momentum has no schedule; write cycle_momentum false"

_ROWS = [
    Key("train_batch_size", "count", None, "samples of a step: micro-batch · accumulation · data ranks"),
    Key("train_micro_batch_size_per_gpu", "count", None, "samples of a microbatch of a rank"),
    Key("gradient_accumulation_steps", "count", None, "`accumulate(n)`, with reduce='each' from stage 2 on"),
    Key("gradient_clipping", "number", 1.0, "`train_step(clip=…)`; 0 is off"),
    Key("communication_data_type", _FLOATS, None, "`mixed_precision(reduce=…)`; by default fp32"),
    Key("fp16.enabled", "bool", False, "`mixed_precision('fp16')`"),
    Key("fp16.loss_scale", "number", 0.0, "constant loss scale; 0 is dynamic"),
    Key("fp16.initial_scale_power", "int", 16, "`LossScale(initial=2**…)`; by default 32 at stage 0"),
    Key("fp16.loss_scale_window", "int", 1000, "`LossScale(window=…)`"),
    Key("fp16.hysteresis", "count", 2, "`LossScale(hysteresis=…)`; DeepSpeed's stage 0 has none"),
    Key("fp16.consecutive_hysteresis", "bool", False, "`LossScale(consecutive_hysteresis=…)`"),
    Key("fp16.min_loss_scale", "number", 1, "`LossScale(minimum=…)`"),
    Key("bf16.enabled", "bool", False, "`mixed_precision('bf16')`"),
    Key("bf16.check_grad_overflow", "bool", True, "a step whose gradients overflow is skipped"),
    Key("bf16.bf16_master_weights_and_grads", "bool", False, "`mixed_precision(masters=False)`"),
    Key("bf16.bf16_optimizer_states", "bool", False, "required by bf16_master_weights_and_grads"),
    Key("torch_autocast.enabled", "bool", False, "`mixed_precision(…, params='fp32')`"),
    Key("torch_autocast.dtype", ("bfloat16", "float16", "bf16", "fp16"), "bfloat16", "dtype of the computation"),
    Key(f"{_ZERO}.stage", "int", 0, "`data_parallel` for 0, `zero(stage)` for 1, 2 and 3"),
    Key(f"{_ZERO}.zero_quantized_weights", "bool", False, "`compress(gather='int8')`, at stage 3"),
    Key(f"{_ZERO}.zero_quantized_gradients", "bool", False, "`compress(reduce='int4')`, at stage 3"),
    Key(
        f"{_ZERO}.zero_hpz_partition_size",
        "count",
        1,
        "`zero(3, fast)` and `zero(3, slow, keep_gathered=True)`, with `from_config(data=(slow, fast))`",
    ),
    Key(f"{_ZERO}.reduce_bucket_size", "int", 500_000_000, "`train_step(bucket=…)` in bytes; by default 'auto'"),
    Key(f"{_ZERO}.stage3_prefetch_bucket_size", "int", 5 * 10**7, "`zero(3, prefetch=…)`: 1 layer, 0 if it is 0"),
    Key(f"{_ZERO}.stage3_param_persistence_threshold", "int", 100_000, "`zero(3, whole_below=…)`"),
    Key(
        "activation_checkpointing.partition_activations",
        "bool",
        False,
        "`partition_activations(tensor)`, if the mesh has the axis",
    ),
    Key(f"{_ZERO}.offload_optimizer.device", _DEVICES, "none", "`offload(state=…)`: 'host' for cpu, 'disk' for nvme"),
    Key(f"{_ZERO}.offload_optimizer.nvme_path", "text", None, "`offload(path=…)`, for nvme"),
    Key(f"{_ZERO}.sub_group_size", "count", 10**9, "`offload(group=…)` for nvme, 12 bytes each, unless it is this"),
    Key(f"{_ZERO}.offload_optimizer.ratio", "number", 1.0, "`offload(fraction=…)`, at stage 3"),
    Key(f"{_ZERO}.cpu_offload", "bool", False, "old name of offload_optimizer with the device cpu"),
    Key(
        "activation_checkpointing.cpu_checkpointing",
        "bool",
        False,
        "`partition_activations(tensor, memory='host')`, or `offload(activations='host')` if nothing is split",
    ),
    Key(f"{_ZERO}.offload_param.device", _DEVICES, "none", "`offload(parameters=…)`: 'host' or 'disk', at stage 3"),
    Key(f"{_ZERO}.offload_param.nvme_path", "text", None, "`offload(path=…)`, for nvme"),
    Key(f"{_ZERO}.cpu_offload_param", "bool", False, "old name of offload_param with the device cpu"),
    Key("optimizer.type", "text", None, "Adam, AdamW, Adagrad, Lamb, Lion, Muon, SGD"),
    Key("optimizer.params.lr", "number", None, "learning rate, unless a scheduler replaces it"),
    Key("optimizer.params.betas", "list", None, "of Adam, AdamW, Lamb, Lion, and of Muon's AdamW"),
    Key("optimizer.params.eps", "number", None, "of all except Lion and SGD"),
    Key("optimizer.params.weight_decay", "number", None, "of all; decoupled except for Adagrad and SGD"),
    Key("optimizer.params.adam_w_mode", "bool", None, "Adam: whether the decay is decoupled, by default true"),
    Key("optimizer.params.bias_correction", "bool", None, "Lamb; for Adam it must be true"),
    Key("optimizer.params.max_coeff", "number", None, "Lamb: upper bound of the ratio of norms"),
    Key("optimizer.params.min_coeff", "number", None, "Lamb: lower bound of the ratio of norms"),
    Key("optimizer.params.lr_decay", "number", None, "Adagrad"),
    Key("optimizer.params.initial_accumulator_value", "number", None, "Adagrad"),
    Key("optimizer.params.momentum", "number", None, "SGD and Muon"),
    Key("optimizer.params.dampening", "number", None, "SGD"),
    Key("optimizer.params.nesterov", "bool", None, "SGD"),
    Key("optimizer.params.muon_lr", "number", None, "Muon: rate of the matrices"),
    Key("optimizer.params.adam_lr", "number", None, "Muon: rate of the other parameters"),
    Key("scheduler.type", "text", None, "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest"),
    Key("scheduler.params.warmup_min_lr", "number", None, "first rate of WarmupLR and WarmupDecayLR"),
    Key("scheduler.params.warmup_max_lr", "number", None, "last rate of their warm-up"),
    Key("scheduler.params.warmup_num_steps", "count", None, "length of a warm-up"),
    Key("scheduler.params.warmup_type", "text", None, "'log' or 'linear'"),
    Key("scheduler.params.total_num_steps", "count", None, "WarmupDecayLR and WarmupCosineLR: length of the run"),
    Key("scheduler.params.warmup_min_ratio", "number", None, "WarmupCosineLR: first fraction of the rate"),
    Key("scheduler.params.cos_min_ratio", "number", None, "WarmupCosineLR: last fraction of the rate"),
    Key("scheduler.params.cycle_min_lr", "number", None, "OneCycle: rate at both ends"),
    Key("scheduler.params.cycle_max_lr", "number", None, "OneCycle: highest rate"),
    Key("scheduler.params.cycle_first_step_size", "count", None, "OneCycle: steps of the increase"),
    Key("scheduler.params.cycle_second_step_size", "count", None, "OneCycle: steps of the decrease"),
    Key("scheduler.params.decay_lr_rate", "number", None, "OneCycle: decay after the cycle"),
    Key("scheduler.params.decay_step_size", "int", None, "OneCycle: steps per unit of this decay"),
    Key("scheduler.params.lr_range_test_min_lr", "number", None, "LRRangeTest: first rate"),
    Key("scheduler.params.lr_range_test_step_size", "count", None, "LRRangeTest: steps per increase"),
    Key("scheduler.params.lr_range_test_step_rate", "number", None, "LRRangeTest: increase, as a fraction"),
    Key("scheduler.params.lr_range_test_staircase", "bool", None, "LRRangeTest: whether it is a step function"),
    #
    *_not_applicable("", _LOGS, steps_per_print=("int", None), wall_clock_breakdown=False, memory_breakdown=False),
    *_not_applicable("", _LOGS, dump_state=False, flops_profiler=_BLOCK, comms_logger=_BLOCK, tensorboard=_BLOCK),
    *_not_applicable("", _LOGS, wandb=_BLOCK, csv_monitor=_BLOCK, comet=_BLOCK, timers=_BLOCK),
    *_not_applicable("", _SUMS, disable_allgather=False, managed_gradient_accumulation=True),
    *_not_applicable("", "it changes rounding only", prescale_gradients=False, gradient_predivide_factor=1.0),
    *_not_applicable("", "it configures DeepSpeed's data loader; fp.Sampler has `tail`", dataloader_drop_last=False),
    *_not_applicable("", "every optimizer of fp.optim is tested", zero_allow_untested_optimizer=False),
    *_not_applicable("", _OFF, zero_force_ds_cpu_optimizer=True, aio=_BLOCK),
    *_not_applicable("", "the plan has no sequence axis", seq_parallel_communication_data_type=(_FLOATS, "fp32")),
    *_not_applicable("", "it configures a search that runs before training", autotuning=_BLOCK),
    *_not_applicable("", _FILES, checkpoint=_BLOCK, nebula=_BLOCK, load_universal_checkpoint=False),
    *_not_applicable("fp16", "floating inputs are always cast", auto_cast=False),
    *_not_applicable("bf16", _SUMS, immediate_grad_update=False),
    *_not_applicable("data_types", "gradients are accumulated in float32", grad_accum_dtype=(_FLOATS, None)),
    *_not_applicable("data_types", "parameters and buffers have their dtypes", param_dtype=_TEXT, buffer_dtype=_TEXT),
    *_not_applicable(_ZERO, _SUMS, contiguous_gradients=True, reduce_scatter=True, overlap_comm=("bool", None)),
    *_not_applicable(_ZERO, _SUMS, use_multi_rank_bucket_allreduce=True, round_robin_gradients=False),
    *_not_applicable(_ZERO, _SUMS, allgather_partitions=True, allgather_bucket_size=500_000_000, legacy_stage1=False),
    *_not_applicable(_ZERO, _GATHERS, stage3_max_live_parameters=10**9, stage3_max_reuse_distance=10**9),
    *_not_applicable(_ZERO, _GATHERS, stage3_model_persistence_threshold=2**63 - 1, leaf_module=_BLOCK),
    *_not_applicable(_ZERO, _GATHERS, stage3_module_granularity_threshold=0, stage3_allgather_sequential=False),
    *_not_applicable(_ZERO, _GATHERS, stage3_use_all_reduce_for_fetch_params=False, memory_efficient_linear=True),
    *_not_applicable(_ZERO, "an unused parameter is named in a warning", ignore_unused_parameters=True),
    *_not_applicable(_ZERO, _FILES, load_from_fp32_weights=True, elastic_checkpoint=False),
    *_not_applicable(_ZERO, _FILES, pipeline_loading_checkpoint=False, stage3_gather_16bit_weights_on_model_save=False),
    *_not_applicable(_ZERO, _LOGS, log_trace_cache_warnings=False, enable_sanity_checks=False),
    *_not_applicable(_ZERO, "modules are not patched", override_module_apply=True),
    *_not_applicable(_ZERO, _OFF, cpu_offload_use_pin_memory=("bool", None)),
    *_not_applicable(f"{_ZERO}.offload_param", _OFF, buffer_count=5, buffer_size=10**8, max_in_cpu=10**9),
    *_not_applicable(f"{_ZERO}.offload_param", _OFF, pin_memory=True),
    *_not_applicable(f"{_ZERO}.offload_optimizer", _OFF, buffer_count=4, pipeline_read=False, pipeline_write=False),
    *_not_applicable(f"{_ZERO}.offload_optimizer", _OFF, fast_init=False, super_offload=False),
    *_not_applicable(f"{_ZERO}.offload_optimizer", _OFF, cpuadam_cores_perc=0.8, pin_memory=True),
    *_not_applicable("activation_checkpointing", _SAVED, number_checkpoints=_COUNT, profile=False),
    *_not_applicable("activation_checkpointing", _SAVED, contiguous_memory_optimization=False),
    *_not_applicable("activation_checkpointing", _SAVED, synchronize_checkpoint_boundary=False),
    *_not_applicable("pipeline", _PIPELINE, stages="auto", partition="best", seed_layers=False),
    *_not_applicable("pipeline", _PIPELINE, activation_checkpoint_interval=0, pipe_partitioned=True),
    *_not_applicable("pipeline", _PIPELINE, grad_partitioned=True),
    *_not_applicable("tensor_parallel", "fp.tensor_parallel takes the specs", preset_model=_TEXT),
    *_not_applicable("tensor_parallel", "fp.tensor_parallel takes the specs", partition_config=_BLOCK),
    *_not_applicable("hybrid_engine", _INFERENCE, max_out_tokens=512, inference_tp_size=1, pin_parameters=True),
    *_not_applicable("hybrid_engine", _INFERENCE, release_inference_cache=False, tp_gather_partition_size=8),
    *_not_applicable("optimizer", "it selects an old kernel", legacy_fusion=False),
    *_not_applicable("optimizer.params", "it selects a kernel", torch_adam=False, fused=False, foreach=False),
    *_not_applicable("optimizer.params", "both methods have the same result", ns_method="gram"),
    *_not_applicable("scheduler.params", "a state has its step", last_batch_iteration=("integer", -1)),
    *_not_applicable("scheduler.params", _MOMENTUM, cycle_min_mom=0.8, cycle_max_mom=0.9, decay_mom_rate=0.0),
    #
    *_refused("", "a loss is the mean over the batch; let the loss return a sum", gradient_allreduce_op="mean"),
    *_refused("", "sparse gradients are not supported", sparse_gradients=False),
    *_refused("", _TRAINS, elasticity=_BLOCK, compression_training=_BLOCK, data_efficiency=_BLOCK),
    *_refused("", _TRAINS, curriculum_learning=_BLOCK, progressive_layer_drop=_BLOCK, eigenvalue=_BLOCK),
    *_refused("", "write the attention in the model", sparse_attention=_BLOCK),
    *_refused("", "Apex is not supported; use bf16 or fp16", amp=_BLOCK),
    *_refused("", 'use train_step(backend="inductor")', compile=_BLOCK),
    *_refused("fp16", "masters in float16 are not supported", fp16_master_weights_and_grads=False),
    *_refused("torch_autocast", "a loss has one compute dtype", lower_precision_safe_modules=("list", None)),
    *_refused(_ZERO, "ZenFlow is not supported", zenflow=_BLOCK),
    *_refused(_ZERO, _LOCO, zeropp_loco_param=_BLOCK),
    *_refused(_ZERO, _PLUS, zero_quantized_nontrainable_weights=False),
    *_refused(_ZERO, _PLUS, mics_shard_size=("integer", -1), mics_hierarchical_params_gather=False),
    *_refused("tensor_parallel", _SPECS, autotp_size=0),
    *_refused("hybrid_engine", _INFERENCE, enabled=False),
    *_refused("optimizer.params", "switch to 'gradient_clipping'", max_grad_norm=0.0),
    *_refused("optimizer.params", "it is not supported", amsgrad=False, maximize=False, eps_inside_sqrt=False),
    *_refused("scheduler.params", _MOMENTUM, cycle_momentum=False),
    *_refused("scheduler.params", "stairs are not supported", cycle_first_stair_count=0, cycle_second_stair_count=0),
]

KEYS: dict[str, Key] = {key.path: key for key in _ROWS}

# Defaults that changed: the first release with the present default, and the default before it
CHANGED: dict[str, tuple[str, Any]] = {
    "gradient_clipping": ("0.19.3", 0.0),
    "bf16.check_grad_overflow": ("0.19.3", False),
    f"{_ZERO}.offload_param.pin_memory": ("0.19.5", False),
    f"{_ZERO}.offload_optimizer.pin_memory": ("0.19.5", False),
    "steps_per_print": ("0.15.3", 10),
}


def defaults(version: str) -> dict[str, Any]:
    own = {path: old for path, (since, old) in CHANGED.items() if release(version) < release(since)}
    return {path: own.get(path, key.default) for path, key in KEYS.items()}


def release(version: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in str(version).split("+")[0].split(".")[:3])
    except ValueError:
        raise ValueError(
            f"deepspeed_version={version!r}: write the release that the file is for, as '0.19.6'"
        ) from None
