"""torch's own readers and writers as outside oracles, and files of other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import functional_parallel as fp
from functional_parallel.checkpoint.format import DTYPES
from functional_parallel.errors import CheckpointError, DamagedCheckpointError
from sharding_specs import Mesh

from ..processes import run_on_processes
from .runs import PLANS, trained

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def keys(tree: Any) -> dict[str, torch.Tensor]:
    return {"/".join(map(str, path)): leaf for path, leaf in zip(*optree.tree_flatten_with_path(tree)[:2], strict=True)}


@pytest.mark.parametrize("name", PLANS)
def test_torchs_reader_loads_the_parameters(name: str, tmp_path: Path) -> None:
    train, state = trained(name)
    train.save(state, tmp_path)
    expected = keys(train.params(state))
    empty = [key for key, leaf in expected.items() if not leaf.numel()]  # torch plans no read of an empty tensor
    got = {key: torch.full_like(leaf, torch.nan) for key, leaf in expected.items() if key not in empty}
    dcp.load(got, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "step_00000001" / "params")), no_dist=True)
    assert all(torch.equal(got[key], expected[key]) for key in got)


@pytest.mark.parametrize("name", ["zero 3, tensor", "pipeline", "zero 1, flat"])
def test_each_file_is_a_safetensors_file(name: str, tmp_path: Path) -> None:
    train, state = trained(name)
    train.save(state, tmp_path)
    for path in tmp_path.rglob("*.safetensors"):
        assert load_file(path)


def saved_by_torch(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    rows, columns = torch.arange(20.0).view(5, 4), torch.arange(12.0).view(2, 6)
    tensors = {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "columns": distribute_tensor(columns, mesh, [Shard(1)]),
        "all": distribute_tensor(columns + 1, mesh, [Replicate()]),
    }
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True)
    save_by_torch(tensors, storage_writer=writer)


def test_what_torchs_writer_wrote_is_loaded(tmp_path: Path) -> None:
    run_on_processes(saved_by_torch, 2, str(tmp_path))
    got = fp.checkpoint.load(tmp_path)
    columns = torch.arange(12.0).view(2, 6)
    expected = {"rows": torch.arange(20.0).view(5, 4), "columns": columns, "all": columns + 1}
    assert got.keys() == expected.keys() and all(torch.equal(got[key], expected[key]) for key in expected)
    train = fp.train_step(lambda p, x: (x @ p["all"]).sum() ** 2, fp.optim.sgd(0.1), Mesh(data=2), fp.zero(3, "data"))
    assert torch.equal(train.params(train.init(got))["rows"], expected["rows"])
    sorted(tmp_path.glob("*.safetensors"))[0].unlink()  # the last one could not be missed: torch saves no shapes
    with pytest.raises(DamagedCheckpointError, match=r"boxes of '(rows|columns)' have gaps or overlap"):
        fp.checkpoint.load(tmp_path)


@pytest.mark.parametrize("name", ["zero 3, padded", "masters, flat, loss scale", "pipeline of four"])
def test_consolidated_files(name: str, tmp_path: Path) -> None:
    train, state = trained(name)
    train.save(state, tmp_path / "run")
    assert fp.checkpoint.consolidate(tmp_path / "run", tmp_path / "one") == [
        tmp_path / "one" / "model.safetensors",
        tmp_path / "one" / "optimizer.safetensors",
    ]
    expected = train.params(state)
    got = load_file(tmp_path / "one" / "model.safetensors")
    assert all(torch.equal(got[key], leaf) for key, leaf in keys(expected).items())
    moments = load_file(tmp_path / "one" / "optimizer.safetensors")
    whole = train.whole(state)[1]
    assert torch.equal(moments["mean/layers/w"], getattr(whole, "optimizer", whole).mean["layers"]["w"])
    again = fp.checkpoint.load(tmp_path / "run")
    assert optree.tree_all(optree.tree_map(torch.equal, again, expected))
    with pytest.raises(CheckpointError, match="the file exists"):
        fp.checkpoint.consolidate(tmp_path / "run", tmp_path / "one")


def test_every_dtype_and_rank_survives(tmp_path: Path) -> None:
    values = {name: (torch.arange(6) % 2).to(dtype).view(2, 3) for name, dtype in DTYPES.items() if dtype.itemsize > 1}
    values |= {"BOOL": torch.tensor([[True, False], [False, True]]), "I8": torch.tensor([[1, -2]], dtype=torch.int8)}
    values |= {"F8": torch.tensor([[1, 2]], dtype=torch.uint8).view(torch.float8_e4m3fn)}
    values |= {"scalar": torch.tensor(3), "flag": torch.tensor(True), "empty": torch.zeros(0, 3), "w": torch.ones(2)}
    plan = fp.zero(3, "data")
    train = fp.train_step(lambda p, x: (x * p["w"]).sum(), fp.optim.sgd(0.1), Mesh(data=2), plan, donate=False)
    state = train.init(values)
    train.save(state, tmp_path / "run")
    for got in (train.params(train.restore(tmp_path / "run")), fp.checkpoint.load(tmp_path / "run")):
        assert all(got[k].dtype == v.dtype and torch.equal(_bits(got[k]), _bits(v)) for k, v in values.items())
    fp.checkpoint.consolidate(tmp_path / "run", tmp_path / "one")
    got = load_file(tmp_path / "one" / "model.safetensors")
    assert all(got[k].shape == v.shape and torch.equal(_bits(got[k]), _bits(v)) for k, v in values.items())


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


class _Code:
    pass


def test_files_of_torch_save(tmp_path: Path) -> None:
    torch.save({"layers": [{"w": torch.ones(2)}], "b": torch.zeros(3)}, tmp_path / "model.pt")
    assert torch.equal(fp.checkpoint.load(tmp_path / "model.pt")["layers"][0]["w"], torch.ones(2))
    (path,) = fp.checkpoint.consolidate(tmp_path / "model.pt", tmp_path / "one")
    assert load_file(path).keys() == {"layers/0/w", "b"}
    torch.save(_Code(), tmp_path / "code.pt")
    with pytest.raises(CheckpointError, match="loading that would run code"):
        fp.checkpoint.load(tmp_path / "code.pt")
    (tmp_path / "text.pt").write_text("no file of torch.save")
    with pytest.raises(CheckpointError, match=r"text\.pt"):
        fp.checkpoint.load(tmp_path / "text.pt")
    with pytest.raises(CheckpointError, match="no such folder"):
        fp.checkpoint.load(tmp_path / "nothing")


def test_one_safetensors_file(tmp_path: Path) -> None:
    save_file({"w": torch.arange(3)}, tmp_path / "model.safetensors")
    assert torch.equal(fp.checkpoint.load(tmp_path / "model.safetensors")["w"], torch.arange(3))
    assert torch.equal(fp.checkpoint.load(tmp_path)["w"], torch.arange(3))


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    train, state = trained("masters, flat, loss scale")
    train.save(state, tmp_path, extra={"a": [1, None]})
    names = {path.suffix for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    assert names == {".safetensors", ".json"}
