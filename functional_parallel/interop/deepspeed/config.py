"""A ds_config.json as arguments of `fp.train_step`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from sharding_specs import Mesh

from ...optim import Optimizer, Schedule
from ...transforms import (
    LossScale,
    Plan,
    Transform,
    accumulate,
    chain,
    compress,
    data_parallel,
    mixed_precision,
    offload,
    partition_activations,
    zero,
)
from .auto import filled
from .checks import Problems, converted, flat, read
from .optimizers import build_optimizer, build_schedule
from .schema import KEYS, defaults

_ZERO = "zero_optimization"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_QUANTISED = (("zero_quantized_weights", "gather", "int8"), ("zero_quantized_gradients", "reduce", "int4"))
_OFFLOADED = (("offload_optimizer", "cpu_offload", "state"), ("offload_param", "cpu_offload_param", "parameters"))
_RATIO, _GROUP = f"{_ZERO}.offload_optimizer.ratio", f"{_ZERO}.sub_group_size"
_SECOND = f"{_ZERO}.zero_hpz_partition_size"
_MEMORIES = {"none": "device", "cpu": "host", "nvme": "disk"}
_STATE_BYTES = 12  # of an element: a master and two moments
_NO_MATRICES = ("*bias*", "*norm*", "*ln*", "*embed*", "*lm_head*")


@dataclass(frozen=True)
class Config:
    """A DeepSpeed configuration in terms of this library. `print(config)` shows it.

    Attributes:
        plan: the plan: precision, partitioned activations, ZeRO, offloading and accumulation.
        optimizer: the optimizer. None if neither the file nor the call has one.
        options: keyword arguments of `fp.train_step`.
        schedule: `optimizer.lr`: the learning rate, or its schedule.
        precision: "bf16", "fp16" or None.
        loss_scale: rules of the loss scale, a constant, or None.
        train_batch_size: samples of a step.
        micro_batch_size: samples of a microbatch of a rank.
        accumulation: microbatches of a step.
        clip: bound on the gradient's global norm, or None.
        deepspeed_version: the release that defines the defaults.
        not_applicable: reason for every key of the file that has no effect here.
    """

    plan: Plan
    optimizer: Optimizer | None
    options: Mapping[str, Any]
    schedule: Schedule | Mapping[str, Any] | None
    precision: str | None
    loss_scale: LossScale | float | None
    train_batch_size: int
    micro_batch_size: int
    accumulation: int
    clip: float | None
    deepspeed_version: str
    not_applicable: Mapping[str, str]

    def __repr__(self) -> str:
        shown = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "not_applicable"}
        if not isinstance(self.schedule, (float, int)):
            shown["schedule"] = self.schedule and "functions of the number of updates"
        lines = [f"  {name:<18}{value!r}" for name, value in shown.items()]
        reasons = [f"    {path}: {reason}" for path, reason in self.not_applicable.items()]
        return "\n".join(["DeepSpeed configuration", *lines, *(["  not applicable"] if reasons else []), *reasons])


def from_config(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    mesh: Mesh | int,
    data: str | Sequence[str] = "data",
    tensor: str = "tensor",
    optimizer: Optimizer | None = None,
    arguments: Any = None,
    beside_muon: tuple[str, ...] = _NO_MATRICES,
    deepspeed_version: str = "0.19.6",
    **named: Any,
) -> Config:
    """Translate a DeepSpeed configuration into a plan, an optimizer and options of `fp.train_step`.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> mesh, adam = Mesh(data=2), {"type": "Adam", "params": {"lr": 0.1}}
    >>> file = {"train_batch_size": 4, "optimizer": adam, "zero_optimization": {"stage": 2}}
    >>> config = fp.deepspeed.from_config(file, mesh=mesh)
    >>> train = fp.train_step(lambda w, x: ((x @ w) ** 2).mean(), config.optimizer, mesh, config.plan, **config.options)
    >>> state, metrics = train(train.init(torch.ones(2)), torch.ones(4, 2))
    >>> train.params(state)
    tensor([0.9000, 0.9000])

    Args:
        config: path of the file, which may have comments (`//`, `#`) and trailing commas, or its content as a dict.
        mesh: the mesh, or the number of data ranks.
        data: the data axis, or the slow and the fast one, `("node", "local")`, for `zero_hpz_partition_size`, the ranks
            of the fast one.
        tensor: the axis of model parallelism. `partition_activations` splits over it.
        optimizer: optimizer to use if the file has none.
        arguments: `transformers.TrainingArguments`, or an object with some of its attributes, to fill "auto".
        beside_muon: for the optimizer type Muon, patterns of the parameters that AdamW updates: parameters that are not
            matrices, embeddings and the head.
        deepspeed_version: the release that the file was written for, which selects the defaults.
        named: attributes of TrainingArguments by name, which take precedence: `learning_rate=1e-4`. `hidden_size`, that
            of the model, fills bucket sizes.

    Returns:
        The configuration, for `fp.train_step(loss, config.optimizer, mesh, config.plan, **config.options)`.

    Raises:
        TypeError: for an unknown keyword argument.
        ValueError: if the file is not accepted. The message lists all problems by key.
        DiskError: if `nvme_path` is no folder of this machine.
    """
    problems, axes = Problems(), (data,) if isinstance(data, str) else tuple(data)
    raw = flat(read(config), problems)
    given = converted(filled(raw, arguments, named, problems), problems)
    values = defaults(deepspeed_version) | given
    _check_rules(values, given, optimizer, problems)
    _check_secondary(values, mesh, axes, problems)
    problems.raise_if_any()
    with problems.at("batch sizes"):
        train, micro, accumulation = (values[name] for name in _BATCH)
        ranks = mesh if isinstance(mesh, int) else math.prod(map(mesh.axis_size, axes))
        train, micro, accumulation = batch_sizes(train, micro, accumulation, ranks)
    with problems.at("fp16"):
        precision, scale = _precision(values, given)
    if values["optimizer.type"] is not None:
        with problems.at("optimizer and scheduler"):
            optimizer = build_optimizer(given, build_schedule(given), beside_muon)
    problems.raise_if_any()
    clip, is_split = values["gradient_clipping"] or None, isinstance(mesh, Mesh) and tensor in mesh.axis_names
    return Config(
        plan=_plan(values, axes, tensor if is_split else None, precision, scale, accumulation),
        optimizer=optimizer,
        options={"clip": clip} | _bucket(values, given, precision),
        schedule=optimizer.lr if optimizer is not None else None,
        precision=precision,
        loss_scale=scale,
        train_batch_size=train,
        micro_batch_size=micro,
        accumulation=accumulation,
        clip=clip,
        deepspeed_version=deepspeed_version,
        not_applicable={path: KEYS[path].text for path in given if KEYS[path].treatment == "not applicable"},
    )


def batch_sizes(train: int | None, micro: int | None, accumulation: int | None, ranks: int) -> tuple[int, int, int]:
    if train is None and micro is None:
        raise ValueError("Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided")
    if accumulation is None:
        accumulation = 1 if train is None or micro is None else train // micro // ranks
    if train is None:
        assert micro is not None
        train = micro * accumulation * ranks
    elif micro is None:
        micro = train // ranks // accumulation
    if train != micro * accumulation * ranks or not train:
        raise ValueError(
            "train_batch_size is not equal to train_micro_batch_size_per_gpu · gradient_accumulation_steps · ranks: "
            f"{train} != {micro} · {accumulation} · {ranks}"
        )
    return train, micro, accumulation


def _check_rules(
    values: Mapping[str, Any], given: Mapping[str, Any], optimizer: Optimizer | None, problems: Problems
) -> None:
    stage, named = values[f"{_ZERO}.stage"], values["optimizer.type"] is not None
    scaled = values["prescale_gradients"] or values["gradient_predivide_factor"] != 1
    enabled = [name for name in ("bf16", "fp16", "torch_autocast") if values[f"{name}.enabled"]]
    masters, states = (values[f"bf16.bf16_{name}"] for name in ("master_weights_and_grads", "optimizer_states"))
    parameters = any(path.startswith("optimizer.params") for path in given)
    for key, *_ in _QUANTISED:
        if values[f"{_ZERO}.{key}"] and stage != 3:
            problems.add(f"{_ZERO}.{key}", f"it needs stage 3, and stage is {stage}")
    if stage > 3:
        problems.add(f"{_ZERO}.stage", f"Input should be 0, 1, 2 or 3, not {stage}")
    if stage == 2 and values[f"{_ZERO}.reduce_scatter"] and scaled:
        reason = "at stage 2 it forbids prescale_gradients and gradient_predivide_factor"
        problems.add(f"{_ZERO}.reduce_scatter", reason)
    if len(enabled) > 1:
        problems.add(", ".join(enabled), "bfloat16 and fp16 modes cannot be simultaneously enabled, nor torch_autocast")
    if masters != states:
        problems.add("bf16.bf16_optimizer_states", "it and bf16_master_weights_and_grads must have the same value")
    if values["communication_data_type"] in ("bf16", "fp16") and not enabled:
        problems.add("communication_data_type", "sums in low precision need bf16 or fp16 to be enabled")
    if named and optimizer is not None:
        problems.add("optimizer", "the file has an optimizer, and the call has another one; leave one of them out")
    if values["scheduler.type"] is not None and not named:
        problems.add("scheduler", "it needs an optimizer in the file; your own takes a schedule as its lr")
    if parameters and not named:
        problems.add("optimizer.type", "optimizer.params need a type")
    _check_offload(values, given, problems)


def _check_secondary(values: Mapping[str, Any], mesh: Mesh | int, axes: Sequence[str], problems: Problems) -> None:
    size, stage = values[_SECOND], values[f"{_ZERO}.stage"]
    if size == 1:
        return
    if stage != 3:
        problems.add(_SECOND, f"it needs stage 3, and stage is {stage}")
    elif len(axes) < 2:
        problems.add(_SECOND, f"name a slow and a fast axis, data=('node', 'local'), of a mesh with local={size}")
    elif isinstance(mesh, Mesh) and mesh.axis_size(axes[-1]) != size:
        found = mesh.axis_size(axes[-1])
        problems.add(_SECOND, f"it is the number of ranks of the fast axis {axes[-1]!r}, {found}, not {size}")


def _check_offload(values: Mapping[str, Any], given: Mapping[str, Any], problems: Problems) -> None:
    stage, ratio = values[f"{_ZERO}.stage"], values[_RATIO]
    for name, old, what in _OFFLOADED:
        path, memory = f"{_ZERO}.{name}.", _offloaded(values)[what]
        least = 1 if what == "state" and memory == "host" else 3
        if memory != "device" and stage < least:
            problems.add(f"{path}device", f"DeepSpeed offloads it from stage {least} on, and stage is {stage}")
        if memory == "disk" and not values[f"{path}nvme_path"]:
            problems.add(f"{path}nvme_path", "the device 'nvme' needs a folder on the disk")
        if values[f"{_ZERO}.{old}"] and any(each.startswith(path) for each in given):
            problems.add(f"{_ZERO}.{old}", f"it is the old name of {name}, which the file has too")
    if ratio > 1:
        problems.add(_RATIO, f"it is a share, from 0 to 1, not {ratio!r}")
    if ratio < 1 and stage != 3:
        problems.add(_RATIO, "Partial offloading only supported for ZeRO Stage 3.")


def _offloaded(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the memories of state and parameters."""
    found = {
        what: "host" if values[f"{_ZERO}.{old}"] else _MEMORIES[values[f"{_ZERO}.{name}.device"]]
        for name, old, what in _OFFLOADED
    }
    return found if values[_RATIO] > 0 else found | {"state": "device"}


def _offloads(values: Mapping[str, Any]) -> Iterator[Transform]:
    """Yield one transform, or one for each folder on a disk."""
    memories, group = _offloaded(values), values[_GROUP]
    folders = {what: values[f"{_ZERO}.{name}.nvme_path"] for name, _, what in _OFFLOADED if memories[what] == "disk"}
    apart = len({*folders.values()}) > 1
    for each in [{what: memory} for what, memory in memories.items()] if apart else [memories]:
        path = next((folders[what] for what in each if what in folders), None)
        is_bounded = each.get("state") == "disk" and group != KEYS[_GROUP].default
        options: dict[str, Any] = {**each, "group": _STATE_BYTES * group} if is_bounded else {**each}
        if {*each.values()} != {"device"}:
            yield offload(fraction=float(values[_RATIO]) or 1.0, path=path, **options)


def _precision(values: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[str | None, LossScale | float | None]:
    if values["torch_autocast.enabled"]:
        half = values["torch_autocast.dtype"] in ("float16", "fp16")
        return ("fp16", LossScale.like_torch()) if half else ("bf16", None)
    if values["bf16.enabled"]:  # a constant scale of 1 skips steps that overflow
        return "bf16", 1.0 if values["bf16.check_grad_overflow"] else None
    if not values["fp16.enabled"]:
        return None, None
    if values["fp16.loss_scale"]:
        return "fp16", float(values["fp16.loss_scale"])
    minimum, window = values["fp16.min_loss_scale"], values["fp16.loss_scale_window"]
    if not (minimum and window):
        raise ValueError(f"min_loss_scale={minimum!r} and loss_scale_window={window!r} are above 0 for a dynamic scale")
    has_zero, power = values[f"{_ZERO}.stage"] > 0, values["fp16.initial_scale_power"]
    if not has_zero and not any(path.startswith("fp16.") and path != "fp16.enabled" for path in given):
        power = 32  # the default of DeepSpeed's optimizer without ZeRO, which has no hysteresis and never fails
    hysteresis, consecutive = values["fp16.hysteresis"] if has_zero else 1, values["fp16.consecutive_hysteresis"]
    rules = LossScale(2.0**power, window, hysteresis, minimum, consecutive_hysteresis=consecutive)
    return "fp16", replace(rules, fail_at_minimum=has_zero)


def _plan(
    values: Mapping[str, Any],
    axes: Sequence[str],
    tensor: str | None,
    precision: str | None,
    scale: LossScale | float | None,
    microbatches: int,
) -> Plan:
    stage, parts = values[f"{_ZERO}.stage"], list[Transform]()
    if precision is not None:
        gathers = "fp32" if values["torch_autocast.enabled"] else None
        sums, masters = values["communication_data_type"] or "fp32", not values["bf16.bf16_master_weights_and_grads"]
        parts.append(mixed_precision(precision, params=gathers, reduce=sums, masters=masters, loss_scale=scale))
    to_host = values["activation_checkpointing.cpu_checkpointing"]
    is_split = tensor is not None and values["activation_checkpointing.partition_activations"]
    if tensor is not None and is_split:
        parts.append(partition_activations(tensor, memory="host" if to_host else "device", at_least=1))
    if stage == 3:
        threshold = values[f"{_ZERO}.stage3_param_persistence_threshold"]
        prefetch = 1 if values[f"{_ZERO}.stage3_prefetch_bucket_size"] else 0
        kept = {axes[0]} if values[_SECOND] > 1 else set()  # gathered over the slow axis once
        parts += [
            zero(3, axis, whole_below=threshold + 1, prefetch=prefetch, keep_gathered=axis in kept)
            for axis in reversed(axes)
        ]
        formats: dict[str, Any] = {role: form if values[f"{_ZERO}.{key}"] else None for key, role, form in _QUANTISED}
        if any(formats.values()):
            parts.append(compress(axes[0] if len(axes) == 1 else axes, **formats))
    else:
        parts += [zero(stage, axis) if stage else data_parallel(axis) for axis in reversed(axes)]
    parts += _offloads(values)
    if to_host and not is_split:
        parts.append(offload(activations="host", at_least=1))
    if microbatches > 1:
        parts.append(accumulate(microbatches, reduce="each" if stage >= 2 else "once"))
    return chain(*parts)


def _bucket(values: Mapping[str, Any], given: Mapping[str, Any], precision: str | None) -> dict[str, Any]:
    size = given.get(f"{_ZERO}.reduce_bucket_size")
    if size is None:
        return {}
    low = precision is not None and values["communication_data_type"] in ("bf16", "fp16")
    return {"bucket": size * (2 if low else 4) or None}
