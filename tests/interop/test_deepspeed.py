"""ds_config.json: every honoured key has an effect, every other key is listed or refused, real files train."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.interop.deepspeed import Config
from functional_parallel.interop.deepspeed.batch import batch_sizes
from functional_parallel.interop.deepspeed.schema import CHANGED, KEYS, defaults
from sharding_specs import Mesh

from ..deepspeed_page import PAGE, with_table

MESH = Mesh(data=2)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=dtype) / 2  # noqa: E731
    return {"layers": [{"w": draw(4, 6), "bias": draw(6)}, {"w": draw(6, 4), "bias": draw(4)}]}


def batch(size: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(step), dtype=dtype)


def loss(params: dict[str, Any], x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = torch.tanh(x @ layer["w"] + layer["bias"])
    return ((x - 1) ** 2).mean()


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration from its values by path."""
    found: dict[str, Any] = {}
    for path, value in flat.items():
        *blocks, name = path.split(".")
        inside = found
        for block in blocks:
            inside = inside.setdefault(block, {})
        inside[name] = value
    return found


def trained(config: Config, steps: int = 3) -> tuple[Any, list[Tensor], Any]:
    """Return the parameters after some steps, the losses, and the training step."""
    assert config.optimizer is not None
    train = fp.train_step(loss, config.optimizer, MESH, config.plan, **config.options)
    state, losses = train.init(parameters()), []
    for _ in range(steps):
        state, metrics = train(state, batch(config.train_batch_size, 0))
        losses.append(metrics.loss)
    return train.params(state), losses, train


# -----------------------------------------------------------------------------
# Every honoured key has an effect
# -----------------------------------------------------------------------------

MICRO, TYPE, PARAMS = "train_micro_batch_size_per_gpu", "optimizer.type", "optimizer.params."
STAGE, SCHEDULER, OF_SCHEDULER = "zero_optimization.stage", "scheduler.type", "scheduler.params."
BASE = {MICRO: 2, TYPE: "SGD", f"{PARAMS}lr": 0.1, "gradient_clipping": 0.0}
FP16 = {"fp16.enabled": True, STAGE: 1, "fp16.initial_scale_power": 4}
BF16 = {"bf16.enabled": True}
ADAM, LAMB = {TYPE: "Adam", f"{PARAMS}weight_decay": 0.5}, {TYPE: "Lamb"}
MOMENTUM = {f"{PARAMS}momentum": 0.9}
WHOLE = {STAGE: 3, "zero_optimization.stage3_param_persistence_threshold": 0}
WARMUP = {SCHEDULER: "WarmupLR", f"{OF_SCHEDULER}warmup_num_steps": 4}
COSINE = WARMUP | {SCHEDULER: "WarmupCosineLR", f"{OF_SCHEDULER}total_num_steps": 8}
CYCLE = {SCHEDULER: "OneCycle", f"{OF_SCHEDULER}cycle_min_lr": 0.1, f"{OF_SCHEDULER}cycle_max_lr": 1.0}
CYCLE |= {f"{OF_SCHEDULER}cycle_first_step_size": 2, f"{OF_SCHEDULER}cycle_momentum": False}
DECAYING = CYCLE | {f"{OF_SCHEDULER}decay_lr_rate": 0.5, f"{OF_SCHEDULER}decay_step_size": 2}
TEST = {SCHEDULER: "LRRangeTest", f"{OF_SCHEDULER}lr_range_test_step_size": 4}
MASTERS = {"bf16.bf16_master_weights_and_grads": True}
STATES = {"bf16.bf16_optimizer_states": True}

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
    "zero_optimization.reduce_bucket_size": ({}, 10),
    "zero_optimization.stage3_prefetch_bucket_size": (WHOLE, 0),
    "zero_optimization.stage3_param_persistence_threshold": ({STAGE: 3}, 10),
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
def observed(text: str) -> tuple[Any, ...]:
    """Return what a configuration leads to: program, parameters, rates and loss scales; or its error."""
    try:
        config = fp.deepspeed.from_config(nested(json.loads(text)), mesh=MESH)
    except ValueError as error:
        return (str(error),)
    params, _, train = trained(config)
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
    assert len(observed(json.dumps(changed))) > 1, "the value is refused"
    assert observed(json.dumps(changed)) != observed(json.dumps(without))


def test_schedules_and_scales_reach_the_step() -> None:
    """What the observations above take from the configuration itself is also in its training step."""
    config = fp.deepspeed.from_config(nested(BASE | FP16 | WARMUP), mesh=MESH)
    assert config.optimizer is not None and callable(config.schedule) and config.optimizer.lr is config.schedule
    train = fp.train_step(loss, config.optimizer, MESH, config.plan, **config.options)
    state = train.init(parameters())
    for step in range(3):
        state, metrics = train(state, batch(4, step))
        assert metrics.lr == config.schedule(step) and metrics.loss_scale == 16


# -----------------------------------------------------------------------------
# Keys without an effect, refused keys, wrong files
# -----------------------------------------------------------------------------

SAMPLES = {
    "bool": True,
    "int": 2,
    "count": 2,
    "integer": 2,
    "number": 0.5,
    "list": ["x"],
    "text": "x",
    "block": {"x": 1},
}


def sample(path: str) -> Any:
    """Return a legal value of a key that is not its default."""
    key = KEYS[path]
    if isinstance(key.kind, tuple):
        return next(choice for choice in reversed(key.kind) if choice != key.default)
    return not key.default if key.kind == "bool" else SAMPLES[key.kind]


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.treatment == "not applicable"])
def test_a_key_that_is_not_applicable_is_listed_and_changes_nothing(path: str) -> None:
    with_it = fp.deepspeed.from_config(nested(BASE | {path: sample(path)}), mesh=MESH)
    without = fp.deepspeed.from_config(nested(BASE), mesh=MESH)
    assert with_it.not_applicable == {path: KEYS[path].text}
    assert f"{path}: {KEYS[path].text}" in str(with_it)
    assert str(with_it).partition("\n  not applicable")[0] == str(without)


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.treatment == "refused"])
def test_a_refused_key_is_refused_by_name_and_accepted_where_it_is_off(path: str) -> None:
    key, more = KEYS[path], CYCLE if path == f"{OF_SCHEDULER}cycle_momentum" else {}
    with pytest.raises(ValueError, match=rf"{re.escape(path)}: .* is refused: {re.escape(key.text)}"):
        fp.deepspeed.from_config(nested(BASE | more | {path: sample(path)}), mesh=MESH)
    fp.deepspeed.from_config(nested(BASE | more | {path: key.default}), mesh=MESH)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"gradient_clipp1ng": 1.0}, r"gradient_clipp1ng: unknown key; the nearest is gradient_clipping"),
    ({"zero_optimization.stge": 2}, r"zero_optimization\.stge: unknown key; the nearest is zero_optimization\.stage"),
    ({f"{PARAMS}beta": [0.9, 0.9]}, r"optimizer\.params\.beta: unknown key; the nearest is optimizer\.params\.betas"),
    ({STAGE: 4}, r"zero_optimization\.stage: Input should be 0, 1, 2 or 3, not 4"),
    ({STAGE: "2"}, r"zero_optimization\.stage: it is an integer of at least 0, not '2'"),
    ({"zero_optimization.reduce_bucket_size": 1.5}, r"reduce_bucket_size: it is an integer of at least 0, not 1\.5"),
    ({"zero_optimization.reduce_bucket_size": -1}, r"reduce_bucket_size: it is an integer of at least 0, not -1"),
    (BF16 | {"fp16.enabled": True}, r"bf16, fp16: bfloat16 and fp16 modes cannot be simultaneously enabled"),
    ({"fp16.loss_scale": -1.0}, r"fp16\.loss_scale: it is a finite number of at least 0, not -1\.0"),
    ({"fp16.loss_scale": True}, r"fp16\.loss_scale: it is a finite number of at least 0, not True"),
    ({"fp16.loss_scale": math.nan}, r"fp16\.loss_scale: .* not nan"),
    ({"fp16.enabled": True, "fp16.min_loss_scale": 0}, r"fp16: min_loss_scale=0 .* above 0 for a dynamic scale"),
    (BF16 | STATES, r"bf16\.bf16_optimizer_states: it and bf16_master_weights_and_grads must have the same value"),
    ({STAGE: 2, "prescale_gradients": True}, r"reduce_scatter: at stage 2 it forbids prescale_gradients"),
    ({"gradient_allreduce_op": "sum"}, r"gradient_allreduce_op: 'sum' is refused: a loss is the mean over the batch"),
    ({"zero_optimization.offload_param": {"device": "disk"}}, r"device: it is 'none' or 'cpu' or 'nvme', not 'disk'"),
    ({"zero_optimization.zero_hpz_partition_size": 8}, r"zero_hpz_partition_size: 8 is refused: ZeRO\+\+"),
    ({TYPE: "OneBitAdam"}, r"optimizer\.type: 'OneBitAdam': 1-bit communication is refused; the types are Adam, "),
    ({TYPE: "Adamm"}, r"optimizer\.type: 'Adamm': .*; the nearest is Adam$"),
    ({f"{PARAMS}max_grad_norm": 1.0}, r"params\.max_grad_norm: 1\.0 is refused: switch to 'gradient_clipping'"),
    ({f"{PARAMS}nesterov": True, TYPE: "Adam"}, r"optimizer\.params\.nesterov: Adam does not have it; .* lr, betas"),
    ({SCHEDULER: "WarmupDecayLR"}, r"scheduler\.params\.total_num_steps: required by WarmupDecayLR"),
    ({SCHEDULER: "OneCycle"}, r"cycle_min_lr, .*cycle_max_lr, scheduler\.params\.cycle_momentum: required by OneCycle"),
    ({SCHEDULER: "CosineLR"}, r"scheduler\.type: 'CosineLR': the types are WarmupLR.* nearest is WarmupCosineLR"),
    (WARMUP | {f"{OF_SCHEDULER}warmup_num_steps": 0}, r"warmup_num_steps: it is an integer of at least 1, not 0"),
    ({MICRO: None}, r"Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided"),
    ({"train_batch_size": 33}, r"train_batch_size is not equal to .*: 33 != 2 · 8 · 2"),
    ({"communication_data_type": "fp16"}, r"communication_data_type: sums in low precision need bf16 or fp16"),
    ({TYPE: None, SCHEDULER: "WarmupLR"}, r"scheduler: it needs an optimizer in the file"),
    ({"bf16": True}, r"bf16: it is an object, not True"),
    ({f"{PARAMS}lr": "auto"}, r"optimizer\.params\.lr: nothing fills \"auto\"; give learning_rate=…"),
    (
        {"zero_optimization.stage3_max_live_parameters": "auto"},
        r"live_parameters: nothing fills \"auto\"; write a value",
    ),
]


@pytest.mark.parametrize(("values", "reason"), WRONG, ids=[reason[:40] for _, reason in WRONG])
def test_a_wrong_file_is_refused_by_key_and_reason(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"this DeepSpeed configuration is not accepted:\n  (.*\n  )*.*{reason}"):
        fp.deepspeed.from_config(nested(BASE | values), mesh=MESH)


def test_all_problems_are_reported_at_once() -> None:
    offload = {"device": "cpu", "pin_memory": True}
    wrong = {"stage": 4, "offload_optimizer": offload, "stage3_gather_fp16_weights_on_model_save": True}
    with pytest.raises(ValueError) as caught:
        fp.deepspeed.from_config({"zero_optimization": wrong, "trian_batch_size": 8}, mesh=2)
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "trian_batch_size",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.stage",
    ]


def test_old_and_other_names_are_known() -> None:
    values = {"zero_optimization": {"stage": 3, "param_persistence_threshold": 7}, "bfloat16": {"enabled": True}}
    config = fp.deepspeed.from_config(nested(BASE) | values, mesh=2)
    assert config.precision == "bf16"
    assert (
        repr(fp.deepspeed.from_config(nested(BASE) | {"zero_optimization": True}, mesh=2).plan)
        == "chain(zero(1, 'data'))"
    )
    twice = {"param_persistence_threshold": 7, "stage3_param_persistence_threshold": 7}
    with pytest.raises(ValueError, match="stage3_param_persistence_threshold is given twice"):
        fp.deepspeed.from_config(nested(BASE) | {"zero_optimization": twice}, mesh=2)


# -----------------------------------------------------------------------------
# Files, batch sizes, "auto", versions
# -----------------------------------------------------------------------------


def test_comments_and_trailing_commas_are_read(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(
        '{ // a\n "train_batch_size": 4, # b\n ## c\n "wandb": {"x": "http://#//,}", /* d\n */ "y": [1, 2,],},\n}'
    )
    config = fp.deepspeed.from_config(file, mesh=2, optimizer=fp.optim.sgd(0.1))
    assert config.micro_batch_size == 2 and list(config.not_applicable) == ["wandb"]
    file.write_text('{\n "train_batch_size": 4 // no comma\n "wandb": {}}')
    with pytest.raises(ValueError, match=r"ds_config\.json, line 3: Expecting ',' delimiter: '\"wandb\": \{\}\}'"):
        fp.deepspeed.from_config(file, mesh=2)
    file.write_text('{"bf16": {"enabled": true, "enabled": false}}')
    with pytest.raises(ValueError, match="Duplicate keys in DeepSpeed config: enabled"):
        fp.deepspeed.from_config(str(file), mesh=2)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ((32, 16, 1), (32, 16, 1)),
        ((32, 8, 2), (32, 8, 2)),
        ((33, 17, 2), None),
        ((32, 18, 1), None),
        ((32, 8, None), (32, 8, 2)),
        ((32, None, 4), (32, 4, 4)),
        ((None, 8, 3), (48, 8, 3)),
        ((32, None, None), (32, 16, 1)),
        ((None, 8, None), (16, 8, 1)),
        ((None, None, 2), None),
        ((33, None, None), None),
    ],
)
def test_batch_sizes_are_deepspeeds(given: tuple[Any, ...], want: tuple[int, ...] | None) -> None:
    """DeepSpeed's own cases on two ranks, and its six ways to complete them."""
    if want is not None:
        assert batch_sizes(*given, ranks=2) == want
        return
    with pytest.raises(ValueError, match=r"not equal to|needs to be provided"):
        batch_sizes(*given, ranks=2)


def test_a_batch_of_8_point_0_is_8() -> None:
    assert fp.deepspeed.from_config(nested(BASE | {"train_batch_size": 8.0}), mesh=2).accumulation == 2


ARGUMENTS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "learning_rate": 0.01,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.1,
    "warmup_steps": 3,
    "max_steps": 9,
    "fp16": False,
    "bf16": True,
}
AUTO = {
    "train_batch_size": "auto",
    MICRO: "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16.enabled": "auto",
    "bf16.enabled": "auto",
    TYPE: "AdamW",
    **{f"{PARAMS}{name}": "auto" for name in ("lr", "betas", "eps", "weight_decay")},
    SCHEDULER: "WarmupDecayLR",
    **{
        f"{OF_SCHEDULER}{name}": "auto"
        for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    },
    STAGE: 3,
    "zero_optimization.reduce_bucket_size": "auto",
    "zero_optimization.stage3_prefetch_bucket_size": "auto",
    "zero_optimization.stage3_param_persistence_threshold": "auto",
}
WRITTEN = AUTO | {
    "train_batch_size": 8,
    MICRO: 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "fp16.enabled": False,
    "bf16.enabled": True,
    f"{PARAMS}lr": 0.01,
    f"{PARAMS}betas": [0.8, 0.9],
    f"{PARAMS}eps": 1e-6,
    f"{PARAMS}weight_decay": 0.1,
    f"{OF_SCHEDULER}warmup_min_lr": 0.0,
    f"{OF_SCHEDULER}warmup_max_lr": 0.01,
    f"{OF_SCHEDULER}warmup_num_steps": 3,
    f"{OF_SCHEDULER}total_num_steps": 9,
    "zero_optimization.reduce_bucket_size": 16,
    "zero_optimization.stage3_prefetch_bucket_size": 14,
    "zero_optimization.stage3_param_persistence_threshold": 40,
}


@pytest.mark.parametrize("given", [{"arguments": SimpleNamespace(**ARGUMENTS)}, ARGUMENTS], ids=["object", "keywords"])
def test_auto_is_filled_as_written_out(given: dict[str, Any]) -> None:
    ours = fp.deepspeed.from_config(nested(AUTO), mesh=MESH, hidden_size=4, **given)
    written = fp.deepspeed.from_config(nested(WRITTEN), mesh=MESH)
    assert str(ours) == str(written)
    for mine, theirs in zip(trained(ours)[:2], trained(written)[:2], strict=True):
        assert all(map(torch.equal, optree.tree_leaves(mine), optree.tree_leaves(theirs)))


def test_every_auto_that_nothing_fills_is_listed() -> None:
    with pytest.raises(ValueError) as caught:
        fp.deepspeed.from_config(nested(AUTO), mesh=2, per_device_train_batch_size=1, max_grad_norm=1.0)
    missing = re.findall(r"\n  (\S+): nothing fills \"auto\"; give (\S+=…)", str(caught.value))
    assert len(missing) == 13 and ("zero_optimization.reduce_bucket_size", "hidden_size=…") in missing


def test_values_that_mismatch_the_arguments_are_listed() -> None:
    wrong = WRITTEN | {f"{PARAMS}lr": 0.02, MICRO: 4, "train_batch_size": 16}
    with pytest.raises(
        ValueError, match=r"per_gpu: 4 mismatches .*gives 2; .*\n  .*lr: 0\.02 mismatches learning_rate"
    ):
        fp.deepspeed.from_config(nested(wrong), mesh=2, arguments=SimpleNamespace(**ARGUMENTS))


def test_the_clip_of_accelerate_and_the_rate_of_the_file_fill_auto() -> None:
    values = {"gradient_clipping": "auto", SCHEDULER: "WarmupLR", f"{OF_SCHEDULER}warmup_max_lr": "auto"}
    config = fp.deepspeed.from_config(nested(BASE | values | {f"{OF_SCHEDULER}warmup_num_steps": 2}), mesh=2)
    assert config.clip == 1.0 and callable(config.schedule) and config.schedule(5) == 0.1


def test_steps_of_the_arguments_of_transformers() -> None:
    """`max_steps` of -1 is unknown, and a ratio of warm-up steps is computed from it."""
    arguments = SimpleNamespace(**ARGUMENTS | {"max_steps": -1}, get_warmup_steps=lambda steps: steps // 4)
    with pytest.raises(ValueError, match="total_num_steps: nothing fills"):
        fp.deepspeed.from_config(nested(AUTO), mesh=2, hidden_size=4, arguments=arguments)
    config = fp.deepspeed.from_config(nested(AUTO), mesh=2, hidden_size=4, arguments=arguments, max_steps=20)
    assert callable(config.schedule)
    rates = [float(config.schedule(step)) for step in (4, 5, 6, 7)]  # the end of 5 steps, counted from -1
    assert rates[0] < rates[1] == rates[2] > rates[3]


def test_an_argument_that_fills_nothing_is_an_error() -> None:
    with pytest.raises(
        TypeError, match=r"from_config\(lerning_rate=…\): the arguments that fill \"auto\" are adam_beta1"
    ):
        fp.deepspeed.from_config(nested(BASE), mesh=2, lerning_rate=0.1)


@pytest.mark.parametrize("path", CHANGED)
def test_a_version_selects_its_defaults(path: str) -> None:
    since, old = CHANGED[path]
    *same, last = map(int, since.split("."))
    before = ".".join(map(str, (*same, last - 1)))
    assert defaults(before)[path] == old != defaults(since)[path] == KEYS[path].default


def test_a_file_without_clipping_is_clipped_since_0_19_3() -> None:
    base = {path: value for path, value in BASE.items() if path != "gradient_clipping"}
    config = {
        version: fp.deepspeed.from_config(nested(base), mesh=2, deepspeed_version=version)
        for version in ("0.19.2", "0.19.3")
    }
    assert [each.clip for each in config.values()] == [None, 1.0]
    with pytest.raises(ValueError, match="write the release that the file is for"):
        fp.deepspeed.from_config(nested(base), mesh=2, deepspeed_version="new")


# -----------------------------------------------------------------------------
# Real files
# -----------------------------------------------------------------------------

FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "minimal, with comments": (
        """{
            ## filled by the trainer
            "train_micro_batch_size_per_gpu": "auto",  // per GPU
            "zero_optimization": {"stage": 3}
        }""",
        {"per_device_train_batch_size": 2, "optimizer": fp.optim.adamw(1e-2)},
    ),
    "ZeRO-2": (
        """{
            "zero_optimization": {"stage": 2, "allgather_partitions": true, "allgather_bucket_size": 2e8,
                "overlap_comm": true, "reduce_scatter": true, "reduce_bucket_size": 2e8, "contiguous_gradients": true},
            "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto", "steps_per_print": 2000, "wall_clock_breakdown": false
        }""",
        {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 1.0,
            "optimizer": fp.optim.adamw(1e-2),
        },
    ),
    "transformers, ZeRO-3": (
        """{
            "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
                "hysteresis": 2, "min_loss_scale": 1},
            "bf16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
            "scheduler": {"type": "WarmupLR",
                "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "pin_memory": true},
                "offload_param": {"device": "none", "pin_memory": true}, "overlap_comm": true,
                "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": true},
            "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
            "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
        }""",
        ARGUMENTS | {"hidden_size": 4},
    ),
    "DeepSpeed's CIFAR tutorial": (
        """{
            "train_batch_size": 16, "steps_per_print": 2000,
            "optimizer": {"type": "Adam",
                "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
            "scheduler": {"type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
            "gradient_clipping": 1.0, "prescale_gradients": false,
            "fp16": {"enabled": true, "fp16_master_weights_and_grads": false, "loss_scale": 0,
                "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15},
            "wall_clock_breakdown": false,
            "zero_optimization": {"stage": 1, "allgather_partitions": true, "reduce_scatter": true,
                "allgather_bucket_size": 50000000, "reduce_bucket_size": 50000000, "overlap_comm": true,
                "contiguous_gradients": true, "cpu_offload": false}
        }""",
        {},
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_real_file_trains(name: str, tmp_path: Path) -> None:
    text, given = FILES[name]
    (tmp_path / "ds_config.json").write_text(text)
    config = fp.deepspeed.from_config(tmp_path / "ds_config.json", mesh=MESH, **given)
    _, losses, _ = trained(config, 20)
    assert losses[-1] < losses[0]
    assert set(config.not_applicable) == {
        path
        for path in flat_paths(json.loads(re.sub("##.*|//.*", "", text)))
        if KEYS[path].treatment == "not applicable"
    }


def flat_paths(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    paths: list[str] = []
    for name, value in config.items():
        paths += flat_paths(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]
    return paths


EQUAL = {
    "train_batch_size": 8,
    MICRO: 2,
    "gradient_clipping": 0.1,
    STAGE: 2,
    TYPE: "AdamW",
    f"{PARAMS}lr": 0.05,
    f"{PARAMS}weight_decay": 0.1,
    SCHEDULER: "WarmupLR",
    f"{OF_SCHEDULER}warmup_num_steps": 4,
    f"{OF_SCHEDULER}warmup_max_lr": 0.05,
    f"{OF_SCHEDULER}warmup_type": "linear",
}


def by_hand(backward: Callable[[Tensor], None], params: Any, steps: int) -> list[float]:
    """Return the losses of a loop in torch with AdamW, clipping and DeepSpeed's linear warm-up."""
    leaves = optree.tree_leaves(params)
    optimizer, losses = torch.optim.AdamW(leaves, weight_decay=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(params, batch(8, step, torch.float64))
        value.backward()
        losses.append(value.item())
        torch.nn.utils.clip_grad_norm_(leaves, 0.1)
        optimizer.param_groups[0]["lr"] = 0.05 * min(max(step - 1, 0) / 4, 1)
        optimizer.step()
    return losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_file_trains_as_a_loop_in_torch(stage: int) -> None:
    config = fp.deepspeed.from_config(nested(EQUAL | {STAGE: stage}), mesh=MESH)
    assert config.optimizer is not None
    train = fp.train_step(loss, config.optimizer, MESH, config.plan, **config.options)
    state, losses = train.init(parameters(torch.float64)), []
    for step in range(8):
        state, metrics = train(state, batch(8, step, torch.float64))
        losses.append(metrics.loss.item())
    params = optree.tree_map(lambda leaf: leaf.requires_grad_(), parameters(torch.float64))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(by_hand(Tensor.backward, params, 8)))


def test_a_file_trains_as_in_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps of DeepSpeed itself, on one rank on the CPU."""
    deepspeed = pytest.importorskip("deepspeed", reason="deepspeed is not installed, so it is not compared")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29555")
    print("DeepSpeed", deepspeed.__version__)
    values = nested(EQUAL | {MICRO: 8, f"{PARAMS}torch_adam": True})
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4), torch.nn.Tanh())
    start = {name: leaf.detach().clone() for name, leaf in model.named_parameters()}
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=values)
    theirs = []
    for step in range(5):
        value = ((engine(batch(8, step)) - 1) ** 2).mean()
        engine.backward(value)
        engine.step()
        theirs.append(value.item())
    config = fp.deepspeed.from_config(values, mesh=Mesh(data=1), deepspeed_version=deepspeed.__version__)
    call = lambda params, x: ((torch.func.functional_call(model, params, (x,)) - 1) ** 2).mean()  # noqa: E731
    assert config.optimizer is not None
    train = fp.train_step(call, config.optimizer, Mesh(data=1), config.plan, **config.options)
    state, ours = train.init(start), []
    for step in range(5):
        state, metrics = train(state, batch(8, step))
        ours.append(metrics.loss.item())
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_table_in_the_docs_is_that_of_the_schema() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "run python -m tests.deepspeed_page"
