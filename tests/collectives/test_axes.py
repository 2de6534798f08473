"""Names, sizes and scopes of mesh axes."""

from __future__ import annotations

import threading

import pytest
import torch

from functional_parallel import collectives as fp
from functional_parallel import errors
from functional_parallel.collectives import axes


@pytest.mark.parametrize("given, names", [("a", ("a",)), (("a", "b"), ("a", "b")), (["b"], ("b",))])
def test_one_name_or_several(given: object, names: tuple[str, ...]) -> None:
    assert axes.normalize_axes(given) == names  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given, error, message",
    [
        (("a", "a"), ValueError, "'a' is named twice"),
        ((), ValueError, "no mesh axis"),
        (("a", 1), TypeError, "not by 1"),
    ],
)
def test_names_that_make_no_sense(given: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        axes.normalize_axes(given)  # type: ignore[arg-type]


def test_inner_bindings_shadow_outer_ones() -> None:
    with fp.bind({"a": 2, "b": 3}, None):
        with fp.bind({"a": 5}, None):
            assert fp.current_axes() == {"a": 5, "b": 3}
            assert fp.axis_size(("a", "b")) == 15
        assert fp.current_axes() == {"a": 2, "b": 3}
    assert fp.current_axes() == {}


def test_an_unbound_axis_says_what_is_bound_and_how_to_bind_it() -> None:
    with fp.bind({"tensor": 2}, None), pytest.raises(errors.UnboundAxisError) as caught:
        fp.psum(torch.ones(2), "data")
    assert isinstance(caught.value, NameError)
    for part in ("psum over axis 'data'", "tensor=2", "fp.shard_map", "fp.vmap(axis_name='data')"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: fp.psum(torch.ones(2), "data"),
        lambda: fp.psum(1, "data"),
        lambda: fp.all_gather(torch.ones(2), "data"),
        lambda: fp.ppermute(torch.ones(2), "data", [(0, 1)]),
        lambda: fp.pscatter({}, "data"),
        lambda: fp.axis_index("data"),
        lambda: fp.axis_size("data"),
    ],
)
def test_every_collective_on_a_hidden_axis_is_an_error(call: object) -> None:
    with fp.bind({"data": 4}, None), fp.hide("data"):
        assert fp.mesh_axis_size("data") == 4
        with pytest.raises(errors.UnboundAxisError, match="is hidden here"):
            call()  # type: ignore[operator]


def test_a_backward_means_the_axes_of_its_forward() -> None:
    """Also after the binding ended, and on another thread, where a context variable is not set."""
    x = torch.ones(2, requires_grad=True)
    with fp.bind({"a": 1}, None):
        y = fp.psum(x * 3, "a").sum()
    gradients = []
    thread = threading.Thread(target=lambda: gradients.extend(torch.autograd.grad(y, x)))
    thread.start()
    thread.join()
    assert torch.equal(gradients[0], torch.full((2,), 3.0))


def test_staging_keeps_sizes_and_takes_carriers_away() -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        with axes.trace_only():
            assert axes.communicator_for("psum", ("i",)) is None
            assert fp.axis_size("i") == 3
        return fp.psum(x, "i")

    assert fp.vmap(inside, out_dims=None, axis_name="i")(torch.ones(3)) == 3
