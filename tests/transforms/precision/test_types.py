"""Which types a mixed-precision program computes and communicates in, and that its values are those asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P, split

from ...some_cases import one_in
from . import networks
from .networks import gpt

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CONFIG = replace(networks.CONFIG, layers=1)
PARAMS, SPECS = split(gpt.init(CONFIG))
TOKENS = networks.tokens(0)
loss_of = partial(gpt.loss, config=CONFIG)


def tensor_and(outer: Any) -> tuple[Any, ...]:
    return (fp.tensor_parallel("tensor", SPECS), outer)


PLANS = {
    "zero1": (fp.zero(1, "data"),),
    "data": (fp.data_parallel("data"),),
    "zero3": (fp.zero(3, "data"),),
    "zero2, each": (fp.zero(2, "data"), fp.accumulate(2, reduce="each")),
    "tensor": (fp.tensor_parallel("tensor", SPECS),),
    "zero3, accumulate": (fp.zero(3, "data"), fp.accumulate(2)),
    "tensor, data, accumulate": (*tensor_and(fp.data_parallel("data")), fp.accumulate(2)),
    "tensor, zero3": tensor_and(fp.zero(3, "data")),
}
MESH = Mesh(data=2, tensor=2)


@cache
def compiled(
    name: str, kind: str, reduce: str = "fp32", params: str | None = None, without: tuple[str, ...] = ()
) -> Any:
    """The gradient of the loss by a plan, with its program, which tests share."""
    plan = fp.chain(fp.mixed_precision(kind, reduce=reduce, params=params), *PLANS[name])
    step = fp.compile(fp.grad_and_value(plan(loss_of)), MESH, without=without)
    step.lower(PARAMS, TOKENS)
    return step


# -----------------------------------------------------------------------------
# Values
# -----------------------------------------------------------------------------


@one_in(3, kind=["bf16", "fp16"], name=PLANS)
def test_a_plan_gives_what_one_rank_computes_in_the_same_precision(name: str, kind: str) -> None:
    one = fp.grad_and_value(fp.mixed_precision(kind)(loss_of))(PARAMS, TOKENS)
    if "zero1" in name or "zero2" in name:  # their gradients are partial sums until the update
        plan = fp.chain(fp.mixed_precision(kind), *PLANS[name])
        train = fp.train_step(loss_of, fp.optim.sgd(1.0), MESH, plan)
        state, metrics = train(train.init(PARAMS), TOKENS)
        several = (optree.tree_map(torch.sub, PARAMS, train.params(state)), metrics.loss)
    else:
        several = compiled(name, kind)(PARAMS, TOKENS)
    bound = 0.05 if kind == "bf16" else 0.01
    for path, a, b in zip(optree.tree_paths(one), optree.tree_leaves(one), optree.tree_leaves(several), strict=True):
        assert a.dtype == b.dtype == FP32
        assert (a - b).norm() <= bound * a.norm(), (path, (a - b).norm() / a.norm())


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
@pytest.mark.parametrize("outer", [(fp.zero(0, "data"),), (fp.zero(3, "data"),)])
def test_small_integers_are_exact(outer: tuple[Any, ...], reduce: str) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-1, 2, shape, generator=generator).float()  # noqa: E731
    params, x = {"a": draw(4, 8), "b": draw(8, 3)}, draw(4, 4)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return ((x @ params["a"]).relu() @ params["b"]).sum()

    specs = {"a": P(None, "tensor"), "b": P("tensor", None)}
    plan = fp.chain(fp.mixed_precision("bf16", reduce=reduce), fp.tensor_parallel("tensor", specs), *outer)
    found = fp.compile(fp.grad_and_value(plan(loss)), MESH)(params, x)
    exact = fp.grad_and_value(loss)(params, x)
    assert all(map(torch.equal, optree.tree_leaves(found), optree.tree_leaves(exact)))


@pytest.mark.parametrize("outer", [(fp.zero(0, "data"),), (fp.zero(3, "data"),), (fp.accumulate(2),)])
def test_gradients_are_summed_in_float32(outer: tuple[Any, ...]) -> None:
    """256 + 1 is no bfloat16."""
    f = fp.chain(fp.mixed_precision("bf16"), *outer)(lambda w, x: (x @ w).sum())
    gradient = fp.compile(fp.grad(f), Mesh(data=2))(torch.zeros(2), torch.tensor([[256.0, 0.0], [1.0, 0.0]]))
    assert gradient.tolist() == [257.0, 0.0]


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_are_summed_over_ranks_in_the_type_asked_for(stage: int) -> None:
    plan = fp.chain(fp.mixed_precision("bf16", reduce="bf16"), fp.zero(stage, "data"), fp.accumulate(2))
    step = fp.compile(fp.grad(plan(lambda w, x: (x @ w).sum())), Mesh(data=2))
    rows = torch.tensor([256.0, 1.0, 1.0, 256.0])  # of each rank two: 257, rounded once to 256
    gradient = step(torch.zeros(2), torch.stack([rows, 0 * rows], dim=1))
    assert gradient.tolist() == [512.0, 0.0]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_reducing_each_microbatch_sums_in_float32_too(stage: int) -> None:
    plan = fp.chain(fp.mixed_precision("bf16"), fp.zero(stage, "data"), fp.accumulate(2, reduce="each"))
    train = fp.train_step(lambda w, x: (x @ w).sum(), fp.optim.sgd(1.0), Mesh(data=2), plan)
    rows = torch.tensor([256.0, 1.0, 1.0, 1.0])
    state, _ = train(train.init(torch.zeros(2)), torch.stack([rows, 0 * rows], dim=1))
    assert train.params(state).tolist() == [-259.0, 0.0]


BEYOND_FLOAT16 = {
    "square": torch.square,
    "power": lambda x: x**2,
    "power of a number": lambda x: 2 ** (x / 16),
    "exponential": lambda x: torch.exp(x / 20),
    "reciprocal": lambda x: 1 / (x / 2**26),
    "sum": lambda x: (x * 100).sum(-1, keepdim=True),
    "cumulative sum": lambda x: (x * 100).cumsum(-1),
    "product": lambda x: x.prod(-1, keepdim=True),
    "norm": lambda x: torch.linalg.vector_norm(x * 150, dim=-1, keepdim=True),
    "variance": lambda x: torch.cat([x, -x], -1).var(-1, keepdim=True),
    "distance": lambda x: torch.cdist(x * 150, 0 * x),
}


@pytest.mark.parametrize("name", BEYOND_FLOAT16)
def test_what_float16_does_not_hold_stays_in_float32(name: str) -> None:
    """Operands that it holds, results up to 10 ** 10 that it does not, and what is normalized by them."""

    def scale(x: Tensor) -> Tensor:
        return torch.log(BEYOND_FLOAT16[name](x))

    x = torch.full((8, 4), 300.0)
    assert BEYOND_FLOAT16[name](x).max() > torch.finfo(FP16).max
    found = fp.compile(fp.chain(fp.mixed_precision("fp16"), fp.data_parallel("data"))(lambda w, x: scale(x)), MESH)
    torch.testing.assert_close(found(torch.zeros(1), x), scale(x), rtol=2e-3, atol=0)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_norm_written_by_hand(kind: str) -> None:
    """The squares of a stream of hundreds are in the millions; infinite, they would make it zero."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return ((x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) @ w).square().mean()

    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(8, 8, generator=generator), 1000 * torch.randn(16, 8, generator=generator)
    plan = fp.chain(fp.mixed_precision(kind), fp.zero(3, "data"))
    found = fp.compile(fp.grad_and_value(plan(loss)), Mesh(data=2))(w, x)
    for a, b in zip(found, fp.grad_and_value(loss)(w, x), strict=True):
        assert (a - b).norm() <= (0.02 if kind == "bf16" else 0.002) * b.norm()


def test_a_tied_weight_is_summed_in_float32() -> None:
    f = fp.chain(fp.mixed_precision("bf16"), fp.data_parallel("data"))(lambda w, x, y: (x @ w).sum() + (y @ w).sum())
    x, y = torch.tensor([[256.0], [0.0]]), torch.tensor([[0.0], [1.0]])
    assert fp.compile(fp.grad(f), Mesh(data=2))(torch.zeros(1), x, y).item() == 257.0


@pytest.mark.parametrize("name", ["zero3, accumulate", "tensor, zero3"])
def test_gathering_narrow_changes_no_bit(name: str) -> None:
    narrow, wide = compiled(name, "bf16"), compiled(name, "bf16", without=("casts",))
    results = [optree.tree_leaves(step(PARAMS, TOKENS)) for step in (narrow, wide)]
    assert all(map(torch.equal, *results))
    assert "casts" in narrow.program.passes
    sent = [
        sum(each.bytes for each in step.program.collectives() if each.kind == "all_gather") for step in (narrow, wide)
    ]
    assert 2 * sent[0] == sent[1] > 0


def test_vmap_and_hessian_compose() -> None:
    f = fp.mixed_precision("bf16")(lambda w, x: F.softmax(x @ w, -1).square().sum())
    w, x = torch.tensor([[1.0, 2.0], [0.5, -1.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    wide = lambda w, x: F.softmax(x @ w, -1).square().sum()  # noqa: E731
    per_sample = fp.vmap(fp.grad(f), (None, 0))(w, x)
    torch.testing.assert_close(per_sample, fp.vmap(fp.grad(wide), (None, 0))(w, x), rtol=0.03, atol=0.01)
    torch.testing.assert_close(fp.hessian(f)(w, x), fp.hessian(wide)(w, x), rtol=0.05, atol=0.02)


# -----------------------------------------------------------------------------
# Types of what travels
# -----------------------------------------------------------------------------


@one_in(3, kind=["bf16", "fp16"], reduce=["fp32", "bf16", "fp16"], params=[None, "fp32"])
def test_every_collective_has_the_type_asked_for(kind: str, reduce: str, params: str | None) -> None:
    types = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
    step = compiled("tensor, zero3", kind, reduce, params)
    gathered, compute, reduced = types[params or kind], types[kind], types[reduce]
    assert {dtype for name, _, dtype in networks.collectives(step) if name == "all_gather"} == {gathered}
    assert {dtype for name, _, dtype in networks.collectives(step) if name == "psum_scatter"} == {reduced}
    psums = [each for each in step.program.collectives() if each.kind == "psum" and each.axes == ("tensor",)]
    activations = [each for each in psums if each.operand.ndim == 3]
    assert len(activations) >= 4  # of a layer
    assert {each.operand.dtype for each in activations} == {compute}


def test_gradients_that_an_island_leaves_wide_are_reduced_in_the_type_asked_for() -> None:
    def f(p: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x @ p["w"], (4,), p["scale"], p["shift"]).sum()

    params = {"w": torch.eye(4), "scale": torch.ones(4), "shift": torch.zeros(4)}
    plan = fp.chain(fp.mixed_precision("bf16", reduce="bf16"), fp.data_parallel("data"))
    program = fp.compile(fp.grad(plan(f)), Mesh(data=2)).lower(params, torch.ones(4, 4))
    assert [each.operand.dtype for each in program.collectives() if each.kind == "psum"] == [BF16] * 3


@one_in(3, stage=[0, 1, 2, 3], reduce=["fp32", "bf16"], pipe=[False, True], take=["unbind", "index"])
def test_gradients_of_stacked_layers_are_reduced_in_the_type_asked_for(
    stage: int, reduce: str, pipe: bool, take: str
) -> None:
    def f(p: Any, x: Tensor) -> Tensor:
        for w in p["layers"] if take == "unbind" else [p["layers"][index] for index in range(4)]:
            x = torch.tanh(x @ w)
        return x.float().square().mean()

    plan, mesh = fp.chain(fp.mixed_precision("bf16", reduce=reduce), fp.zero(stage, "data")), Mesh(data=2)
    if pipe:
        plan, mesh = fp.chain(plan, fp.pipeline("pipe", {"*": P("pipe")}, microbatches=2)), Mesh(data=2, pipe=2)
    train = fp.train_step(f, fp.optim.sgd(0.1), mesh, plan)
    train.lower(train.init({"layers": torch.zeros(4, 8, 8)}), torch.ones(8, 8))
    summed = [each for each in train.program.collectives() if each.kind in ("psum", "psum_scatter")]
    found = {each.operand.dtype for each in summed if each.operand.numel > 1 and "data" in each.axes}
    assert found == {FP32 if reduce == "fp32" else BF16}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_microbatches_are_summed_in_float32(stage: int) -> None:
    """In bfloat16, 256 and 1 are 256."""

    def f(p: Any, x: Tensor) -> Tensor:
        return (p["w"] * x).float().sum(1).mean()

    x = torch.tensor([256.0, 1, 1, 2] * 2)[:, None] * torch.ones(4)
    plan = fp.chain(fp.mixed_precision("bf16", reduce="bf16"), fp.zero(stage, "data"), fp.accumulate(4))
    train = fp.train_step(f, fp.optim.sgd(1.0), Mesh(data=2), plan)
    state, _ = train(train.init({"w": torch.zeros(4)}), x)
    assert torch.equal(train.params(state)["w"], torch.full((4,), -260 / 4))


@one_in(2, stage=[0, 1, 2, 3], reduce=["fp32", "bf16"])
def test_every_stage_reduces_gradients_in_the_type_asked_for(stage: int, reduce: str) -> None:
    dtype = {"fp32": FP32, "bf16": BF16}[reduce]
    plan = fp.chain(fp.mixed_precision("bf16", reduce=reduce), fp.zero(stage, "data"))
    train = fp.train_step(loss_of, fp.optim.adamw(1e-3), Mesh(data=2), plan, clip=1.0)
    train.lower(train.init(PARAMS), TOKENS)
    summed = [each for each in train.program.collectives() if each.kind in ("psum", "psum_scatter")]
    assert {each.operand.dtype for each in summed if each.operand.numel > 4} == {dtype}
    updated = [each for each in train.program.collectives() if each.kind == "all_gather"]
    assert {each.operand.dtype for each in updated} == ({BF16} if stage else set())


# -----------------------------------------------------------------------------
# Types of what computes
# -----------------------------------------------------------------------------


def test_products_are_narrow_and_islands_wide() -> None:
    for kind, reduce, narrow in (("bf16", "fp32", BF16), ("fp16", "fp16", FP16)):
        program = compiled("tensor, zero3", kind, reduce).program
        assert networks.types_of(program, "mm", "bmm") == {narrow}
        islands = ("native_layer_norm", "native_layer_norm_backward", "_log_softmax", "exp", "log", "mean", "pow")
        assert networks.types_of(program, *islands) == {FP32}
        assert networks.types_of(program, "gelu") == {narrow}


def seen(transform: Any, f: Any, *args: Any) -> list[torch.dtype]:
    """The types of the tensors that f returns, before they are widened at the end."""
    found: list[torch.dtype] = []

    def watched(*args: Any) -> Tensor:
        results = f(*args)
        found.extend(result.dtype for result in results)
        return results[0]

    transform(watched)(*args)
    return found


X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("f", "dtype"),
    [
        (lambda w, x: x @ w, BF16),
        (lambda w, x: torch.matmul(x.float(), w), BF16),
        (lambda w, x: torch.einsum("ij, jk -> ik", x, w), BF16),
        (lambda w, x: F.linear(x, w.T, w[0]), BF16),
        (lambda w, x: F.conv1d(x[None], w[:2, :2, None].float()), BF16),
        (lambda w, x: F.scaled_dot_product_attention(x[None], w[None].float(), w[None]), BF16),
        (lambda w, x: x.softmax(-1), BF16),
        (lambda w, x: F.softmax(x, -1, dtype=torch.float32), FP32),
        (lambda w, x: F.layer_norm(x, (4,), w[0]), BF16),
        (lambda w, x: torch.var(x, 0), BF16),
        (lambda w, x: x**2, BF16),
        (lambda w, x: x.float().exp(), FP32),
        (lambda w, x: x.sum(), FP32),
        (lambda w, x: F.mse_loss(x, 0 * x, reduction="none"), FP32),
        (lambda w, x: F.binary_cross_entropy(x.sigmoid(), 0 * x), FP32),
        (lambda w, x: F.cross_entropy(x, torch.tensor([0, 1])), FP32),
        (lambda w, x: x.float() + w[:2], FP32),
        (lambda w, x: torch.lerp(x, x.float(), 0.5), FP32),
        (lambda w, x: x.index_add(0, torch.tensor([0]), w[:1].float()), FP32),
        (lambda w, x: torch.relu(x), BF16),
    ],
)
def test_the_type_of_each_kind_of_function(f: Any, dtype: torch.dtype) -> None:
    assert seen(fp.mixed_precision("bf16"), lambda w, x: (f(w, x),), torch.ones(4, 4), X) == [dtype]


def test_islands_compute_in_float32() -> None:
    """One part in 512 is lost in bfloat16: the variance of numbers about 256 would be zero."""
    x = 256 + torch.tensor([[0.0, 2.0, 4.0, 6.0]])
    found = fp.mixed_precision("bf16")(lambda w, x: F.layer_norm(x, (4,)))(X, x)
    torch.testing.assert_close(found, F.layer_norm(x, (4,)), rtol=0.01, atol=0)


def test_kept_parameters_stay_and_so_do_products_with_them() -> None:
    params = {"router": torch.ones(4, 4), "w": torch.ones(4, 4)}
    types = lambda p, x: (x @ p["router"].T, x @ p["w"].T, p["router"] * 2)  # noqa: E731
    assert seen(fp.mixed_precision("bf16", keep=["rout*"]), types, params, X) == [FP32, BF16, FP32]
    assert seen(fp.mixed_precision("bf16"), types, params, X) == [BF16, BF16, BF16]


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("outer", [(fp.zero(3, "data"),), (fp.zero(1, "data"), fp.accumulate(2))])
def test_a_batch_keeps_its_digits_where_asked(kind: str, outer: tuple[Any, ...]) -> None:
    """A target of 1000.3 is 1000 in bfloat16, and its square is infinite in float16; products stay narrow."""
    w, x, y = torch.zeros(4), torch.ones(8, 4), torch.full((8,), 1000.3)

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        product = x @ w
        assert product.dtype == (BF16 if kind == "bf16" else FP16)
        return ((product - y) ** 2).mean()

    want = torch.func.grad_and_value(lambda w: ((x @ w - y) ** 2).mean())(w)
    plan = fp.chain(fp.mixed_precision(kind, inputs="fp32", loss_scale=None), *outer)
    train = fp.train_step(loss, fp.optim.sgd(1.0), Mesh(data=2), plan)
    state, metrics = train(train.init(w), x, y)
    torch.testing.assert_close(metrics.loss, want[1])
    torch.testing.assert_close(-train.params(state), want[0], rtol=0.01, atol=0)


def test_users_add_islands_by_name_or_function() -> None:
    f = lambda w, x: torch.tanh(x * 1.01).sum()  # noqa: E731
    types = [
        networks.types_of(
            networks.lowered(fp.mixed_precision("bf16", islands=islands)(f), Mesh(), X, X).program, "tanh"
        )
        for islands in ((), ["tanh"], [torch.tanh])
    ]
    assert types == [{BF16}, {FP32}, {FP32}]


def test_running_statistics_are_not_rounded() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    fn, params, buffers = fp.functional(module, buffers=True)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    _, updated = fp.mixed_precision("bf16")(fn)(params, buffers, x)
    _, wide = fn(params, buffers, x)
    for name in ("1.running_mean", "1.running_var"):
        assert updated[name].dtype == FP32
        assert not torch.equal(updated[name], updated[name].bfloat16().float())
        torch.testing.assert_close(updated[name], wide[name], rtol=0.01, atol=0.01)


# -----------------------------------------------------------------------------
# Bad input
# -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compute": "fp8"}, r"compute='fp8'\) is not supported; it is 'bf16' or 'fp16'"),
        ({"compute": "bf16", "reduce": "int8"}, r"reduce='int8'\) is not supported; it is 'fp32' or 'bf16' or 'fp16'"),
        ({"compute": "bf16", "params": "fp16"}, r"params='fp16'\) is not supported; it is 'bf16' or 'fp32'"),
        ({"compute": "bf16", "inputs": "fp16"}, r"inputs='fp16'\) is not supported; it is 'bf16' or 'fp32'"),
        ({"compute": "bf16", "islands": ["tahn"]}, r"no torch function or method 'tahn'"),
        ({"compute": "fp16", "loss_scale": -1.0}, r"loss_scale=-1.0\): it is fp.LossScale"),
        ({"compute": "fp16", "loss_scale": "dynamic"}, r"or 'auto'"),
    ],
)
def test_bad_input_says_what_is_supported(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp.mixed_precision(**arguments)


def test_precision_stands_innermost() -> None:
    with pytest.raises(fp.OrderError, match=r"write chain\(mixed_precision\('bf16'\), zero\(3, 'data'\)\)"):
        fp.chain(fp.zero(3, "data"), fp.mixed_precision("bf16"))
