"""The configs of a written folder say what it has, and old files beside new ones are not read, as by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.errors import CheckpointError
from sharding_specs import Mesh

from .bags import model_of

transformers = pytest.importorskip("transformers")


def loaded(folder: Path, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    fn, params = fp.load_pretrained(folder, Mesh(), **options)
    return fn, params.full()


def test_a_single_file_is_read_before_an_old_index(tmp_path: Path) -> None:
    model = model_of("Llama")[0]
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    old = {path.name: path.read_bytes() for path in tmp_path.glob("*-of-*")}
    assert len(old) > 1
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    model.save_pretrained(tmp_path)  # removes the files, and not their index
    assert (tmp_path / "model.safetensors.index.json").exists()
    for files in ({}, old):
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        assert torch.equal(loaded(tmp_path)[1]["lm_head.weight"], model.lm_head.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_config_has_the_dtype_of_the_parameters(dtype: torch.dtype, tmp_path: Path) -> None:
    model_of("Llama")[0].save_pretrained(tmp_path / "in")
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    fn, full = loaded(tmp_path / "in", dtype=other)
    params = {name: x.to(dtype) + 2**-12 for name, x in full.items()}
    fp.save_pretrained(params, tmp_path / "out", fn)
    again = loaded(tmp_path / "out")[1]
    assert all(x.dtype == dtype and torch.equal(x, params[name]) for name, x in again.items())


def test_a_changed_config_of_generation_is_written(tmp_path: Path) -> None:
    model = model_of("Llama")[0]
    model.save_pretrained(tmp_path / "in")
    fn, full = loaded(tmp_path / "in")
    fn.module.generation_config.eos_token_id = 9
    fp.save_pretrained(full, tmp_path / "out", fn)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 9
    fn.module.generation_config.temperature = 0.5  # without do_sample, which transformers does not write
    with pytest.raises(CheckpointError, match="do_sample"):
        fp.save_pretrained(full, tmp_path / "wrong", fn)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in", "out"]


def test_files_of_a_folder_that_is_no_model_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "notes.txt").write_text("of a run")
    monkeypatch.chdir(tmp_path)
    model = model_of("Llama")[0]
    model.config.name_or_path = "gpt2"  # as of the Hub
    fn, params = fp.functional(model)
    fp.save_pretrained(params, "out", fn)
    assert not (tmp_path / "out" / "notes.txt").exists()
    with pytest.raises(CheckpointError, match=r"'\.' names no new folder"):
        fp.save_pretrained(params, ".", fn)
