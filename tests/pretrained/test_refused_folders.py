"""Folders that are not read, and parameters that are not written: each is refused by name, with the numbers."""

from __future__ import annotations

import json
import os
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


def with_header(change: Callable[[dict[str, Any], int], Any], more: bytes = b"") -> Callable[[Path], None]:
    """Change the header of a file. A function gets it with the number of bytes of data, and may return another text."""

    def changed(folder: Path) -> None:
        file = folder / "model.safetensors"
        data = file.read_bytes()
        first = 8 + int.from_bytes(data[:8], "little")
        table = json.loads(data[8:first])
        told = change(table, len(data) - first)
        text = (told if isinstance(told, str) else json.dumps(table)).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[first:] + more)

    return changed


def overlap(table: dict[str, Any], _: int) -> None:
    table[Q]["data_offsets"] = table[Q.replace("q_proj", "o_proj")]["data_offsets"]


def beyond(table: dict[str, Any], count: int) -> None:
    begin, end = table[Q]["data_offsets"]
    table[Q]["data_offsets"] = [count, count + end - begin]


def twice(table: dict[str, Any], _: int) -> str:
    return json.dumps(table)[:-1] + f', "{Q}": {json.dumps(table[Q])}}}'


def with_dtype(dtype: torch.dtype) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        tensors[Q] = tensors[Q].to(dtype)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def as_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def as_adapter(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")


def linked(folder: Path) -> None:
    """Have a file in a folder of the index, which is a link to one outside."""
    outside = folder.parent / f"{folder.name}-outside"
    outside.mkdir()
    (folder / FIRST).rename(outside / FIRST)
    (folder / "in").symlink_to(outside)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(f'"{FIRST}"', f'"in/{FIRST}"'))


def named_twice(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"weight_map": {', f'"weight_map": {{"lm_head.weight": "{FIRST}", '))


def in_both(folder: Path) -> None:
    """Have a tensor in two files that the index does not name."""
    from safetensors.torch import load_file, save_file

    for name in (FIRST, FIRST.replace("1-of", "2-of")):
        more = {**load_file(folder / name), "more.weight": torch.ones(2)}
        save_file(more, folder / name, metadata={"format": "pt"})


Q = "model.layers.0.self_attn.q_proj.weight"
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
        r"'NoClass' is no model of transformers .*model_class=",
    ),
    "an architecture that is no model": (
        with_config(architectures=["pipeline"]),
        "'pipeline' is no model of transform",
    ),
    "another architecture": (
        with_config(architectures=["GPT2LMHeadModel"]),
        "GPT2LMHeadModel takes GPT2Config, and its model_type 'llama' is LlamaConfig: correct one",
    ),
    "remote code as a list": (with_config(auto_map=["mine.Model"]), "auto_map: its code is in the folder"),
    "quantized by name": (with_config(quantization_config="awq"), r"quantization_config: .* quantized \(awq\)"),
    "an old key of quantization": (with_config(compression_config={}), r"compression_config: .* quantized \(unknown\)"),
    "a quantized part": (
        with_config(text_config={"quantization_config": {"quant_method": "fp8"}}),
        r"quantization_config: its weights are quantized \(fp8\)",
    ),
    "heads that do not fit": (
        with_config(num_attention_heads=5),
        r"(?s)config.json: .*not a multiple of the number of at",
    ),
    "a dtype of no model": (
        with_config(dtype="int8"),
        r"config.json: LlamaForCausalLM cannot be made of it in torch.int8: ",
    ),
    "no dtype": (with_config(dtype="float33"), r"config.json: AttributeError: .*float33"),
    "another type": (
        with_config(num_hidden_layers="two"),
        r"(?s)config.json: .*'num_hidden_layers' expected int, got str",
    ),
    "8 bits": (
        with_dtype(torch.float8_e4m3fn),
        rf"quantized, or of .* kind .*:\n  {Q}: float8_e4m3fn in the files, float32",
    ),
    "integers": (
        with_dtype(torch.int8),
        f"{Q}: int8 in the files, float32 in the model\nTake the folder of the model bef",
    ),
    "complex numbers": (with_dtype(torch.complex64), f"{Q}: complex64 in the files, float32 in the model"),
    "an adapter": (as_adapter, r"an adapter of peft: give the folder of its base model, and adapt= to add the adapter"),
    "another format": (
        lambda folder: (folder / "model.safetensors").rename(folder / "tf_model.h5"),
        "nor model.safetensors.index.json; it has tf_model.h5",
    ),
    "a checkpoint": (lambda folder: (folder / "model.safetensors").rename(folder / "m.ckpt"), r"as pickles \(m.ckpt\)"),
    "not JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json: it cannot be read as JSON"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "it is JSON of a list, not of an object"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights: neither model.safetensors"),
    "wider": (with_config(intermediate_size=50), r"down_proj.weight: \(32, 48\), in the model \(32, 50\)"),
    "deeper": (with_config(num_hidden_layers=3), r"model.layers.2.input_layernorm.weight: missing"),
    "shallower": (with_config(num_hidden_layers=1), r"layers.1.\S+: unexpected, the model has no such[^$]*and 1 more"),
}
DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (cut, r"ends at byte [0-9]+, and the file has [0-9]+"),
    "an overlap": (
        with_header(overlap),
        r"'\S+_proj.weight' begins at byte \d+, and overlaps the entry before it, which",
    ),
    "a gap": (with_header(beyond, bytes(4096)), r"begins at byte \d+, and leaves a gap: the last one ends at byte \d+"),
    "more data": (with_header(lambda *_: None, b"more"), r"its last entry ends at byte \d+, and the file has \d+"),
    "beyond the end": (with_header(beyond), rf"its entry of '{Q}' ends at byte \d+, and the file has \d+"),
    "a name twice": (with_header(twice), f"it names '{Q}' twice"),
    "an unknown dtype": (
        with_header(lambda table, _: table[Q].update(dtype="F4")),
        f"its entry of '{Q}' has the dtype 'F4'; known are BOOL, ",
    ),
    "another shape": (with_header(lambda table, _: table[Q].update(shape=[3])), f"its entry of '{Q}' is inconsistent"),
    "a header of another file": (
        with_header(lambda *_: "garbage"),
        "not a safetensors file of a checkpoint: Expecting",
    ),
    "nothing": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "its header claims 0 bytes"),
    "a pipe": (as_pipe, "it is a pipe, not a file"),
}
REFUSALS_OF_MANY: dict[str, tuple[Callable[[Path], Any], str]] = {
    "above": (with_map("lm_head.weight", "../x.safetensors"), r"'lm_head.weight' is in '../x.safetensors', outside of"),
    "absolute": (with_map("lm_head.weight", "/etc/passwd"), r"'/etc/passwd', outside of the folder"),
    "a drive": (with_map("lm_head.weight", "C:x"), r"'C:x', outside of the folder"),
    "a folder that is a link": (linked, rf"'in/{FIRST}', outside of the folder"),
    "a name twice": (named_twice, "cannot be read as JSON: it names 'lm_head.weight' twice"),
    "a tensor twice": (in_both, r"'more.weight' is in \S+ and in \S+, and the index does not name it"),
    "no safetensors file": (with_map("lm_head.weight", "x.bin"), "'x.bin', which is no safetensors file"),
    "above, in between": (with_map("lm_head.weight", "a\\..\\..\\b"), "outside of the folder"),
    "no such key": (with_map("more.weight", FIRST), rf"tensors that the files do not have:\n  more.weight in {FIRST}"),
    "a missing file": (lambda folder: (folder / FIRST).unlink(), rf"{FIRST}: No such file"),
    "no map": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
        'its "weight_map" is not an object',
    ),
}


@pytest.mark.parametrize("kind", [*REFUSALS, *DAMAGED])
def test_a_folder_is_refused(kind: str, tmp_path: Path) -> None:
    change, message = {**REFUSALS, **DAMAGED}[kind]
    change(write(tmp_path))
    with pytest.raises(CheckpointError, match=message) as caught:
        fp.load_pretrained(tmp_path, Mesh(data=2), fp.zero(3, "data"))
    assert isinstance(caught.value, DamagedCheckpointError) == (kind in DAMAGED)


@pytest.mark.parametrize("kind", REFUSALS_OF_MANY)
def test_a_folder_of_several_files_is_refused(kind: str, tmp_path: Path) -> None:
    change, message = REFUSALS_OF_MANY[kind]
    change(write(tmp_path, "60KB"))
    assert kind in ("a missing file", "no map", "a folder that is a link") or (tmp_path / FIRST).exists()
    with pytest.raises(CheckpointError, match=message):
        fp.load_pretrained(tmp_path, Mesh(data=2), fp.zero(3, "data"))


def test_files_may_be_links(tmp_path: Path) -> None:
    """As in a cache of the Hub, where a folder of a model has links to files beside it."""
    write(tmp_path / "in", "60KB")
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted((tmp_path / "in").iterdir())):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(Path("..") / "blobs" / str(number))
    _, params = fp.load_pretrained(tmp_path / "in", Mesh(data=2), fp.zero(3, "data"))
    assert torch.equal(params.full()[Q], model_of("Llama")[0].state_dict()[Q])


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
