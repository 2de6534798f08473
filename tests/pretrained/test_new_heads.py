"""A folder read into a class with weights that it does not have: they are drawn by the model, equally on every mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.errors import CheckpointError
from sharding_specs import Mesh, rules

from .bags import model_of

transformers = pytest.importorskip("transformers")

MESHES: dict[str, Any] = {
    "one": (Mesh(), None),
    "zero and tensor": (
        Mesh(data=2, tensor=2),
        lambda model: fp.chain(
            fp.tensor_parallel("tensor", rules.for_model(model, mesh=Mesh(data=2, tensor=2))), fp.zero(3, "data")
        ),
    ),
    "pipe": (Mesh(pipe=2, data=2), lambda _: fp.chain(fp.zero(1, "data"), fp.pipeline("pipe", microbatches=2))),
}
TOKENS = torch.randint(1, 64, (8, 8), generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 3


ONE = Mesh()


def read(folder: Path, mesh: Mesh = ONE, plan: Any = None, **options: Any) -> tuple[Any, fp.Sharded]:
    given: dict[str, Any] = {
        "model_class": transformers.LlamaForSequenceClassification,
        "config": {"num_labels": 3, "pad_token_id": 0},
        "new": "score*",
        "unused": "lm_head*",
    }
    return fp.load_pretrained(folder, mesh, plan, **{**given, **options})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    model_of("Llama")[0].save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", MESHES)
def test_a_classifier_of_a_causal_model(name: str, base: Path, tmp_path: Path) -> None:
    """Equal parameters on every mesh, and the loss of transformers before and after a step."""
    mesh, plan = MESHES[name]
    fn, params = read(base, mesh, plan)
    full = params.full()
    alone = read(base)[1].full()
    assert all(torch.equal(full[name], alone[name]) for name in alone) and full.keys() == alone.keys()
    model = transformers.LlamaForSequenceClassification(fn.module.config)
    model.load_state_dict(full)

    def loss(params: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = fn(params, input_ids=tokens, labels=labels, use_cache=False).loss
        return value

    whole = plan(fn.module) if plan else fp.chain()
    train = fp.train_step(loss, fp.optim.sgd(0.5), mesh, whole)
    state, metrics = train(train.init(params, batch=(TOKENS, LABELS)), TOKENS, LABELS)
    wanted = model(input_ids=TOKENS, labels=LABELS).loss
    assert abs(float(metrics.loss) - float(wanted.detach())) < 1e-5
    wanted.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad
    fp.save_pretrained(state, tmp_path / "out", fn)
    again, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info.values()) and again.config.num_labels == 3
    with torch.no_grad():
        assert torch.allclose(again(TOKENS).logits, model(TOKENS).logits, atol=1e-5)


def test_the_model_draws(base: Path) -> None:
    """The head has the spread of the config, whatever torch's generator is at, which does not move."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    changes = {"num_labels": 500, "pad_token_id": 0, "initializer_range": 0.125}
    first = read(base, config=changes)[1].full()["score.weight"]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(first, read(base, config=changes)[1].full()["score.weight"])
    other = read(base, config=changes, seed=1)[1].full()["score.weight"]
    assert not torch.equal(first, other)
    assert first.shape == (500, 32) and abs(first.std() / 0.125 - 1) < 0.05
    half = read(base, config=changes, dtype=torch.bfloat16)[1].full()["score.weight"]
    assert half.dtype == torch.bfloat16 and abs(half.float().std() / 0.125 - 1) < 0.05


def test_only_what_is_named_is_new(base: Path) -> None:
    full, wanted = read(base)[1].full(), model_of("Llama")[0].state_dict()
    assert all(torch.equal(x, wanted[name]) for name, x in full.items() if name != "score.weight")
    layer = "model.layers.1.mlp.up_proj.weight"
    full = read(base, new=["score*", "*layers.1.mlp*"])[1].full()
    drawn = {name for name, x in full.items() if name == "score.weight" or not torch.equal(x, wanted[name])}
    assert drawn == {"score.weight", *(layer.replace("up", each) for each in ("up", "gate", "down"))}


def test_a_head_with_other_labels_is_new_too(base: Path, tmp_path: Path) -> None:
    fn, params = read(base)
    fp.save_pretrained(params, tmp_path / "three", fn)
    with pytest.raises(CheckpointError, match=r"score.weight: \(3, 32\), in the model \(5, 32\)") as caught:
        fp.load_pretrained(tmp_path / "three", Mesh(), config={"num_labels": 5})
    assert "if new= has patterns of its weights, such as 'score.weight'" in str(caught.value)
    fn, params = fp.load_pretrained(tmp_path / "three", Mesh(), config={"num_labels": 5}, new="score*")
    assert params.shapes["score.weight"].shape == (5, 32) and len(fn.module.config.id2label) == 5


def test_a_backbone_gets_its_head(tmp_path: Path) -> None:
    """Names of a folder without the prefix of the whole model, and a module with a new bias and a weight."""
    model = model_of("BERT")[0]
    model.base_model.save_pretrained(tmp_path)
    options = {"model_class": transformers.BertForSequenceClassification, "config": {"num_labels": 2}}
    _, params = fp.load_pretrained(
        tmp_path, Mesh(data=2), fp.zero(3, "data"), new=("classifier*", "*pooler*"), **options
    )
    full = params.full()
    assert full["classifier.bias"].abs().max() == 0 and full["classifier.weight"].abs().min() > 0
    name = "encoder.layer.0.output.dense.weight"
    assert torch.equal(full[f"bert.{name}"], model.base_model.state_dict()[name])


def test_a_head_that_adapters_train_too(base: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapt(model: Any) -> Any:
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["score"]))
        for layer in adapted.modules():
            if isinstance(layer, peft.tuners.lora.LoraLayer):
                layer.lora_A.to_empty(device="cpu")
                layer.lora_B.to_empty(device="cpu")
                layer.reset_lora_parameters("default", init_lora_weights=True)
        return adapted

    full = {name.split("score.")[-1]: x for name, x in read(base, adapt=adapt)[1].full().items() if "score" in name}
    assert torch.equal(full["modules_to_save.default.weight"], read(base)[1].full()["score.weight"])


def test_what_is_new_and_unused_is_named(base: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(base, new=(), unused=())
    for line in (
        "score.weight: missing",
        "lm_head.weight: unexpected",
        "a new head is drawn if new= has patterns of its weights, such as 'score.weight'",
        "unused= has patterns of what is left out, such as 'lm_head.weight'",
    ):
        assert line in str(caught.value)
    with pytest.raises(CheckpointError, match=r"new='scores\*' matches no weight of Llama\S+: the nearest are score.w"):
        read(base, new=["score*", "scores*"])
    with pytest.raises(
        CheckpointError, match=r"config= has num_lables, and LlamaConfig has no such entry.* num_labels,"
    ):
        read(base, config={"num_lables": 3})
    with pytest.raises(CheckpointError, match=r"layers.2.input_layernorm.weight: missing"):
        read(base, unused="*", config={"num_hidden_layers": 3})
