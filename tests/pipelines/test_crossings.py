"""What may cross a cut: anything that a function computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_parallel as fp
from functional_parallel.ir import info
from sharding_specs import Mesh, P

from ..trees import assert_equal
from .networks import assert_close, assert_same, normal


def test_several_tensors_skip_connections_and_values_of_every_type() -> None:
    def loss(p: Any, x: Tensor, kinds: Tensor) -> Tensor:
        table = {"h": x @ p["a"], "count": kinds * 2, "name": "three", "nothing": None, "keep": kinds > 0}
        early = table["h"]
        table = fp.stage_boundary(table)
        assert table["name"] == "three"
        assert table["nothing"] is None
        h = torch.where(table["keep"][:, None], torch.tanh(table["h"] @ p["b"]), table["h"])
        h, count = fp.stage_boundary((h, table["count"]))
        h = torch.tanh(h @ p["c"]) * count[:, None]
        h = fp.stage_boundary(h)
        return ((h @ p["d"] + early) ** 2).mean()  # over three stages

    params = {name: normal(3, 3) for name in "abcd"}
    program = assert_same(loss, params, normal(8, 3), torch.randint(-1, 3, (8,)), ranks=4)
    assert len(program.stages[0].sends_forward) == 1  # kinds are cut from the batch on every rank, and not sent
    assert len(program.stages[2].sends_forward) == 2  # the last layer's input, and the first stage's


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_value_and_views_of_it_cross_as_one(schedule: str) -> None:
    """Cut before a residual is added, the gradient of the sum goes back as it is, as rows, and as these transposed."""

    def loss(p: Any, x: Tensor) -> Tensor:
        for number, weight in enumerate(p):
            rows = torch.tanh(x.flatten(0, 1)) @ weight
            x = x + fp.stage_boundary(rows).view_as(x) if number < len(p) - 1 else x + rows.view_as(x)
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return (heads.softmax(-1) * heads).mean()

    program = assert_same(
        loss,
        [normal(4, 4) for _ in range(4)],
        normal(8, 3, 4),
        ranks=4 if schedule == "1f1b" else 2,
        schedule=schedule,
    )
    assert [len(stage.sends_forward) for stage in program.stages] == [1, 2, 2, 0]  # the batch itself is on every rank
    assert [len(stage.sends_backward) for stage in program.stages] == [0, 1, 1, 1]


def test_a_branch_chosen_per_stage() -> None:
    """What a stage does may hang on what was handed to it: strings, numbers, None."""

    def loss(p: Any, x: Tensor) -> Tensor:
        h: Any = {"h": x, "do": "gate", "scale": 1.5, "above": None}
        for number, weight in enumerate(p):
            h = fp.stage_boundary(h) if number else h
            made = h["h"] @ weight
            made = torch.tanh(made) if h["do"] == "gate" else torch.relu(made) * h["scale"]
            made = made if h["above"] is None else made.clamp(max=h["above"])
            do = "gate" if number % 2 else "rectify"
            h = {"h": made, "do": do, "scale": h["scale"] + number, "above": 0.5 if number == 1 else None}
        return (h["h"] ** 2).mean()

    for schedule, ranks in (("1f1b", 4), ("dualpipe", 4), ("zb-v", 2)):
        program = assert_same(
            loss, [normal(3, 3) for _ in range(4)], normal(8, 3), ranks=ranks, schedule=schedule, microbatches=8
        )
        assert [len(stage.sends_forward) for stage in program.stages] == [1, 1, 1, 0]


def test_integers_made_of_parameters_cross() -> None:
    """An index and a flag that the first stage computes are used by the last, two cuts further."""

    def loss(p: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x @ p[0])
        best, positive = h.argmax(-1), h.sum(-1) > 0
        h = fp.stage_boundary(h)
        h = fp.stage_boundary(torch.tanh(h @ p[1]))
        h = h @ p[2]
        return torch.where(positive, h.gather(1, best[:, None])[:, 0], h.sum(-1)).mean()

    program = assert_same(loss, [normal(3, 3) for _ in range(3)], normal(8, 3), ranks=3)
    types = [info(node).aval.dtype for node in program.stages[1].sends_forward]
    assert sorted(map(str, types)) == ["torch.bool", "torch.float64", "torch.int64"]


def test_no_gradient_need_cross() -> None:
    """A frozen first stage, values used without gradient, and a loss that the first stage adds to."""

    def frozen(p: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x @ p[0]).detach()
        return ((fp.stage_boundary(h) @ p[1]) ** 2).mean()

    def beside(p: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x @ p[0])
        extra, target = (h**2).mean(), h.detach()
        return ((fp.stage_boundary(h) @ p[1] - target) ** 2).mean() + 3 * extra

    for schedule in ("1f1b", "zb-h1", "gpipe"):
        for loss in (frozen, beside):
            assert_same(loss, [normal(3, 3) for _ in range(2)], normal(8, 3), schedule=schedule)


def test_encoder_and_decoder() -> None:
    """As in T5: the decoder attends to the encoder's result on every stage; one embedding for both and for the head."""

    def attend(p: Any, x: Tensor, memory: Tensor, causal: bool) -> Tensor:
        q, k, v = x @ p["q"], memory @ p["k"], memory @ p["v"]
        return x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=causal)[:, 0] @ p["o"]

    def loss(p: Any, source: Tensor, target: Tensor) -> Tensor:
        h = F.embedding(source, p["shared"])
        for block in p["encoder"]:
            h = attend(block, h, h, causal=False)
            h = h + torch.relu(h @ block["up"]) @ block["down"]
        memory = F.layer_norm(h, (4,))
        h = F.embedding(target[:, :-1], p["shared"])
        for block in p["decoder"]:
            h = attend(block["own"], h, h, causal=True)
            h = attend(block["cross"], h, memory, causal=False)
        logits = F.layer_norm(h, (4,)) @ p["shared"].T
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)

    def attention() -> Any:
        return {name: normal(4, 4) for name in "qkvo"}

    params = {
        "shared": normal(9, 4),
        "encoder": [{**attention(), "up": normal(4, 8), "down": normal(8, 4)} for _ in range(2)],
        "decoder": [{"own": attention(), "cross": attention()} for _ in range(2)],
    }
    batch = torch.randint(0, 9, (8, 5)), torch.randint(0, 9, (8, 6))
    program = assert_same(loss, params, *batch, ranks=4)
    assert all(stage.sends_forward for stage in program.stages[:-1])
    assert_same(loss, params, *batch, ranks=2, schedule="zb-v")


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "dualpipe"])
@pytest.mark.parametrize("samples", [8, 11])
@pytest.mark.every(2)
def test_what_follows_from_a_sum_of_the_whole_batch(schedule: str, samples: int) -> None:
    """Weights that sum to one, inputs in units of their deviation, rows chosen by index: every stage takes them."""

    def loss(p: Any, x: Tensor, weight: Tensor) -> Tensor:
        share = weight / weight.sum()
        chosen = (weight[torch.arange(len(weight))] > 0.5).double()
        h = (x - x.mean(0)) / x.std(0)
        for layer in p:
            h = torch.tanh(h @ layer) * (1 + chosen[:, None])
        return (h.square().mean(1) * share).sum()

    batch = normal(samples, 3), torch.rand(samples, dtype=torch.float64)
    assert_same(loss, [normal(3, 3) for _ in range(4)], *batch, schedule=schedule)


def test_u_net() -> None:
    """Skips from each level down to the same level up, across the middle stages."""

    def loss(p: Any, image: Tensor) -> Tensor:
        h, kept = image, []
        for weight in p["down"]:
            h = torch.relu(F.conv2d(h, weight, padding=1))
            kept.append(h)
            h = F.avg_pool2d(h, 2)
        h = torch.relu(F.conv2d(h, p["middle"], padding=1))
        for weight in p["up"]:
            h = h.repeat_interleave(2, -1).repeat_interleave(2, -2)
            h = torch.relu(F.conv2d(torch.cat([h, kept.pop()], 1), weight, padding=1))
        return ((h.mean(1) - image.mean(1)) ** 2).mean()

    params = {
        "down": [normal(4, 1, 3, 3), normal(4, 4, 3, 3)],
        "middle": normal(4, 4, 3, 3),
        "up": [normal(4, 8, 3, 3), normal(4, 8, 3, 3)],
    }
    assert_same(loss, params, normal(8, 1, 8, 8), ranks=4)


def test_no_batch_dim_first() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        for weight in p:
            x = torch.tanh(torch.einsum("t b e, e f -> t b f", x, weight))
        return x.mean()

    assert_same(loss, [normal(3, 3) for _ in range(4)], normal(5, 8, 3), batch=P(None, "microbatch"))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe"])
@pytest.mark.parametrize("bend", [torch.relu, lambda x: x], ids=["relu", "linear"])
@pytest.mark.every(3)
def test_gradients_that_are_the_same_for_every_microbatch(schedule: str, bend: Any) -> None:
    """As those of the last bias, where the loss is linear in what the model returns; of every one in a linear model."""

    def loss(p: Any, x: Tensor) -> Tensor:
        for weight, bias in p:
            x = bend(x) @ weight + bias
        return x.sum()

    def params() -> Any:
        return [(torch.full((2, 2), 2.0).double(), torch.ones(2).double()) for _ in range(4)]

    def trained(mesh: Mesh, plan: Any, clip: float | None) -> Any:
        train = fp.train_step(loss, fp.optim.sgd(0.5), mesh, plan, clip=clip)
        state = train.init(params())
        for _ in range(2):
            state, _ = train(state, x)
        return train.params(state)

    x, mesh = torch.ones(8, 2).double(), Mesh(pipe=2, data=2)
    plan = fp.chain(fp.zero(1, "data"), fp.pipeline("pipe", schedule=schedule, microbatches=4))
    fp.testing.assert_equivalent(loss, plan, mesh, params(), x, exact=True)
    assert_equal(trained(mesh, plan, None), trained(Mesh(), None, None))
    assert_close(trained(mesh, plan, 1.0), trained(Mesh(), None, 1.0))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v", "dualpipe"])
def test_of_a_linear_end_only_the_backward_is_left(schedule: str) -> None:
    """A gradient without the value computes no sum, no last product: a stage that was marked has no forward then."""

    def loss(p: Any, x: Tensor) -> Tensor:
        for weight in p[:-1]:
            x = fp.stage_boundary(torch.tanh(x @ weight))
        return (x @ p[-1]).sum()

    stages = 4 if schedule == "zb-v" else 2
    params, x = [normal(3, 3) for _ in range(stages)], normal(8, 3)
    step = fp.compile(fp.grad(fp.pipeline("pipe", schedule=schedule, microbatches=4)(loss)), Mesh(pipe=2))
    assert_close(step(params, x), fp.grad(loss)(params, x))


def test_a_linear_end_of_two_stages() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        h = fp.stage_boundary(torch.tanh(x @ p["first"]))
        h = fp.stage_boundary(3 * h)
        return (h + p["last"]).sum()

    params, x = {"first": normal(3, 3), "last": normal(3)}, normal(8, 3)
    step = fp.compile(fp.grad(fp.pipeline("pipe", microbatches=4)(loss)), Mesh(pipe=3))
    assert_close(step(params, x), fp.grad(loss)(params, x))
