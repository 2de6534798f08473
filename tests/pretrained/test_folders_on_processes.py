"""Folders on real processes: each reads its shards alone, as the operating system counts, and writes its share."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, P, local_shape, rules
from tests.layout_of_code import ROOT
from tests.processes import run_on_processes

from .bags import config_of, model_of

transformers = pytest.importorskip("transformers")

PLANS: dict[str, tuple[Mesh, Any]] = {
    "zero": (Mesh(data=2), fp.zero(3, "data")),
    "tensor": (Mesh(tensor=2), fp.tensor_parallel("tensor", rules.llama("tensor"))),
    "pipe": (Mesh(pipe=2), fp.pipeline("pipe", microbatches=2)),
}
TOKENS = torch.arange(32).reshape(4, 8) % 64


def on_a_rank(rank: int, folder: str, small: str, names: tuple[str, ...]) -> list[tuple[int, int, float]]:
    found = []
    for name in names:
        mesh, plan = PLANS[name]
        fp.load_pretrained(small, mesh, plan)  # imports the model's code, which are reads too
        before = _read_bytes()
        fn, params = fp.load_pretrained(folder, mesh, plan)
        found.append((_read_bytes() - before, _held_bytes(params, rank), _loss_of_a_step(fn, params, mesh, plan, name)))
        fp.save_pretrained(params, f"{folder}-{name}", fn)
    return found


def _loss_of_a_step(fn: Any, params: fp.Sharded, mesh: Mesh, plan: Any, name: str) -> float:
    def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = fn(params, input_ids=tokens, labels=tokens, use_cache=False).loss
        return value

    train = fp.train_step(loss, fp.optim.sgd(0.1), mesh, plan)
    _, metrics = train(train.init(params, batch=TOKENS), TOKENS)
    return float(metrics.loss)


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def _held_bytes(params: fp.Sharded, rank: int) -> int:
    total = 0
    for (name, spec), handle in zip(sorted(params.specs.items()), params.handles, strict=True):
        holders = getattr(handle, "holders", None)
        if holders is None or rank in holders:
            shape = params.shapes[name].shape
            total += math.prod(local_shape(shape, P(*spec.dims), params.mesh)) * params.shapes[name].element_size()
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="/proc has the bytes that a process reads")
@pytest.mark.parametrize("names", [("pipe",), pytest.param(("zero", "tensor"), marks=pytest.mark.slow)], ids=str)
def test_each_process_reads_its_shards(names: tuple[str, ...], tmp_path: Path) -> None:
    config = config_of("Llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    model = transformers.LlamaForCausalLM(config).eval()
    folder, small = tmp_path / "in", tmp_path / "small"
    model.save_pretrained(folder, max_shard_size="6MB")
    model_of("Llama")[0].save_pretrained(small)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    with torch.no_grad():
        wanted = float(model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss)
    ranks = run_on_processes(on_a_rank, 2, str(folder), str(small), names)
    for number, name in enumerate(names):
        for read, held, loss in (rank[number] for rank in ranks):
            assert held <= read <= held * 1.01
            assert abs(loss - wanted) <= 1e-5
        assert whole <= sum(rank[number][1] for rank in ranks) <= whole * (1.06 if name == "tensor" else 1.001)
        again, info = transformers.LlamaForCausalLM.from_pretrained(f"{folder}-{name}", output_loading_info=True)
        assert not any(info.values()), info
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
        assert len([*Path(f"{folder}-{name}").glob("*.safetensors")]) == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc has the memory of a process")
@pytest.mark.parametrize("mesh", ["data=2", "data=2,tensor=2", "pipe=2"])
def test_the_peak_of_a_rank_is_its_shards_and_one_slice(mesh: str) -> None:
    """Of a model of 603 MB."""
    command = [sys.executable, str(ROOT / "benchmarks" / "load_pretrained.py"), "--json", "--only", mesh]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=500, env=environment).stdout
    (ranks,) = json.loads(said.splitlines()[-1]).values()
    for rank in ranks:
        assert rank["held"] > 500e6 / len(ranks) and rank["read"] <= rank["held"] * 1.01
        assert rank["peak"] <= 1.05 * rank["held"] + rank["slice"]


def with_a_full_disk(rank: int, folder: str) -> str:
    fn, params = fp.load_pretrained(folder, Mesh(data=2), fp.zero(3, "data"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if rank:
        fp.checkpoint.disk.Disk.write = full  # type: ignore[assignment]
    with pytest.raises(fp.errors.CheckpointError) as caught:
        fp.save_pretrained(params, f"{folder}-out", fn)
    return str(caught.value)


def test_what_fails_on_one_process_is_raised_on_all(tmp_path: Path) -> None:
    model_of("Llama")[0].save_pretrained(tmp_path / "in")
    for message in run_on_processes(with_a_full_disk, 2, str(tmp_path / "in")):
        assert "rank 1: " in message and "No space left on device" in message
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


def on_one_of_two(rank: int, folder: str) -> list[bool]:
    one = Mesh(data=1, ranks=[1])
    fn, params = fp.load_pretrained(folder, one, fp.zero(3, "data"))
    with pytest.raises(ValueError, match=r"some of the processes: give params.relayout\(specs, mesh\)"):
        fp.save_pretrained(params, f"{folder}-one", fn)
    fp.save_pretrained(params.relayout(P(), Mesh(data=2)), f"{folder}-both", fn)
    again = transformers.LlamaForCausalLM.from_pretrained(f"{folder}-both")
    wanted = transformers.LlamaForCausalLM.from_pretrained(folder)
    return [torch.equal(a, b) for a, b in zip(again.parameters(), wanted.parameters(), strict=True)]


def test_a_mesh_of_some_of_the_processes(tmp_path: Path) -> None:
    model_of("Llama")[0].save_pretrained(tmp_path / "in")
    assert all(map(all, run_on_processes(on_one_of_two, 2, str(tmp_path / "in"))))
