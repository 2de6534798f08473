"""`fp.testing.assert_equivalent` checks at drawn arguments too, and functions of any results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_parallel as fp
from functional_parallel.errors import NotEquivalentError
from functional_parallel.testing import assert_equivalent
from functional_parallel.testing.drawn import drawn_arguments
from sharding_specs import Mesh, P

LIBRARY = torch.library.Library("drawn_arguments_tests", "DEF")
LIBRARY.define("scaled(Tensor x, Tensor scale) -> Tensor")
LIBRARY.impl("scaled", lambda x, scale: x * scale, "CompositeExplicitAutograd")
torch.library.register_fake("drawn_arguments_tests::scaled", lambda x, scale: torch.empty_like(x), lib=LIBRARY)
OP = torch.ops.drawn_arguments_tests.scaled


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Any:
        return OP(x, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # type: ignore[override]
        x, scale = ctx.saved_tensors
        return cotangent * scale, (cotangent * x).sum(0)


def ignoring_the_scale(step: Any, x: Tensor, scale: Tensor) -> Tensor:
    """An error that scales of one hide."""
    return step.run(x, scale if step.choice is None else scale - scale.detach() + 1)


fp.register_rule(OP, "~r c, c -> r c", ignoring_the_scale, function=Scaled.apply)

MESH = Mesh(data=2)
DATA = fp.data_parallel("data")


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def hidden(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return Scaled.apply(x @ params["w"], params["scale"]).tanh().sum()


def test_an_error_that_initial_scales_of_one_hide_is_found() -> None:
    params = {"w": normal(4, 4), "scale": torch.ones(4)}
    assert_equivalent(hidden, DATA, MESH, params, normal(4, 4), draw=False)
    with pytest.raises(NotEquivalentError, match=r"value under .* at drawn arguments \(not with draw=False\)"):
        assert_equivalent(hidden, DATA, MESH, params, normal(4, 4))


def test_the_program_is_that_of_the_given_arguments() -> None:
    step = assert_equivalent(lambda w, x: (x @ w).tanh().sum(), DATA, MESH, normal(4, 4), normal(4, 4))
    assert {str(one.operand) for one in step.program.collectives()} == {"f32[]", "f32[4, 4]"}


# -----------------------------------------------------------------------------
# What is drawn
# -----------------------------------------------------------------------------


def draws(loss: Any, *args: Any, exact: bool = False) -> Any:
    return next(iter(drawn_arguments(loss, args, exact=exact)))


def test_floats_keep_signs_and_the_unit_interval() -> None:
    given = {"scale": torch.ones(50), "variance": torch.full((50,), 3.0), "bias": torch.zeros(50), "w": normal(50)}
    params, x = draws(lambda p, x: x, given, normal(8).to(torch.bfloat16))
    assert {leaf.dtype for leaf in (*params.values(), x)} == {torch.float64}
    assert 0.5 <= params["scale"].min() < params["scale"].max() <= 1
    assert 1 < params["variance"].min() < params["variance"].max() < 5
    assert params["bias"].min() < 0 < params["bias"].max()
    assert not torch.isclose(params["w"], given["w"].double()).any()


def test_exact_floats_keep_their_elements() -> None:
    given = torch.arange(12.0)
    (params,) = draws(lambda p: p, given, exact=True)
    assert not torch.equal(params, given) and torch.equal(params.sort().values, given.double())
    (ones,) = draws(lambda p: p, torch.ones(12), exact=True)
    assert set(ones.tolist()) == {1.0, 2.0, 3.0}


def test_shared_leaves_stay_shared() -> None:
    w = normal(4)
    (params,) = draws(lambda p: p["a"], {"a": w, "b": w})
    assert params["a"] is params["b"]
    both = torch.zeros(64, dtype=torch.int64)  # as tokens and as labels, of which none may be ignored then
    _, tokens, labels = draws(language_model, normal(11, 4), both, both)
    assert tokens is labels and {0, 10} < set(tokens.tolist()) <= set(range(11))


def language_model(params: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(params[tokens.flatten()] @ params.T, labels.view(-1))


def test_integers_cover_the_vocabulary_and_ignored_labels() -> None:
    zeros = torch.zeros(8, 8, dtype=torch.int64)
    _, tokens, labels = draws(language_model, normal(11, 4), zeros, zeros.clone())
    assert {0, 10} < set(tokens.flatten().tolist()) <= set(range(11))
    assert {-100, 0, 10} < set(labels.flatten().tolist()) <= {-100, *range(11)}


def test_a_leaf_with_several_uses_has_what_all_of_them_accept() -> None:
    """Inputs and labels of one leaf, shifted: no label is ignored, since no row is embedded for it."""

    def shifted(table: dict[str, Tensor], tokens: Tensor) -> Tensor:
        logits = F.embedding(tokens[:, :-1], table["in"]) @ table["out"]
        return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])

    table = {"in": normal(5, 4), "out": normal(4, 7)}
    _, tokens = draws(shifted, table, torch.zeros(8, 9, dtype=torch.int64))
    assert {0, 4} < set(tokens.flatten().tolist()) <= set(range(5))


@pytest.mark.parametrize("use", [lambda p, i: p[i % 5], lambda p, i: p * i.sum(), lambda p, i: p * 1])
def test_integers_without_a_proof_keep_their_elements(use: Any) -> None:
    given = torch.tensor([3, 3, 8, 1, -100, 2, 9, 4])
    _, index = draws(use, normal(5), given)
    assert not torch.equal(index, given) and sorted(index.tolist()) == sorted(given.tolist())


def test_booleans_infinities_and_parameters_that_are_integers_stay() -> None:
    mask, bias, step = torch.tensor([True, False]), torch.tensor([0.0, -torch.inf]), torch.arange(4)
    params, *batch = draws(lambda p, m, b: p["w"], {"w": normal(2), "step": step}, mask, bias)
    assert torch.equal(batch[0], mask) and torch.equal(batch[1], bias.double()) and torch.equal(params["step"], step)


def test_an_illegal_draw_is_replaced_by_one_that_changes_less() -> None:
    """Cumulative offsets must not decrease; the parameters are drawn all the same."""
    seen = []

    def loss(w: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor) and not torch.func.debug_unwrap(x).requires_grad:
            seen.append(offsets.tolist())
            if sorted(seen[-1]) != seen[-1]:
                raise IndexError("offsets decrease")
        return (x @ w).sum() * offsets.double().sum()

    offsets = torch.arange(8)
    assert_equivalent(loss, DATA, MESH, normal(4), normal(8, 4), offsets)
    assert any(each != offsets.tolist() for each in seen) and seen[-1] == offsets.tolist()


def test_a_function_that_no_draw_suits_is_warned_of() -> None:
    given = normal(4)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return torch.where((w == given).all(), (x @ w).sum(), torch.nan)

    with pytest.warns(UserWarning, match=r"given arguments alone.*not finite there.*draw=False"):
        assert_equivalent(loss, DATA, MESH, given, normal(8, 4))
    assert_equivalent(loss, DATA, MESH, given, normal(8, 4), draw=False)


def test_a_function_that_casts_is_held_to_the_type_it_casts_to() -> None:
    loss = lambda w, x: ((x @ w).float().tanh().to(w) @ w).sin().sum()  # noqa: E731
    assert_equivalent(loss, DATA, MESH, normal(16, 16), normal(64, 16))


def test_a_function_of_one_type_is_drawn_in_it() -> None:
    closed = normal(4, 4)
    assert_equivalent(lambda w, x: (x @ closed @ w).sum(), DATA, MESH, normal(4), normal(8, 4))


# -----------------------------------------------------------------------------
# Results that are not scalar
# -----------------------------------------------------------------------------


def several(params: dict[str, Tensor], x: Tensor) -> dict[str, Any]:
    h = torch.tanh(x @ params["w"])
    return {"each": (h @ params["v"]).sum(1), "all": h.mean(), "best": h.argmax(1), "name": "tanh"}


PLANS: dict[str, tuple[Any, Mesh]] = {
    "tensor and zero": (
        fp.chain(fp.tensor_parallel("tensor", {"w": P(None, "tensor"), "v": P("tensor")}), fp.zero(3, "data")),
        Mesh(data=2, tensor=2),
    ),
    "unequal microbatches": (fp.chain(fp.remat(), fp.accumulate(3)), Mesh()),
    "a pipeline": (fp.pipeline("pipe", microbatches=4), Mesh(pipe=2)),
}


@pytest.mark.parametrize("plan", PLANS)
def test_results_of_any_structure(plan: str) -> None:
    params = {"w": normal(4, 4).double(), "v": normal(4, 2).double()}
    step = assert_equivalent(several, *PLANS[plan], params, normal(8, 4).double())
    assert step.program is not None


def test_a_wrong_gradient_of_a_vector_is_found() -> None:
    """Weights differ, so that errors of opposite signs do not cancel."""

    class Swapped(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Any:
            return torch.ops.drawn_arguments_tests.swapped(x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
            return cotangent

    LIBRARY.define("swapped(Tensor x) -> Tensor")
    LIBRARY.impl("swapped", lambda x: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake("drawn_arguments_tests::swapped", torch.empty_like, lib=LIBRARY)
    local = lambda step, x: x.detach() + (x - x.detach()).flip(-1)  # noqa: E731
    fp.register_rule(torch.ops.drawn_arguments_tests.swapped, "... -> ...", local, function=Swapped.apply)
    with pytest.raises(NotEquivalentError, match="gradient under"):
        assert_equivalent(lambda w, x: Swapped.apply(x * w), DATA, MESH, normal(4), normal(8, 4))


def test_a_function_without_a_gradient_is_compared_by_value() -> None:
    step = assert_equivalent(lambda w, x: (x @ w).argmax(1), DATA, MESH, normal(4, 4), normal(8, 4))
    assert step.program.counts() == {}


# -----------------------------------------------------------------------------
# Functions whose gradient torch.func does not take as it is, and their precision
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [None, 0])
def test_sparse_gradients_are_compared_dense(padding: int | None) -> None:
    fn, params = fp.functional(nn.Embedding(6, 2, padding_idx=padding, sparse=True))
    ids = torch.tensor([[1, 2], [3, 5], [0, 0], [0, 0]])
    assert_equivalent(lambda p, i: fn(p, i).square().mean(), fp.zero(3, "data"), MESH, params, ids)
    bag, params = fp.functional(nn.EmbeddingBag(6, 2, mode="sum", sparse=True))
    assert_equivalent(lambda p, i: bag(p, i).square().mean(), DATA, MESH, params, ids)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_functions_are_checked(reentrant: bool) -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        parts = (checkpoint(lambda c, w: (c @ w).square().sum(), c, w, use_reentrant=reentrant) for c in x.chunk(4))
        return torch.stack([*parts]).sum() / x.numel()

    assert_equivalent(loss, DATA, MESH, normal(3, 3).double(), normal(8, 3).double())


LIBRARY.define("nudged(Tensor x) -> Tensor")
LIBRARY.impl("nudged", lambda x: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("drawn_arguments_tests::nudged", torch.empty_like, lib=LIBRARY)


class Nudged(torch.autograd.Function):
    """Its rule is wrong by 1e-9 in every sharded value."""

    @staticmethod
    def forward(x: Tensor) -> Any:
        return torch.ops.drawn_arguments_tests.nudged(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # type: ignore[override]
        return cotangent


def nudge(step: Any, x: Tensor) -> Tensor:
    return step.run(x) * (1 if step.choice is None else 1 + 1e-9)


fp.register_rule(torch.ops.drawn_arguments_tests.nudged, "... -> ...", nudge, function=Nudged.apply)


def test_the_tolerance_follows_the_least_precise_dtype_on_the_way() -> None:
    """Of each result: float32 sums differ by rank count, and a float64 result beside them must not."""
    w, x = normal(64), normal(512, 64)

    def summed(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).sum().double()

    assert_equivalent(summed, DATA, MESH, w, x, draw=False)
    with pytest.raises(NotEquivalentError, match="value under"):
        assert_equivalent(lambda w, x: Nudged.apply(x @ w).sum(), DATA, MESH, w.double(), x.double(), draw=False)

    def several(w: Tensor, x: Tensor) -> dict[str, Tensor]:
        return {"precise": Nudged.apply(x @ w), "rounded": (x @ w * 1e-12).bfloat16().float()}

    with pytest.raises(NotEquivalentError, match=r"leaf precise: .*allowed .*e-1"):
        assert_equivalent(several, DATA, MESH, w.double(), x.double(), draw=False)
    assert_equivalent(
        lambda w, x: Nudged.apply((x @ w).float()).double().sum(), DATA, MESH, w.double(), x.double(), draw=False
    )
