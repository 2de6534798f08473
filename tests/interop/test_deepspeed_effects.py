"""Every honoured key of ds_config.json has an effect."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.interop.deepspeed.schema import KEYS
from sharding_specs import Mesh

from .configs import (
    BASE,
    BF16,
    CYCLE,
    FP16,
    MESH,
    MICRO,
    OF_SCHEDULER,
    PARAMS,
    SCHEDULER,
    STAGE,
    TYPE,
    WARMUP,
    batch,
    loss,
    nested,
    parameters,
    trained,
)

ADAM, LAMB = {TYPE: "Adam", f"{PARAMS}weight_decay": 0.5}, {TYPE: "Lamb"}
MOMENTUM = {f"{PARAMS}momentum": 0.9}
WHOLE = {STAGE: 3, "zero_optimization.stage3_param_persistence_threshold": 0}
OFFLOADED = {STAGE: 3, "zero_optimization.offload_optimizer.device": "cpu"}
NVME, SECOND = "zero_optimization.offload_optimizer.nvme_path", "zero_optimization.zero_hpz_partition_size"
ON_DISK = {**WHOLE, TYPE: "AdamW", "zero_optimization.offload_optimizer.device": "nvme", NVME: tempfile.gettempdir()}
COSINE = WARMUP | {SCHEDULER: "WarmupCosineLR", f"{OF_SCHEDULER}total_num_steps": 8}
DECAYING = CYCLE | {f"{OF_SCHEDULER}decay_lr_rate": 0.5, f"{OF_SCHEDULER}decay_step_size": 2}
TEST = {SCHEDULER: "LRRangeTest", f"{OF_SCHEDULER}lr_range_test_step_size": 4}
MASTERS = {"bf16.bf16_master_weights_and_grads": True}
STATES = {"bf16.bf16_optimizer_states": True}
SPLIT, TO_HOST = (f"activation_checkpointing.{name}" for name in ("partition_activations", "cpu_checkpointing"))

# Path → (values beside it, its value or the values that contain it). Without it, the file trains otherwise.
EFFECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "train_batch_size": ({}, 8),
    MICRO: ({MICRO: None, "train_batch_size": 8}, 2),
    "gradient_accumulation_steps": ({}, 2),
    "gradient_clipping": ({}, 0.01),
    "communication_data_type": (BF16, "bf16"),
    "fp16.enabled": ({}, True),
    "fp16.loss_scale": (FP16, 4.0),
    "fp16.initial_scale_power": (FP16, 5),
    "fp16.loss_scale_window": (FP16, 2),
    "fp16.hysteresis": (FP16, 3),
    "fp16.consecutive_hysteresis": (FP16, True),
    "fp16.min_loss_scale": (FP16, 2.0),
    "bf16.enabled": ({}, True),
    "bf16.check_grad_overflow": (BF16, False),
    "bf16.bf16_master_weights_and_grads": (BF16, MASTERS | STATES),
    "bf16.bf16_optimizer_states": (BF16 | MASTERS, True),
    "torch_autocast.enabled": ({}, True),
    "torch_autocast.dtype": ({"torch_autocast.enabled": True}, "float16"),
    STAGE: ({}, 1),
    "zero_optimization.zero_quantized_weights": (WHOLE, True),
    "zero_optimization.zero_quantized_gradients": (WHOLE, True),
    SECOND: (WHOLE, 2),
    "zero_optimization.reduce_bucket_size": ({}, 10),
    "zero_optimization.stage3_prefetch_bucket_size": (WHOLE, 0),
    "zero_optimization.stage3_param_persistence_threshold": ({STAGE: 3}, 10),
    SPLIT: ({}, True),
    "zero_optimization.offload_optimizer.device": ({STAGE: 2}, "cpu"),
    "zero_optimization.offload_optimizer.nvme_path": (ON_DISK | {NVME: None}, tempfile.gettempdir()),
    "zero_optimization.sub_group_size": (ON_DISK, 1),
    "zero_optimization.offload_optimizer.ratio": (OFFLOADED, 0.5),
    "zero_optimization.cpu_offload": ({STAGE: 1}, True),
    TO_HOST: ({}, True),
    "zero_optimization.offload_param.device": (WHOLE, "cpu"),
    "zero_optimization.offload_param.nvme_path": (
        WHOLE | {"zero_optimization.offload_param.device": "nvme"},
        tempfile.gettempdir(),
    ),
    "zero_optimization.cpu_offload_param": (WHOLE, True),
    TYPE: ({}, "Lion"),
    f"{PARAMS}lr": ({}, 0.2),
    f"{PARAMS}betas": (ADAM, [0.5, 0.5]),
    f"{PARAMS}eps": (ADAM, 0.1),
    f"{PARAMS}weight_decay": ({}, 0.5),
    f"{PARAMS}adam_w_mode": (ADAM, False),
    f"{PARAMS}bias_correction": (LAMB, False),
    f"{PARAMS}max_coeff": (LAMB, 0.1),
    f"{PARAMS}min_coeff": (LAMB, 5.0),
    f"{PARAMS}lr_decay": ({TYPE: "Adagrad"}, 0.5),
    f"{PARAMS}initial_accumulator_value": ({TYPE: "Adagrad"}, 0.5),
    f"{PARAMS}momentum": ({}, 0.9),
    f"{PARAMS}dampening": (MOMENTUM, 0.5),
    f"{PARAMS}nesterov": (MOMENTUM, True),
    f"{PARAMS}muon_lr": ({TYPE: "Muon"}, 0.5),
    f"{PARAMS}adam_lr": ({TYPE: "Muon"}, 0.5),
    SCHEDULER: ({}, "WarmupLR"),
    f"{OF_SCHEDULER}warmup_min_lr": (WARMUP, 0.1),
    f"{OF_SCHEDULER}warmup_max_lr": (WARMUP, 0.5),
    f"{OF_SCHEDULER}warmup_num_steps": (WARMUP, 6),
    f"{OF_SCHEDULER}warmup_type": (WARMUP, "linear"),
    f"{OF_SCHEDULER}total_num_steps": (WARMUP | {SCHEDULER: "WarmupDecayLR"}, 8),
    f"{OF_SCHEDULER}warmup_min_ratio": (COSINE, 0.5),
    f"{OF_SCHEDULER}cos_min_ratio": (COSINE, 0.5),
    f"{OF_SCHEDULER}cycle_min_lr": (CYCLE, 0.2),
    f"{OF_SCHEDULER}cycle_max_lr": (CYCLE, 2.0),
    f"{OF_SCHEDULER}cycle_first_step_size": (CYCLE, 3),
    f"{OF_SCHEDULER}cycle_second_step_size": (CYCLE, 3),
    f"{OF_SCHEDULER}decay_lr_rate": (DECAYING, 1.0),
    f"{OF_SCHEDULER}decay_step_size": (DECAYING, 4),
    f"{OF_SCHEDULER}lr_range_test_min_lr": (TEST, 0.1),
    f"{OF_SCHEDULER}lr_range_test_step_size": (TEST, 8),
    f"{OF_SCHEDULER}lr_range_test_step_rate": (TEST, 2.0),
    f"{OF_SCHEDULER}lr_range_test_staircase": (TEST, True),
}


@cache
def observed(text: str, mesh: Mesh) -> tuple[Any, ...]:
    """Return what a configuration leads to: program, parameters, rates and loss scales; or its error."""
    try:
        data = "data" if "data" in mesh.axis_names else ("node", "local")
        config = fp.deepspeed.from_config(nested(json.loads(text)), mesh=mesh, data=data)
    except ValueError as error:
        return (str(error),)
    params, _, train = trained(config, mesh=mesh)
    rates = optree.tree_map(
        lambda rate: [float(rate(step)) if callable(rate) else rate for step in range(12)], config.schedule
    )
    return (
        str(train.program.explain()),
        str(train.program),
        str(optree.tree_map(Tensor.tolist, params)),
        str(rates),
        str(scales(config.loss_scale)),
    )


def scales(rules: Any) -> Any:
    """Return a loss scale's course over steps of which some (X) overflow."""
    if not isinstance(rules, fp.LossScale):
        return rules
    state, found = rules.init(), []
    for step in "X.X.X...XXXXXXXX.....":
        state = rules.update(state, torch.tensor(step == "X"))
        found.append(state.scale.item())
    return found


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.treatment == "honoured"])
def test_an_honoured_key_has_an_effect(path: str) -> None:
    """A new honoured key without an entry in EFFECTS fails."""
    beside, value = EFFECTS[path]
    without = BASE | beside
    changed = without | (value if isinstance(value, dict) else {path: value})
    mesh = {SPLIT: Mesh(data=2, tensor=2), SECOND: Mesh(node=2, local=2)}.get(path, MESH)
    assert len(observed(json.dumps(changed), mesh)) > 1, "the value is refused"
    assert observed(json.dumps(changed), mesh) != observed(json.dumps(without), mesh)


@pytest.mark.parametrize("to_host", [False, True])
def test_activations_are_split_over_the_axis_of_model_parallelism(to_host: bool) -> None:
    """Without such ranks DeepSpeed splits nothing either. What it splits it moves in parts."""
    file = nested(BASE | {SPLIT: True, TO_HOST: to_host})
    memory = "host" if to_host else "device"
    for mesh, named in ((Mesh(data=2, model=2), {"tensor": "model"}), (MESH, {}), (2, {})):
        plan = fp.deepspeed.from_config(file, mesh=mesh, **named).plan
        found = [each for each in plan.transforms if isinstance(each, (fp.partition_activations, fp.offload))]
        moved = [fp.offload(activations="host", at_least=1)] * to_host
        assert found == ([fp.partition_activations("model", memory=memory, at_least=1)] if named else moved)


def test_schedules_and_scales_reach_the_step() -> None:
    """What the observations above take from the configuration itself is also in its training step."""
    config = fp.deepspeed.from_config(nested(BASE | FP16 | WARMUP), mesh=MESH)
    assert config.optimizer is not None and callable(config.schedule) and config.optimizer.lr is config.schedule
    train = fp.train_step(loss, config.optimizer, MESH, config.plan, **config.options)
    state = train.init(parameters())
    for step in range(3):
        state, metrics = train(state, batch(4, step))
        assert metrics.lr == config.schedule(step) and metrics.loss_scale == 16


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_offloaded_optimizer_has_the_bits_of_the_other_and_its_state_on_the_host(stage: int) -> None:
    """A rank's gradients go to the host in float32, and its new parameters come back in bfloat16."""
    base = BASE | BF16 | WHOLE | {STAGE: stage, TYPE: "AdamW", "bf16.check_grad_overflow": False}
    device = {"zero_optimization.offload_optimizer.device": "cpu"}
    (params, losses, train), (others, as_before, before) = (
        trained(fp.deepspeed.from_config(nested(base | more), mesh=MESH)) for more in (device, {})
    )
    torch.testing.assert_close((params, losses), (others, as_before), rtol=0, atol=0)
    each = sum(leaf.nbytes for leaf in optree.tree_leaves(parameters())) // 2  # per rank
    assert train.program.bytes_moved() == {("device", "host"): each, ("host", "device"): each // 2}
    assert not before.program.bytes_moved()
    assert train.program.memory().peaks["host"] >= 2 * each


def test_the_ratio_of_an_offloaded_optimizer_is_a_share_of_it() -> None:
    ratios = (0.0, 0.5, 1.0)
    plans = [
        fp.deepspeed.from_config(
            nested(BASE | OFFLOADED | {"zero_optimization.offload_optimizer.ratio": ratio}), mesh=MESH
        ).plan
        for ratio in ratios
    ]
    offloaded = [[each for each in plan.transforms if isinstance(each, fp.offload)] for plan in plans]
    assert offloaded == [[], [fp.offload(state="host", fraction=0.5)], [fp.offload(state="host")]]


def test_offloaded_parameters_have_the_bits_of_the_others() -> None:
    file, path = BASE | BF16 | WHOLE | {TYPE: "AdamW"}, "zero_optimization.offload_{}.device"
    both = {path.format("param"): "cpu", path.format("optimizer"): "cpu"}
    (params, losses, train), (others, as_before, _) = (
        trained(fp.deepspeed.from_config(nested(file | more), mesh=MESH)) for more in (both, {})
    )
    torch.testing.assert_close((params, losses), (others, as_before), rtol=0, atol=0)
    assert train.program.memory().alive["parameters"] == 0, "those of the device"


@pytest.mark.every(2)
@pytest.mark.parametrize("apart", [False, True])
def test_nvme_is_a_disk(apart: bool, tmp_path: Path) -> None:
    """The bits of the file without it; a folder for each, or one."""
    names = ("optimizer", "param")
    folders = [tmp_path / (name if apart else "both") for name in names]
    file, path = BASE | BF16 | WHOLE | {TYPE: "AdamW"}, "zero_optimization.offload_{}."
    moved = file | {f"{path}device".format(name): "nvme" for name in names}
    moved |= {f"{path}nvme_path".format(name): str(folder) for name, folder in zip(names, folders, strict=True)}
    with pytest.raises(fp.DiskError, match=r"no block can be made in this folder"):
        fp.deepspeed.from_config(nested(moved), mesh=MESH)
    for folder in {*folders}:
        folder.mkdir()
    config = fp.deepspeed.from_config(nested(moved), mesh=MESH)
    state, parameters = {"state": "disk", "path": str(folders[0])}, {"parameters": "disk", "path": str(folders[1])}
    found = [each for each in config.plan.transforms if isinstance(each, fp.offload)]
    assert found == ([fp.offload(**state), fp.offload(**parameters)] if apart else [fp.offload(**state | parameters)])
    params, losses, train = trained(config)
    others, as_before, _ = trained(fp.deepspeed.from_config(nested(file), mesh=MESH))
    torch.testing.assert_close((params, losses), (others, as_before), rtol=0, atol=0)
    assert train.program.memory().peaks["disk"] == 14 * sum(x.numel() for x in optree.tree_leaves(params)) // 2


def test_a_group_on_disk_has_the_elements_of_the_file() -> None:
    plan = fp.deepspeed.from_config(nested(BASE | ON_DISK | {"zero_optimization.sub_group_size": 100}), mesh=MESH).plan
    assert plan.transforms[-1] == fp.offload(state="disk", path=tempfile.gettempdir(), group=1200)


@pytest.mark.every(2)
@pytest.mark.parametrize("quantised", [False, True])
def test_a_second_partition_is_gathered_within_hosts_alone(quantised: bool) -> None:
    """ZeRO++: parameters cross the slow axis once."""
    block = {f"zero_optimization.zero_quantized_{what}": quantised for what in ("weights", "gradients")}
    mesh, file = Mesh(node=2, local=2), nested(BASE | WHOLE | {SECOND: 2} | block)
    config = fp.deepspeed.from_config(file, mesh=mesh, data=("node", "local"))
    inner = [fp.zero(3, "local", whole_below=1), fp.zero(3, "node", whole_below=1, keep_gathered=True)]
    assert list(config.plan.transforms) == [*inner, *[fp.compress(("node", "local"))] * quantised]
    assert config.train_batch_size == 2 * 4
    _, _, train = trained(config, mesh=mesh)
    gathers = [one for one in train.program.collectives() if one.kind == "all_gather" and "w" in str(one.parameters)]
    found = {(one.axes, one.phase) for one in gathers}
    assert found == {(("node",), "forward"), (("local",), "forward"), (("local",), "backward")}
    assert {one.operand.dtype for one in gathers} == {torch.uint8 if quantised else torch.float32}
