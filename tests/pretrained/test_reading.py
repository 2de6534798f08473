"""Random folders, layouts and meshes: parameters equal to the bit, and each element is read once where it is held."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from sharding_specs import Mesh, P, local_shape

from .bags import Bag, counted_reads, headers_of, save_bag

DTYPES = ["float32", "bfloat16", "float64"]
MESHES = [Mesh(), Mesh(data=2), Mesh(data=2, tensor=2), Mesh(tensor=3), Mesh(pipe=2, data=2)]

Shapes = dict[str, tuple[tuple[int, ...], str]]


@st.composite
def bags(draw: Any) -> tuple[Shapes, dict[str, P]]:
    """Shapes and dtypes by name, and specs over "tensor" that fit them."""
    shapes, specs = Shapes(), dict[str, P]()
    for index in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.sampled_from([1, 2, 6, 12]), max_size=3)))
        shapes[f"w{index}"] = shape, draw(st.sampled_from(DTYPES))
        dims = [dim for dim, size in enumerate(shape) if size % 6 == 0]
        if dims and draw(st.booleans()):
            dim = draw(st.sampled_from(dims))
            fused = (2, "tensor") if shape[dim] == 12 and draw(st.booleans()) else "tensor"
            specs[f"w{index}"] = P(*[None] * dim, fused)
    return shapes, specs


@given(bags(), st.sampled_from(MESHES), st.integers(0, 3), st.sampled_from([16, 200, 10**6]))
@settings(max_examples=25, deadline=None)
def test_any_folder_onto_any_mesh(bag: Any, mesh: Mesh, stage: int, max_file: int) -> None:
    shapes, specs = bag
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "in"
        wanted = save_bag(folder, shapes, max_file)
        plan = [fp.pipeline("pipe", microbatches=1)] if "pipe" in mesh.axis_names else []
        plan = [fp.zero(stage, "data"), *plan] if "data" in mesh.axis_names and stage else plan
        plan = [fp.tensor_parallel("tensor", specs), *plan] if "tensor" in mesh.axis_names else plan
        with counted_reads() as reads:
            fn, params = fp.load_pretrained(folder, mesh, fp.chain(*plan), model_class=Bag)
        full = params.full()
        assert full.keys() == wanted.keys()
        for name, x in wanted.items():
            assert full[name].dtype == x.dtype and torch.equal(full[name], x), name
        assert sum(reads) == headers_of(folder) + _held_once(params, wanted)
        fp.save_pretrained(params, Path(place) / "out", fn, max_file=max_file)
        again, info = Bag.from_pretrained(Path(place) / "out", output_loading_info=True, dtype="auto")
        assert not any(info.values()), info
        state = again.state_dict()
        assert all(torch.equal(state[name].double(), x.double()) for name, x in wanted.items())


def _held_once(params: fp.Sharded, wanted: dict[str, torch.Tensor]) -> int:
    """Return the bytes of all shards, without padding: simulated ranks hold equal ones once."""
    total = 0
    for name, spec in params.specs.items():
        shards = {
            tuple(params.mesh.coordinates(rank)[axis] for axis in sorted(spec.axes)) for rank in params.mesh.ranks
        }
        padded = math.prod(local_shape(wanted[name].shape, spec, params.mesh)) * len(shards)
        total += min(padded, wanted[name].numel()) * wanted[name].element_size()
    return total


def test_an_empty_tensor_and_a_number(tmp_path: Path) -> None:
    wanted = save_bag(tmp_path / "in", {"w": ((0, 3), "float32"), "b": ((), "float32")}, 10**6)
    fn, params = fp.load_pretrained(tmp_path / "in", Mesh(data=2), fp.zero(3, "data"), model_class=Bag)
    assert torch.equal(params.full()["b"], wanted["b"]) and params.full()["w"].shape == (0, 3)
    fp.save_pretrained(params, tmp_path / "out", fn)
    assert Bag.from_pretrained(tmp_path / "out").w.shape == (0, 3)


def test_a_plan_may_be_a_function_of_the_model(tmp_path: Path) -> None:
    save_bag(tmp_path, {"w": ((4, 6), "float32")}, 10**6)

    def plan(model: torch.nn.Module) -> Any:
        return fp.tensor_parallel("tensor", {name: P("tensor") for name, _ in model.named_parameters()})

    _, params = fp.load_pretrained(tmp_path, Mesh(tensor=2), plan, model_class=Bag)
    assert params.specs == {"w": P("tensor")}


@pytest.mark.parametrize("mesh", [Mesh(pipe=2), Mesh(pipe=4)])
def test_parameters_of_a_pipeline_are_on_one_rank_each(tmp_path: Path, mesh: Mesh) -> None:
    save_bag(tmp_path, {f"w{i}": ((8,), "float32") for i in range(8)}, 10**6)
    _, params = fp.load_pretrained(tmp_path, mesh, fp.pipeline("pipe", microbatches=1), model_class=Bag)
    holders = [list(handle.holders) for handle in params.handles]
    assert holders == [[i * mesh.size // 8] for i in range(8)]


def test_a_generator_moves_parameters_of_a_pipeline_once(tmp_path: Path) -> None:
    """A tied table is at both ends, so the stages of generation are not the ranks that read. A warning is an error."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=1000, **sizes, tie_word_embeddings=True, eos_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    plan, prompts = fp.pipeline("pipe", microbatches=1), [[5, 6, 7], [8, 9, 10]]
    fn, params = fp.load_pretrained(tmp_path, Mesh(pipe=2), plan)
    generator = fp.Generator(fn, Mesh(pipe=2), plan)
    held = generator.hold(params, rows=2, prompt=3, max_new_tokens=3)
    on = {name: handle.holders for name, handle in zip(sorted(held.shapes), held.handles, strict=True)}
    assert on["model.embed_tokens.weight"] == {0, 1} and on["model.layers.0.mlp.up_proj.weight"] == {0}
    found = [generator(each, prompts, max_new_tokens=3).tokens for each in (params, held)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], fp.generate(fn, params.full(), prompts, Mesh(), max_new_tokens=3).tokens)
