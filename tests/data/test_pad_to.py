"""Batches padded to a few lengths: the loss of the real positions does not change, and few programs are traced."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import functional_parallel as fp
from sharding_specs import Mesh

from ..processes import run_on_processes

padding = sys.modules[fp.pad_to.__module__]

LENGTHS = (4, 8, 12)
VOCAB, WIDTH = 8, 4


def hugging_face(rows: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, VOCAB, (rows, length), generator=generator)
    positions = torch.arange(length).expand(rows, length)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens, "position_ids": positions}


@given(length=st.integers(1, 12), rows=st.integers(1, 3), lengths=st.permutations(LENGTHS))
def test_a_batch_of_hugging_face(length: int, rows: int, lengths: list[int]) -> None:
    batch = hugging_face(rows, length)
    padded, present = fp.pad_to(batch, lengths, values={"input_ids": 5})
    wanted = min(each for each in LENGTHS if each >= length)
    assert present.tolist() == [True] * length + [False] * (wanted - length)
    fills = {"input_ids": 5, "attention_mask": 0, "labels": -100, "position_ids": 0}
    for name, leaf in padded.items():
        assert leaf.shape == (rows, wanted) and leaf.dtype == batch[name].dtype
        assert torch.equal(leaf[:, present], batch[name])
        assert (leaf[:, ~present] == fills[name]).all()


def test_trees_dims_and_values() -> None:
    batch = (
        [torch.ones(2, 3, 5)],
        {"class": torch.ones(2), "image": torch.ones(2, 4, 7), "n": 3, "on": torch.ones(2, 5) > 0},
    )
    padded, present = fp.pad_to(batch, [6], dim=-1, values={"1/class": None, "image": None})
    assert padded[0][0].shape == (2, 3, 6) and padded[0][0][..., 5].eq(0).all() and len(present) == 6
    assert padded[1]["on"].tolist() == [[True] * 5 + [False]] * 2
    assert padded[1]["class"] is batch[1]["class"] and padded[1]["image"] is batch[1]["image"] and padded[1]["n"] == 3
    by_type, _ = fp.pad_to(batch[0], [4], values=lambda path, leaf: -1.0 if leaf.is_floating_point() else 0)
    assert by_type[0].shape == (2, 4, 5) and by_type[0][:, 3].eq(-1).all()
    same, present = fp.pad_to(batch[0], [3])
    assert same[0] is batch[0][0] and present.all()


def sequences(*lengths: int) -> tuple[Tensor, ...]:
    return tuple(torch.ones(2, length) for length in lengths)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (sequences(9), {}, r"than 8, the largest of lengths=: 0 has 9; add a length"),
        (sequences(3, 4), {}, r"0 has 3, 1 has 4; .* values=\{'name': None\} for a leaf"),
        (torch.ones(2), {}, r"dim=1\) pads .*: no tensor has this dim"),
        ({"x": torch.ones(2, 3)}, {"values": {"y": 1}}, "names y; the leaves are x"),
        (sequences(3), {"lengths": []}, "give positive integers"),
        (sequences(3), {"lengths": [0, 4]}, r"lengths=\[0, 4\]"),
    ],
)
def test_batches_that_cannot_be_padded(batch: Any, options: dict[str, Any], message: str) -> None:
    kind = ValueError if options else fp.UnevenBatchError
    with pytest.raises(kind, match=message):
        fp.pad_to(batch, **{"lengths": [4, 8], **options})


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (VOCAB, WIDTH), "q": (WIDTH, WIDTH), "v": (WIDTH, WIDTH)}
    return {name: torch.randint(-2, 3, shape, generator=generator).double() for name, shape in shapes.items()}


def masked(params: dict[str, Tensor], input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
    """A masked mean, closed on the integers: each position sums the real positions that are not after it."""
    x = params["embed"][input_ids]
    scores = (x @ params["q"]) @ x.mT * attention_mask[:, None].tril().double()
    out = ((scores.tril() @ x) @ params["v"]).sum(-1)
    real = (labels != -100).double()
    return (out * real).sum() / real.sum()


@settings(max_examples=6)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=3), plan=st.sampled_from(["data", "zero", "accumulate"])
)
def test_padding_leaves_the_loss_and_its_gradient_unchanged(lengths: list[int], plan: str) -> None:
    """The loss to the bit: sums of integers, in float64, divided by the same count."""
    plans: dict[str, Any] = {
        "data": fp.data_parallel("data"),
        "zero": fp.zero(3, "data"),
        "accumulate": fp.chain(fp.zero(1, "data"), fp.accumulate(2)),
    }
    step = fp.compile(fp.grad_and_value(plans[plan](masked)), Mesh(data=2))
    for length in lengths:
        batch = {name: leaf for name, leaf in hugging_face(4, length).items() if name != "position_ids"}
        padded, _ = fp.pad_to(batch, LENGTHS)
        grads, value = step(parameters(), **padded)
        wanted, alone = torch.func.grad_and_value(masked)(parameters(), **batch)
        assert torch.equal(value, alone)
        assert all(torch.allclose(grads[name], wanted[name], rtol=1e-12, atol=1e-12) for name in wanted)


def test_batches_of_a_training_step_have_few_programs() -> None:
    def loss(params: dict[str, Tensor], input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy((params["embed"][input_ids] @ params["embed"].mT).flatten(0, 1), labels.flatten())

    train = fp.train_step(loss, fp.optim.sgd(0.0), Mesh(data=2), fp.zero(2, "data"))
    params = {"embed": parameters()["embed"]}
    state, programs = train.init(params), set()
    for length in (2, 3, 4, 5, 7, 8, 3):
        batch = {name: leaf for name, leaf in hugging_face(4, length).items() if name in ("input_ids", "labels")}
        padded, _ = fp.pad_to(batch, [4, 8])
        state, metrics = train(state, **padded)
        programs.add(id(train.programs.compiled.program))
        assert torch.allclose(metrics.loss, loss(params, **batch), rtol=1e-12)
    assert len(programs) == 2


def on_ranks(rank: int, longest: int) -> list[Any]:
    return [padded_on_rank(rank, longest), padded_on_rank(rank, 2 * longest)]


def padded_on_rank(rank: int, longest: int) -> Any:
    batch = {"x": torch.full((1, longest if rank else 2), rank + 1.0)}
    try:
        padded, present = fp.pad_to(batch, [4, 8], mesh=Mesh(data=2))
    except fp.UnevenBatchError as error:
        return str(error)
    return padded["x"].tolist(), int(present.sum())


@pytest.mark.slow
def test_processes_agree_on_a_length() -> None:
    (first, told), (second, raised) = run_on_processes(on_ranks, 2, 5)
    assert first == ([[1.0] * 2 + [0.0] * 6], 2) and second == ([[2.0] * 5 + [0.0] * 3], 5)
    assert told == f"the batch of another rank: {raised}" and raised.startswith("pad_to: a batch is longer than 8")


def test_ranks_agree_on_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchanging(longest: int, problem: str) -> Any:
        return lambda mesh: SimpleNamespace(exchange=lambda own, purpose: [own, (longest, problem)])

    monkeypatch.setattr(padding, "default_runtime", exchanging(5, ""))
    padded, present = fp.pad_to(torch.ones(1, 3), [4, 8], mesh=Mesh(data=2))
    assert padded.shape == (1, 8) and int(present.sum()) == 3
    monkeypatch.setattr(padding, "default_runtime", exchanging(0, "too long"))
    with pytest.raises(fp.UnevenBatchError, match="the batch of another rank: too long"):
        fp.pad_to(torch.ones(1, 3), [4, 8], mesh=Mesh(data=2))
