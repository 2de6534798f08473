"""Folders that are not read, and parameters that are not written: each is refused by name, with the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.errors import CheckpointError, DamagedCheckpointError
from sharding_specs import Mesh

from .bags import model_of

transformers = pytest.importorskip("transformers")


def write(folder: Path, max_file: str = "5GB") -> Path:
    model_of("Llama")[0].save_pretrained(folder, max_shard_size=max_file)
    return folder


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return change


def with_map(key: str, name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        found = json.loads(index.read_text())
        found["weight_map"][key] = name
        index.write_text(json.dumps(found))

    return change


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


FIRST = "model-00001-of-00002.safetensors"
REFUSALS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickles": (as_pickle, r"as pickles \(pytorch_model.bin\), and loading one can run any code.*save_pretrained"),
    "remote code": (
        with_config(auto_map={"AutoModel": "mine.Model"}),
        r"auto_map: its code .*\(mine.Model\).*model_cla",
    ),
    "quantized": (
        with_config(quantization_config={"quant_method": "gptq"}),
        r"quantized \(gptq\), which is not suppor",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "unknown type": (with_config(model_type="nobodys"), r"does not know model_type 'nobodys': take a version"),
    "no architecture": (
        with_config(architectures=["NoClass"]),
        r"'NoClass' is no class of transformers .*model_class=",
    ),
    "not JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json: it cannot be read as JSON"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "it is JSON of a list, not of an object"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights: neither model.safetensors"),
    "cut": (cut, r"ends at byte [0-9]+, and the file has [0-9]+"),
    "wider": (with_config(intermediate_size=50), r"down_proj.weight: \(32, 48\), in the model \(32, 50\)"),
    "deeper": (with_config(num_hidden_layers=3), r"model.layers.2.input_layernorm.weight: missing"),
    "shallower": (with_config(num_hidden_layers=1), r"layers.1.\S+: unexpected, the model has no such[^$]*and 1 more"),
}
REFUSALS_OF_MANY: dict[str, tuple[Callable[[Path], Any], str]] = {
    "above": (with_map("lm_head.weight", "../x.safetensors"), r"'lm_head.weight' is in '../x.safetensors', outside of"),
    "absolute": (with_map("lm_head.weight", "/etc/passwd"), r"'/etc/passwd', outside of the folder"),
    "a drive": (with_map("lm_head.weight", "C:x"), r"'C:x', outside of the folder"),
    "above, in between": (with_map("lm_head.weight", "a\\..\\..\\b"), "outside of the folder"),
    "no such key": (with_map("more.weight", FIRST), rf"tensors that the files do not have:\n  more.weight in {FIRST}"),
    "a missing file": (lambda folder: (folder / FIRST).unlink(), rf"{FIRST}: No such file"),
    "no map": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
        'its "weight_map" is not an object',
    ),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_folder_is_refused(kind: str, tmp_path: Path) -> None:
    change, message = REFUSALS[kind]
    change(write(tmp_path))
    with pytest.raises(CheckpointError, match=message) as caught:
        fp.load_pretrained(tmp_path, Mesh(data=2), fp.zero(3, "data"))
    assert isinstance(caught.value, DamagedCheckpointError) == (kind == "cut")


@pytest.mark.parametrize("kind", REFUSALS_OF_MANY)
def test_a_folder_of_several_files_is_refused(kind: str, tmp_path: Path) -> None:
    change, message = REFUSALS_OF_MANY[kind]
    change(write(tmp_path, "60KB"))
    assert kind in ("a missing file", "no map") or (tmp_path / FIRST).exists()
    with pytest.raises(CheckpointError, match=message):
        fp.load_pretrained(tmp_path, Mesh(data=2), fp.zero(3, "data"))


def test_what_is_no_folder() -> None:
    with pytest.raises(CheckpointError, match=r"meta-llama/Llama-3 is not a folder; huggingface_hub.snapshot_download"):
        fp.load_pretrained("meta-llama/Llama-3", Mesh())


def test_a_class_of_its_own_takes_the_place_of_remote_code(tmp_path: Path) -> None:
    with_config(auto_map={"AutoModel": "mine.Model"})(write(tmp_path))
    fn, _ = fp.load_pretrained(tmp_path, Mesh(), model_class=transformers.LlamaForCausalLM)
    assert type(fn.module) is transformers.LlamaForCausalLM
    fn, _ = fp.load_pretrained(tmp_path, Mesh(), model_class=transformers.AutoModelForCausalLM)
    assert type(fn.module) is transformers.LlamaForCausalLM


def test_stacks_of_a_pipeline_are_refused(tmp_path: Path) -> None:
    from sharding_specs import P

    plan = fp.pipeline("pipe", {"lm_head.weight": P("pipe")}, microbatches=1)
    with pytest.raises(ValueError, match=r"has no stacks of layers: leave specs= of fp.pipeline out"):
        fp.load_pretrained(write(tmp_path), Mesh(pipe=2), plan)


def test_a_folder_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    fn, params = fp.load_pretrained(write(tmp_path / "in"), Mesh())
    with pytest.raises(CheckpointError, match="in exists: give save_pretrained a new folder"):
        fp.save_pretrained(params, tmp_path / "in", fn)
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


def test_other_parameters_are_not_written(tmp_path: Path) -> None:
    fn, params = fp.load_pretrained(write(tmp_path / "in"), Mesh())
    full = params.full()
    wrong = {**full, "lm_head.weight": torch.ones(3, 3), "mine": torch.ones(1)}
    wrong.pop("model.norm.weight")
    with pytest.raises(CheckpointError) as caught:
        fp.save_pretrained(wrong, tmp_path / "out", fn)
    for line in ("model.norm.weight: missing", "mine: unexpected", "lm_head.weight: (3, 3), in the model (64, 32)"):
        assert line in str(caught.value)
    with pytest.raises(TypeError, match="fn is no function of a model of transformers, but of Linear"):
        fp.save_pretrained(full, tmp_path / "out", fp.functional(torch.nn.Linear(2, 2))[0])
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_reported_and_leaves_nothing_under_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn, params = fp.load_pretrained(write(tmp_path / "in"), Mesh(data=2), fp.zero(3, "data"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("functional_parallel.checkpoint.disk.Disk.write", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        fp.save_pretrained(params, tmp_path / "out", fn)
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


def test_without_transformers_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    write(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"need transformers 5 .*pip install 'functional-parallel\[hugging-face\]"
    ):
        fp.load_pretrained(tmp_path, Mesh())
