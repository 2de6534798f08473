"""Rematerialisation and regathering: the same values, other lifetimes."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.ir import info
from sharding_specs import Mesh

from .networks import SPLIT, batch, integer_loss, loss, noisy_loss, parameters

LAYERS = 4


def program(plan: Any, f: Any = loss, mesh: Mesh | None = None, params: Any = None, **options: Any) -> Any:
    step = fp.compile(fp.grad_and_value(plan(f)), mesh or Mesh(), **options)
    return step.lower(parameters(LAYERS) if params is None else params, *batch(16))


@cache
def rematerialised(*policy: str, **options: Any) -> Any:
    """The program with this recomputation, for tests that only read it."""
    return program(fp.remat(*policy, **options))


def products(found: Any) -> int:
    return sum(node.target is torch.ops.aten.mm.default for node in found.traced.nodes)


def kept(found: Any) -> int:
    """Bytes of forward activations that the backward uses: every op's result that a backward op takes."""
    total = 0
    for node in found.traced.nodes:
        if not info(node).backward and any(user.op != "output" and info(user).backward for user in node.users):
            total += info(node).aval.nbytes
    return total


@settings(max_examples=7)
@given(
    policy=st.sampled_from(["layers", "attention", "nothing"]),
    every=st.integers(1, 3),
    stage=st.integers(0, 3),
    keep=st.booleans(),
    prefetch=st.integers(0, 3),
    microbatches=st.sampled_from([1, 2]),
)
def test_gradients_are_the_same_to_the_bit(
    policy: str, every: int, stage: int, keep: bool, prefetch: int, microbatches: int
) -> None:
    plan = fp.chain(
        fp.remat(policy, every=every if policy == "layers" else 1),
        fp.tensor_parallel("tensor", SPLIT),
        fp.zero(stage, "data", keep_gathered=keep, prefetch=prefetch),
        fp.accumulate(microbatches),
    )
    mesh, params = Mesh(data=2, tensor=2), parameters(3, integers=True)
    fp.testing.assert_equivalent(integer_loss, plan, mesh, params, *batch(8, integers=True), exact=True)


def test_each_policy_computes_again_what_it_says() -> None:
    """Forward: two products a layer and the head. A layer's first product is needed again, its second is not."""
    plain = products(rematerialised(where="none"))
    assert products(rematerialised()) == plain + LAYERS
    assert products(rematerialised(every=2)) == plain + LAYERS + LAYERS // 2  # and what one hands the other
    assert products(rematerialised(where="layers/0")) == plain + 1
    assert products(rematerialised("nothing")) == plain + 2 * LAYERS + 1


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_layers_are_met_where_they_compute(stage: int) -> None:
    """Not where ZeRO-3 gathers their parameters, by the order of their names: "stem" comes last there."""

    def f(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(params, torch.relu(x @ params["stem"]), y)

    params = {**parameters(2), "stem": torch.eye(8, dtype=torch.float64)}
    found = [
        products(program(fp.chain(policy, fp.zero(stage, "data")), f, Mesh(data=2), params))
        for policy in (fp.remat(where="none"), fp.remat())
    ]
    assert found[1] == found[0] + 2


def test_fewer_bytes_are_kept() -> None:
    sizes = [kept(rematerialised(**options)) for options in ({"where": "none"}, {}, {"every": 2})]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < sizes[1] < sizes[0]


def test_dropout_repeats_itself() -> None:
    params, inputs = parameters(2), batch(8)
    found = []
    for plan in (fp.remat(), fp.remat(where="none")):
        train = fp.train_step(noisy_loss, fp.optim.sgd(0.1), Mesh(), plan, seed=1)
        found.append(train.params(train(train.init(params), *inputs)[0])["layers"][0]["a"])
    assert torch.equal(*found)


def test_what_a_marked_function_returns_is_saved() -> None:
    """It is computed from a value outside the function, and the backward of what follows needs it."""

    @fp.recompute
    def marked(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x)

    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(marked(torch.tanh(x @ w))).sum()

    w, x = torch.eye(4), torch.ones(2, 4)
    found = fp.compile(fp.grad_and_value(fp.data_parallel("data")(f)), Mesh(data=2)).lower(w, x)
    assert sum(node.target is torch.ops.aten.exp.default for node in found.traced.nodes) == 1


def test_a_marked_function() -> None:
    @fp.recompute
    def block(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ w) @ w)

    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return block(w, block(w, x)).sum()

    w, x = parameters(1, 4)["layers"][0]["a"][:, :4].contiguous(), batch(4, 4)[0]
    marked, plain = fp.compile(fp.grad_and_value(fp.data_parallel("data")(f)), Mesh(data=2)), torch.func.grad(f)(w, x)
    torch.testing.assert_close(marked(w, x)[0], plain, rtol=1e-12, atol=1e-14)
    unmarked = fp.compile(fp.grad_and_value(fp.data_parallel("data")(f)), Mesh(data=2), without=("recompute",))
    assert products(marked.program) == products(unmarked.lower(w, x)) + 2
    assert torch.equal(f(w, x), f.__wrapped__(w, x) if hasattr(f, "__wrapped__") else f(w, x))


def test_attention_alone() -> None:
    def attend(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in params["layers"]:
            h = (x @ layer["a"]).reshape(4, 3, 16)
            scores = torch.softmax(h @ h.transpose(1, 2) / 4, -1).masked_fill(torch.eye(3, dtype=torch.bool), 0.0)
            x = x + (scores @ h).reshape(12, 16) @ layer["b"]
        return x.sum()

    params = {"layers": [{"a": torch.randn(8, 16).double(), "b": torch.randn(16, 8).double()} for _ in range(2)]}
    found = fp.compile(fp.grad(fp.remat("attention")(attend)), Mesh())
    x, y = torch.randn(12, 8).double(), torch.zeros(12)
    torch.testing.assert_close(
        found(params, x, y)["layers"][0]["a"], torch.func.grad(attend)(params, x, y)["layers"][0]["a"]
    )
    again = [node for node in found.program.traced.nodes if info(node).recomputed]
    count = {name: sum(name in str(node.target) for node in again) for name in ("softmax", "masked_fill", "bmm", ".mm")}
    assert count == {"softmax": 2, "masked_fill": 2, "bmm": 2, ".mm": 0}


def test_a_policy_of_ones_own() -> None:
    def keep(node: torch.fx.Node) -> bool:
        return node.target is torch.ops.aten.mm.default

    again = [n for n in program(fp.remat(keep)).traced.nodes if info(n).recomputed]
    assert again
    assert all(node.target is not torch.ops.aten.mm.default for node in again)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_sent_per_step(stage: int) -> None:
    """2Ψ(n−1)/n for DDP and stages 1 and 2, 3Ψ(n−1)/n for stage 3 (arXiv 1910.02054 §7), the loss's scalars apart."""
    ranks, params = 4, parameters(2)
    size = sum(leaf.nbytes for layer in params["layers"] for leaf in layer.values()) + params["head"].nbytes
    train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=ranks), fp.zero(stage, "data"))
    found = train.lower(train.init(params), *batch(16))
    sent = sum(one.bytes for one in found.collectives() if one.operand.numel > 4)
    first_layer = params["layers"][0]["a"].nbytes  # its input needs no gradient, so the backward needs it not
    factor = {0: 2, 1: 2, 2: 2, 3: 3}[stage]
    assert sent == (factor * size - (first_layer if stage == 3 else 0)) * (ranks - 1) // ranks


@pytest.mark.parametrize("wrong", [{"policy": "all"}, {"every": 0}])
def test_unknown_policies(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"remat\(.*(the policies are 'layers'|at least one layer)"):
        fp.remat(**wrong)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_checkpoints_itself(reentrant: bool) -> None:
    """torch.utils.checkpoint in model code means what fp.recompute does, under any plan."""

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ w) @ w)

    def f(params: Any, x: torch.Tensor, checkpointed: bool = True) -> torch.Tensor:
        for w in params["layers"]:
            x = torch.utils.checkpoint.checkpoint(block, x, w, use_reentrant=reentrant) if checkpointed else block(x, w)
        return x.sum()

    params, x = {"layers": [torch.randn(4, 4).double() / 2 for _ in range(3)]}, batch(4, 4)[0]
    step = fp.compile(fp.grad_and_value(fp.zero(3, "data")(f)), Mesh(data=2))
    grads, _ = step(params, x)
    want = fp.grad(lambda p, x: f(p, x, checkpointed=False))(params, x)
    torch.testing.assert_close(grads, want, rtol=1e-12, atol=1e-14)
    plain = fp.compile(fp.grad_and_value(fp.zero(3, "data")(f)), Mesh(data=2), without=("recompute",))
    assert products(step.program) > products(plain.lower(params, x))


def test_hugging_faces_gradient_checkpointing() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).train()
    model.config.use_cache = False
    tokens = torch.randint(0, 32, (2, 8))
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # the name changes in version 6
                model.gradient_checkpointing_enable()
        fn, params = fp.functional(model)

        def loss(params: Any, tokens: torch.Tensor, fn: Any = fn) -> torch.Tensor:
            return fn(params, input_ids=tokens, labels=tokens).loss

        train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), fp.zero(3, "data"), seed=1)
        state, metrics = train(train.init(params), tokens)
        found.append((metrics.loss, kept(train.program), train.params(state)["transformer.wpe.weight"]))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][2], found[1][2])
    assert found[1][1] < 0.6 * found[0][1]
