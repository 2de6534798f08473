"""What is recorded and done again by parts is what it would have been at once, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_parallel as fp
from functional_parallel.training.deferred import CannotDeferError, defer_init

SIDE = 40  # of a square that is large enough to be put off


class Machine:
    """Does to a few tensors, and to generators, what its letters say."""

    def __init__(self, given: Tensor) -> None:
        self.tensors = [given, torch.ones(SIDE, SIDE)]
        self.generator = torch.Generator().manual_seed(1)
        self.saved = torch.get_rng_state()

    def pick(self, number: int) -> Tensor:
        return self.tensors[number % len(self.tensors)]

    def do(self, what: str, a: int, b: int) -> None:
        x, y = self.pick(a), self.pick(b)
        if what in MAKES:
            self.tensors.append(MAKES[what](x, y))
        elif what in WRITES:
            WRITES[what](x, y)
        elif what == "seed":
            torch.manual_seed(a)
        elif what == "seed another":
            self.generator.manual_seed(b)
        elif what in ("draw from another", "hand over"):
            if what == "hand over":
                self.generator.set_state(torch.get_rng_state())
            self.tensors.append(torch.randn(SIDE, SIDE, generator=self.generator))
        elif what == "save":
            self.saved = torch.get_rng_state()
        elif what == "return":
            torch.set_rng_state(self.saved)


MAKES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "empty, filled": lambda x, y: torch.empty(SIDE, SIDE).fill_(2.0),
    "draw": lambda x, y: torch.randn(SIDE, SIDE),
    "draw few": lambda x, y: torch.rand(3).repeat(SIDE, SIDE)[:, :SIDE],
    "draw like": lambda x, y: torch.rand_like(x),
    "add": lambda x, y: x + y,
    "product": lambda x, y: torch.tanh(x @ y / SIDE),
    "turn": lambda x, y: x.t(),
    "copy": lambda x, y: x.clone(),
    "zeros like": lambda x, y: torch.zeros_like(x),
    "halves": lambda x, y: torch.cat([x[: SIDE // 2], y[SIDE // 2 :]]),
    "row": lambda x, y: x[3].expand(SIDE, SIDE).contiguous(),
}
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "scale": lambda x, y: x.mul_(0.5),
    "write": lambda x, y: x.copy_(y.clone()),
    "write into a part": lambda x, y: x[1:3].zero_(),
    "draw into": lambda x, y: x.normal_(),
    "truncated": lambda x, y: nn.init.trunc_normal_(x, std=1.0, a=-1.0, b=1.0),
    "new data": lambda x, y: setattr(x, "data", y.clone()),
}
OTHERS = ("seed", "seed another", "draw from another", "hand over", "save", "return")


STEPS = st.tuples(st.sampled_from([*MAKES, *WRITES, *OTHERS]), st.integers(0, 5), st.integers(0, 5))


def square() -> Tensor:
    return torch.arange(SIDE * SIDE, dtype=torch.float32).reshape(SIDE, SIDE)


@settings(max_examples=36)
@given(st.lists(STEPS, max_size=14))
def test_values_and_generators_are_those_of_the_function(steps: list[tuple[str, int, int]]) -> None:
    def run(given: Tensor, generators: list[torch.Generator]) -> list[Tensor]:
        machine = Machine(given)
        generators.append(machine.generator)
        for step in steps:
            machine.do(*step)
        return machine.tensors

    torch.manual_seed(0)
    mine, its = square(), []  # type: tuple[Tensor, list[torch.Generator]]
    expected = run(mine, its)
    after = [torch.get_rng_state(), its[0].get_state()]
    torch.manual_seed(0)
    given, generators = square(), []  # type: tuple[Tensor, list[torch.Generator]]
    try:
        _, recording = defer_init(lambda: (None, run(given, generators)))
    except CannotDeferError as error:
        assert "new tensor's data" in str(error) and "new data" in [what for what, _, _ in steps]
        assert torch.equal(given, square())
        return
    made = {index: value.clone() for index, value in recording.made()}
    torch.testing.assert_close([made[index] for index in range(len(expected))], expected, rtol=0, atol=0)
    torch.testing.assert_close([torch.get_rng_state(), generators[0].get_state()], after, rtol=0, atol=0)
    assert torch.equal(given, mine)


def test_a_module_is_made_in_half_precision_and_its_layers_copied() -> None:
    def make() -> dict[str, Tensor]:
        layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=80)
        return fp.functional(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).half())[1]

    torch.manual_seed(0)
    expected = make()
    torch.manual_seed(0)
    _, recording = defer_init(lambda: (None, optree.tree_leaves(make())))
    made = dict(recording.made())
    torch.testing.assert_close([made[index] for index in sorted(made)], optree.tree_leaves(expected), rtol=0, atol=0)


def test_few_values_may_be_looked_at() -> None:
    """As a rate per layer."""
    _, recording = defer_init(lambda: (None, [float(x) * torch.ones(SIDE, SIDE) for x in torch.linspace(0, 1, 3)]))
    assert [float(value.sum()) for _, value in recording.made()] == [0, SIDE * SIDE / 2, SIDE * SIDE]


def test_a_tensor_that_was_there_is_read_as_an_array_after_an_op() -> None:
    _, recording = defer_init(lambda: (None, [square_before + 1, torch.from_numpy(square_before.numpy()) * 2]))
    made = dict(recording.made())
    torch.testing.assert_close([made[0], made[1]], [square() + 1, square() * 2], rtol=0, atol=0)


square_before = square()
KEPT: list[Tensor] = []
W = torch.randn(SIDE, SIDE, requires_grad=True)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.randn(SIDE, SIDE) / torch.randn(SIDE, SIDE).max().item(), "looks at the values of a tensor"),
        (lambda: torch.randn(SIDE, SIDE).data_ptr(), "asks where a tensor lies"),
        (lambda: torch.randn(SIDE, SIDE).numpy(), "asks where a tensor lies"),
        (lambda: square_before.add_(1).numpy(), "asks where a tensor lies"),
        (lambda: torch.randn(SIDE, SIDE, dtype=torch.complex64).conj() + 1, "is conjugated when it is read"),
        (lambda: torch.randn(SIDE, SIDE) * W, "requires a gradient, and was there before"),
        (lambda: torch.randn(SIDE, SIDE).t_().resize_(3), "changes in place where a tensor lies"),
        (lambda: torch.randn(SIDE, SIDE).nonzero(), "looks at the values"),
        (lambda: KEPT.append(torch.randn(SIDE, SIDE)), r"keeps a tensor of shape \(40, 40\) elsewhere"),
    ],
)
def test_what_cannot_be_recorded_says_why_and_has_done_nothing(make: Callable[[], Any], why: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(CannotDeferError, match=why):
        defer_init(lambda: (None, [make()]))
    KEPT.clear()
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(square_before, square())


def test_another_thread_draws_as_it_always_did() -> None:
    """While one records, whose initialisers are recorded."""

    def make() -> Tensor:
        beside = threading.Thread(target=lambda: nn.init.trunc_normal_(elsewhere, a=-1.0, b=1.0))
        beside.start()
        beside.join()
        return nn.init.trunc_normal_(torch.empty(SIDE, SIDE))

    elsewhere = torch.full((SIDE, SIDE), 7.0)
    _, recording = defer_init(lambda: (None, [make()]))
    assert elsewhere.abs().max() <= 1.0
    assert dict(recording.made())[0].abs().max() <= 2.0
