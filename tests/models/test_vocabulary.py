"""A vocabulary split over ranks: embedding and cross entropy, without a gather of the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from sharding_specs import Mesh, P

WIDTH, VOCABULARY = 6, 16

Loss = Any


def parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"table": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


SPECS = {"table": P("tensor"), "head": P(None, "tensor")}


def targets(seed: int, ignored: float, ignore_index: int, count: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, VOCABULARY, (count,), generator=generator)
    found[torch.rand(count, generator=generator) < ignored] = ignore_index
    found[seed % count] = 3
    return found


@settings(max_examples=9)
@given(
    ranks=st.sampled_from([(1, 2), (2, 2), (2, 1), (1, 4), (4, 2)]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.1]),
    weighted=st.booleans(),
    ignore_index=st.sampled_from([-100, 3, -1]),
    ignored=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 99),
)
def test_cross_entropy(
    ranks: tuple[int, int],
    reduction: str,
    smoothing: float,
    weighted: bool,
    ignore_index: int,
    ignored: float,
    seed: int,
) -> None:
    """Every option of torch's; how many targets count differs by data rank."""
    mesh = Mesh(data=ranks[0], tensor=ranks[1])
    weight = torch.arange(1.0, VOCABULARY + 1, dtype=torch.float64) / 8 if weighted else None
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore_index}

    def loss(params: dict[str, torch.Tensor], tokens: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.embedding(tokens, params["table"]) @ params["head"]
        found = torch.nn.functional.cross_entropy(logits, y, weight=weight, **options)
        return (found * torch.arange(1.0, 1 + found.numel())).sum() if found.ndim else found

    y = targets(seed, ignored, ignore_index)
    if not (y != ignore_index).any():
        y[0] = 5
    tokens = torch.arange(8) * 7 % VOCABULARY
    plan = fp.chain(fp.tensor_parallel("tensor", SPECS), fp.data_parallel("data"))
    step = fp.testing.assert_equivalent(loss, plan, mesh, parameters(), tokens, y, rtol=1e-12)
    for one in step.program.collectives():
        logits = one.operand.ndim == 2 and one.operand.shape[-1] in (VOCABULARY, VOCABULARY // ranks[1])
        assert one.axes != ("tensor",) or not logits


@settings(max_examples=9)
@given(
    pixels=st.sampled_from([(3,), (2, 3), (1,), (2, 1, 3)]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.1]),
    weighted=st.booleans(),
    cut=st.sampled_from(["classes", "batch", "both", "microbatches"]),
    seed=st.integers(0, 99),
)
def test_cross_entropy_with_the_classes_in_the_middle(
    pixels: tuple[int, ...], reduction: str, smoothing: float, weighted: bool, cut: str, seed: int
) -> None:
    """Of images, or of sequences whose logits were turned for torch: nothing is gathered here either."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((4, *pixels, WIDTH), generator=generator, dtype=torch.float64)
    target = torch.randint(0, VOCABULARY, (4, *pixels), generator=generator)
    target.view(-1)[seed % target.numel()] = -100
    weight = torch.arange(1.0, VOCABULARY + 1, dtype=torch.float64) / 8 if weighted else None
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}

    def loss(head: torch.Tensor, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = (x @ head).movedim(-1, 1)
        return torch.nn.functional.cross_entropy(logits, target, **options).square().sum()

    tensor, data = fp.tensor_parallel("tensor", P(None, "tensor")), fp.data_parallel("data")
    plans = {
        "classes": (tensor, Mesh(tensor=2)),
        "batch": (data, Mesh(data=4)),
        "both": (fp.chain(tensor, data), Mesh(data=2, tensor=2)),
        "microbatches": (fp.chain(data, fp.accumulate(2)), Mesh(data=2)),
    }
    plan, mesh = plans[cut]
    step = fp.testing.assert_equivalent(loss, plan, mesh, parameters()["head"], x, target, rtol=1e-9)
    assert not [kind for kind, _ in step.program.counts() if kind == "all_gather"]


def test_what_it_sends() -> None:
    """A maximum and two sums of one number per target."""

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x @ params["head"], y)

    step = fp.compile(fp.tensor_parallel("tensor", {"head": SPECS["head"], "*": P()})(loss), Mesh(tensor=2))
    step(parameters(), torch.randn(8, WIDTH, dtype=torch.float64), targets(0, 0.3, -100))
    found = sorted((one.kind, one.operand.numel) for one in step.program.collectives())
    assert found == [("pmax", 8), ("psum", 8), ("psum", 8)]


def test_an_embedding_sends_its_result() -> None:
    """Each rank looks up what it holds; the sum is a reduce-scatter if the result shall be split."""
    params, tokens = parameters(), torch.arange(8) * 3 % VOCABULARY
    for constraint, kind in (("rows embed", "psum"), ("rows/tensor embed", "psum_scatter")):

        def look_up(params: Any, tokens: torch.Tensor, constraint: str = constraint) -> torch.Tensor:
            return fp.constrain(torch.nn.functional.embedding(tokens, params["table"]), constraint)

        step = fp.compile(fp.tensor_parallel("tensor", SPECS)(look_up), Mesh(tensor=2))
        assert torch.equal(step(params, tokens), params["table"][tokens])
        assert step.program.counts() == {(kind, ("tensor",)): 1}


@pytest.mark.parametrize("padding", [None, 2])
def test_padding_tokens_get_no_gradient(padding: int | None) -> None:
    def loss(params: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, params["table"], padding_idx=padding).square().sum()

    tokens = torch.tensor([0, 2, 5, 2, 9, 15, 2, 1])
    plan = fp.chain(fp.tensor_parallel("tensor", SPECS), fp.data_parallel("data"))
    fp.testing.assert_equivalent(loss, plan, Mesh(data=2, tensor=2), parameters(), tokens, rtol=1e-12)


@settings(max_examples=9)
@given(
    ranks=st.sampled_from([(1, 2), (2, 1), (2, 2), (4, 1)]),
    spec=st.sampled_from([P(), P("tensor"), P((4, "tensor")), P(None, "tensor")]),
    stage=st.integers(0, 3),
    microbatches=st.sampled_from([1, 2, 3]),
    padding=st.sampled_from([None, 2]),
    seed=st.integers(0, 99),
)
def test_gradients_divided_by_how_often_a_token_comes(
    ranks: tuple[int, int], spec: P, stage: int, microbatches: int, padding: int | None, seed: int
) -> None:
    """In the whole batch, however it is split: counts are powers of two, so the quotients are exact."""

    def loss(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.embedding(tokens, table, padding_idx=padding, scale_grad_by_freq=True)
        return (rows * rows).sum()

    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(-4, 5, (VOCABULARY, WIDTH), generator=generator).double()
    tokens = torch.tensor([0, 1, 1, 2, 2, 2, 2, *[7] * 8, 15])[torch.randperm(16, generator=generator)].reshape(8, 2)
    plan = fp.chain(fp.tensor_parallel("tensor", spec), fp.zero(stage, "data"))
    plan = fp.chain(plan, fp.accumulate(min(microbatches, 8 // ranks[0])))
    fp.testing.assert_equivalent(loss, plan, Mesh(data=ranks[0], tensor=ranks[1]), table, tokens, exact=True)


@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_per_token_of_a_split_batch(weighted: bool) -> None:
    weight = torch.arange(1.0, VOCABULARY + 1, dtype=torch.float64) if weighted else None

    def loss(params: dict[str, torch.Tensor], tokens: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.embedding(tokens, params["table"]) @ params["head"]
        return torch.nn.functional.cross_entropy(logits, y, weight, reduction="none").square().sum()

    y = targets(0, 0.3, -100)
    fp.testing.assert_equivalent(loss, fp.zero(0, "data"), Mesh(data=2), parameters(), y.clamp(min=0), y, rtol=1e-12)


@pytest.mark.parametrize("classes", [5, -1])
def test_one_hot_rows_of_what_is_closed_over(classes: int) -> None:
    """torch reads a constant's contents to check them."""
    labels = torch.arange(8).view(4, 2) % 5

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return ((x @ w)[:, None] * torch.nn.functional.one_hot(labels, classes)).sum()

    w, x = torch.ones(3, 5, dtype=torch.float64), torch.arange(12.0, dtype=torch.float64).view(4, 3)
    fp.testing.assert_equivalent(loss, fp.data_parallel("data"), Mesh(data=2), w, x, exact=True)
    in_a_body = fp.compile(fp.grad(loss), Mesh(data=2), in_specs=(P(), P()), out_specs=P())
    assert torch.equal(in_a_body(w, x), torch.func.grad(loss)(w, x))


def test_one_hot_rows_of_a_class_that_is_none() -> None:
    labels = torch.tensor([0, 5])
    step = fp.compile(lambda x: x * torch.nn.functional.one_hot(labels, 5), Mesh(data=2), in_specs=P(), out_specs=P())
    with pytest.raises(RuntimeError, match="Class values must be smaller than num_classes"):
        step(torch.ones(2, 5))
