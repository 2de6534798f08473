"""Keys of ds_config.json without an effect are listed; refused and wrong ones are errors, by key and reason."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

import functional_parallel as fp
from functional_parallel.interop.deepspeed.schema import KEYS
from sharding_specs import Mesh

from ..deepspeed_page import PAGE, with_table
from .configs import (
    BASE,
    BF16,
    CYCLE,
    MESH,
    MICRO,
    OF_SCHEDULER,
    PARAMS,
    SCHEDULER,
    STAGE,
    TYPE,
    WARMUP,
    nested,
)

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


OFFLOAD = "zero_optimization.offload_optimizer."
SECOND = "zero_optimization.zero_hpz_partition_size"
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
    (
        BF16 | {"bf16.bf16_optimizer_states": True},
        r"bf16\.bf16_optimizer_states: it and bf16_master_weights_and_grads must .* same",
    ),
    ({STAGE: 2, "prescale_gradients": True}, r"reduce_scatter: at stage 2 it forbids prescale_gradients"),
    ({"gradient_allreduce_op": "sum"}, r"gradient_allreduce_op: 'sum' is refused: a loss is the mean over the batch"),
    ({"zero_optimization.offload_param": {"device": "disk"}}, r"device: it is 'none' or 'cpu' or 'nvme', not 'disk'"),
    ({f"{OFFLOAD}device": "nvme", STAGE: 2}, r"offload_optimizer\.device: .* from stage 3 on, and stage is 2"),
    ({f"{OFFLOAD}device": "nvme", STAGE: 3}, r"offload_optimizer\.nvme_path: the device 'nvme' needs a folder"),
    ({"zero_optimization.offload_param.device": "nvme", STAGE: 3}, r"offload_param\.nvme_path: the device 'nvme'"),
    ({"zero_optimization.offload_param.device": "cpu", STAGE: 2}, r"offloads it from stage 3 on, and stage is 2"),
    ({f"{OFFLOAD}device": "cpu"}, r"device: DeepSpeed offloads it from stage 1 on, and stage is 0"),
    ({"zero_optimization.cpu_offload": True, f"{OFFLOAD}device": "cpu", STAGE: 1}, r"cpu_offload: it is the old name"),
    (
        {f"{OFFLOAD}device": "cpu", f"{OFFLOAD}ratio": 0.5, STAGE: 2},
        r"ratio: Partial offloading only supported for ZeRO Stage 3\.",
    ),
    ({f"{OFFLOAD}device": "cpu", f"{OFFLOAD}ratio": 1.5, STAGE: 3}, r"ratio: it is a share, from 0 to 1, not 1\.5"),
    ({f"{SECOND}": 8}, r"zero_hpz_partition_size: it needs stage 3, and stage is 0"),
    ({f"{SECOND}": 8, STAGE: 3}, r"size: name a slow and a fast axis, data=\('node', 'local'\), .* local=8"),
    (
        {STAGE: 2, "zero_optimization.zero_quantized_weights": True},
        r"zero_quantized_weights: it needs stage 3, .* is 2",
    ),
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


def test_the_size_of_a_second_partition_is_that_of_the_fast_axis() -> None:
    with pytest.raises(ValueError, match=r"number of ranks of the fast axis 'local', 4, not 2"):
        fp.deepspeed.from_config(
            nested(BASE | {SECOND: 2, STAGE: 3}), mesh=Mesh(node=2, local=4), data=("node", "local")
        )


def test_all_problems_are_reported_at_once() -> None:
    offload = {"device": "cpu", "pin_memory": True}
    wrong = {
        "stage": 4,
        "zeropp_loco_param": {"reset_T": 1024},
        "offload_param": offload,
        "stage3_gather_fp16_weights_on_model_save": True,
    }
    with pytest.raises(ValueError) as caught:
        fp.deepspeed.from_config({"zero_optimization": wrong, "trian_batch_size": 8}, mesh=2)
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "trian_batch_size",
        "zero_optimization.zeropp_loco_param",
        "zero_optimization.stage",
    ]


def test_old_and_other_names_are_known() -> None:
    values = {"zero_optimization": {"stage": 3, "param_persistence_threshold": 7}, "bfloat16": {"enabled": True}}
    config = fp.deepspeed.from_config(nested(BASE) | values, mesh=2)
    assert config.precision == "bf16"
    assert (
        str(fp.deepspeed.from_config(nested(BASE) | {"zero_optimization": True}, mesh=2).plan)
        == "chain(zero(1, 'data'))"
    )
    twice = {"param_persistence_threshold": 7, "stage3_param_persistence_threshold": 7}
    with pytest.raises(ValueError, match="stage3_param_persistence_threshold is given twice"):
        fp.deepspeed.from_config(nested(BASE) | {"zero_optimization": twice}, mesh=2)


def test_the_table_in_the_docs_is_that_of_the_schema() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "run python -m tests.deepspeed_page"
