"""What the public functions add to the primitives: pytrees, numbers, dims, and errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from functional_parallel import collectives as fp
from functional_parallel import errors

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


def over_i(fn: Callable[..., Any], *args: Any, size: int | None = None, **options: Any) -> Any:
    return fp.vmap(fn, axis_name="i", axis_size=size, **options)(*args)


def test_pytrees_keep_their_structure() -> None:
    tree = {"w": torch.tensor([1, 2]), "b": [Pair(torch.tensor([3, 4]), None), ()]}
    result = over_i(lambda t: fp.psum(t, "i"), tree, out_dims=None)
    assert result == {"w": torch.tensor(3), "b": [Pair(torch.tensor(7), None), ()]}


def test_numbers_need_no_communication() -> None:
    seen = []

    def f(x: torch.Tensor) -> torch.Tensor:
        numbers = [fp.psum(c, "i") for c in (2, 1.5, True)]
        seen.extend([*numbers, fp.pmean(4, "i"), fp.pmax(4, "i"), fp.pvary(4, "i")])
        return x

    over_i(f, torch.ones(3))
    assert seen == [6, 4.5, 3, 4, 4, 4]


def test_a_leaf_that_is_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"all_gather over \('i',\): a leaf is 'x' of type str"):
        over_i(lambda x: fp.all_gather([x, "x"], "i"), torch.ones(2, 3))


def test_a_doubled_psum_is_refused() -> None:
    with pytest.raises(errors.CollectiveTypeError, match=r"A doubled psum\? .* x \* fp.axis_size\('i'\)"):
        over_i(lambda x: fp.psum(fp.psum(x, "i"), "i"), torch.ones(2))


def test_a_doubled_pvary_is_refused() -> None:
    with pytest.raises(errors.CollectiveTypeError, match="a cast to varying does nothing; drop it"):
        over_i(lambda x: fp.pvary(x, "i"), torch.ones(2))


def test_pscatter_of_what_differs_is_refused() -> None:
    with pytest.raises(errors.CollectiveTypeError, match=r"loses data; write fp.all_to_all"):
        over_i(lambda x: fp.pscatter(x, "i"), torch.ones(2, 2))


def test_a_forgotten_pvary_is_found_by_the_gradient() -> None:
    """An Invariant psum meets a Varying value: its gradient differs between ranks, and a plain sum would lose it."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        return fp.psum(x, "i") * x

    with pytest.raises(errors.CollectiveTypeError, match=r"write fp\.pvary"):
        over_i(torch.func.grad(loss), torch.tensor([1.0, 2.0]))
    right = over_i(torch.func.grad(lambda x: fp.pvary(fp.psum(x, "i"), "i") * x), torch.tensor([1.0, 2.0]))
    assert torch.equal(right, torch.tensor([6.0, 6.0]))


def test_a_reduced_value_cast_as_invariant_is_found_by_the_gradient() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor, src: str) -> torch.Tensor:
        reduced = fp.pcast(w, "i", to="reduced")
        return fp.pcast(reduced, "i", to="varying", src=src) * x

    gradient = torch.func.grad(loss)
    w, x = torch.tensor(1.0), torch.tensor([1.0, 2.0])
    options = {"in_dims": (None, 0), "out_dims": None}
    with pytest.raises(errors.CollectiveTypeError, match="src='reduced'"):
        over_i(lambda w, x: gradient(w, x, "auto"), w, x, **options)
    assert over_i(lambda w, x: gradient(w, x, "reduced"), w, x, **options) == 3


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda x: fp.psum_scatter(x, "i"),
            r"dim 0 .* shape \(3, 4\) has size 3, which 2 ranks do not divide; pad it to 4",
        ),
        (lambda x: fp.all_to_all(x, "i", 0, 1), r"all_to_all over 'i': dim 0"),
        (lambda x: fp.scatter(x, "i"), r"scatter over 'i': dim 0"),
        (lambda x: fp.all_gather(x, "i", 2), r"there is no dim 2; the operand of shape \(3, 4\) has dims 0 … 1"),
        (lambda x: fp.all_gather(x, "i", -3), "there is no dim -3"),
        (lambda x: fp.all_gather(x[0, 0], "i"), "the operand is a scalar"),
        (lambda x: fp.ppermute(x, "i", [(0, 2)]), "target 2 does not exist; there are ranks 0 … 1"),
        (lambda x: fp.ppermute(x, "i", [(0, 1), (0, 0)]), "rank 0 is the source of more than one pair"),
        (lambda x: fp.ppermute(x, "i", [(0, 1), (1, 1)]), "rank 1 is the target of more than one pair"),
        (lambda x: fp.pbroadcast(x, "i", 2), "source 2 does not exist"),
        (lambda x: fp.gather(x, "i", -1), "root -1 does not exist"),
    ],
)
def test_dims_and_ranks_that_do_not_fit(call: Callable[[torch.Tensor], Any], message: str) -> None:
    with pytest.raises(errors.CollectiveShapeError, match=message):
        over_i(call, torch.ones(2, 3, 4))


def test_states_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="'replicated' is not a valid State"):
        over_i(lambda x: fp.pcast(x, "i", to="replicated"), torch.ones(2))
    with pytest.raises(errors.CollectiveTypeError, match="it gathers to"):
        over_i(lambda x: fp.all_gather(x, "i", to="unreduced"), torch.ones(2, 2))


def test_recv_takes_only_what_was_sent() -> None:
    with pytest.raises(TypeError, match="one program runs on all ranks"):
        fp.recv(torch.ones(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("operation", [fp.pmax, fp.pmin])
def test_extremes_refuse_derivatives_but_not_detached_operands(operation: Callable[..., torch.Tensor]) -> None:
    x = torch.tensor([1.0, 3.0])
    with pytest.raises(errors.NotDifferentiableError, match=r"x.detach\(\)"):
        over_i(torch.func.grad(lambda x: operation(x, "i")), x)
    with pytest.raises(errors.NotDifferentiableError, match=r"x.detach\(\)"):
        over_i(lambda x: torch.func.jvp(lambda x: operation(x, "i"), (x,), (x,))[1], x)
    gradient = over_i(torch.func.grad(lambda x: x * fp.pvary(operation(x.detach(), "i"), "i")), x)
    assert torch.equal(gradient, torch.full((2,), float(max(x) if operation is fp.pmax else min(x))))


def test_a_sharded_softmax() -> None:
    def shard(x: torch.Tensor) -> torch.Tensor:
        exp = torch.exp(x - fp.pvary(fp.pmax(x.detach(), "i"), "i"))
        return exp / fp.pvary(fp.psum(exp, "i"), "i")

    x, y = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours = lambda x: over_i(shard, x)  # noqa: E731
    truth = lambda x: torch.softmax(x, 0)  # noqa: E731
    torch.testing.assert_close(ours(x), truth(x))
    torch.testing.assert_close(torch.func.vjp(ours, x)[1](y), torch.func.vjp(truth, x)[1](y))
    inside = over_i(lambda x, y: torch.func.vjp(shard, x)[1](y)[0], x, y)
    torch.testing.assert_close(inside, torch.func.vjp(truth, x)[1](y)[0])


def test_vmap_without_a_name_is_torchs() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(fp.vmap(torch.sum, in_dims=1)(x), x.sum(0))
    assert torch.equal(fp.vmap(lambda: torch.ones(2), axis_size=3)(), torch.ones(3, 2))


def test_vmap_needs_one_size() -> None:
    with pytest.raises(ValueError, match="give axis_size="):
        fp.vmap(lambda x: x, in_dims=None, axis_name="i")(torch.ones(2))
    with pytest.raises(ValueError, match=r"must agree, but are \[2, 3\]"):
        fp.vmap(lambda x, y: x, axis_name="i")(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match="all ranks of an axis must meet"):
        fp.vmap(lambda x: x, axis_name="i", chunk_size=1)
    with pytest.raises(ValueError, match="names 1 arguments, but there are 2"):
        fp.vmap(lambda x, y: x, in_dims=(0,), axis_name="i")(torch.ones(2), torch.ones(2))


def test_vmap_maps_pytrees_and_says_which_result_varies() -> None:
    tree = {"x": torch.ones(2), "c": torch.ones(3)}
    result = fp.vmap(
        lambda t: {"sum": fp.psum(t["x"], "i"), "own": t["x"] * t["c"]},
        in_dims=({"x": 0, "c": None},),
        out_dims={"sum": None, "own": 1},
        axis_name="i",
    )(tree)
    assert result["sum"] == 2 and result["own"].shape == (3, 2)
    with pytest.raises(errors.CollectiveTypeError, match="loss is Varying"):
        fp.vmap(lambda x: {"loss": x}, out_dims=None, axis_name="i")(torch.ones(2))
