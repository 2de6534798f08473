"""Comments, batch sizes, "auto" and versions of ds_config.json."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.interop.deepspeed.config import batch_sizes
from functional_parallel.interop.deepspeed.schema import CHANGED, KEYS, defaults

from .configs import (
    ARGUMENTS,
    BASE,
    MESH,
    MICRO,
    OF_SCHEDULER,
    PARAMS,
    SCHEDULER,
    STAGE,
    TYPE,
    nested,
    trained,
)


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
