"""torch's control flow in traces: loops of known length are unrolled, known branches chosen, the rest refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

import functional_parallel as fp
from functional_parallel.errors import TracingError
from sharding_specs import Mesh, P

ROUNDS = torch.tensor(3)


@pytest.fixture(autouse=True)
def validated() -> Iterator[None]:
    """torch's wrappers of its control flow call torch.compile, which switches checks of distributions off for good."""
    yield
    torch.distributions.Distribution.set_default_validate_args(__debug__)


def scanned(w: Tensor, x: Tensor) -> Tensor:
    last, all_ = scan(lambda h, row: (torch.tanh(h @ w + row), h * 2), torch.zeros(4).double(), x)
    return last.sum() + all_.square().sum()


def looped(w: Tensor, x: Tensor) -> Tensor:
    h, rows = torch.zeros(4).double(), []
    for row in x:
        rows.append(h * 2)
        h = torch.tanh(h @ w + row)
    return h.sum() + torch.stack(rows).square().sum()


def reversed_loop(w: Tensor, x: Tensor) -> Tensor:
    h = torch.zeros(4).double()
    for row in reversed(x.unbind()):
        h = torch.tanh(h @ w + row)
    return h.sum()


def backwards(w: Tensor, x: Tensor) -> Tensor:
    return scan(lambda h, row: (torch.tanh(h @ w + row), h * 1), torch.zeros(4).double(), x, reverse=True)[0].sum()


def counted(w: Tensor, x: Tensor) -> Tensor:
    return while_loop(lambda i, h: i < ROUNDS, lambda i, h: (i + 1, torch.tanh(h @ w)), (torch.tensor(0), x))[1].sum()


def chosen(w: Tensor, x: Tensor) -> Tensor:
    return torch.cond(ROUNDS > 2, lambda a: torch.sin(a @ w), torch.cos, (x,)).sum()


LOOPS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "scan": (scanned, looped),
    "scan in reverse": (backwards, reversed_loop),
    "while_loop": (counted, lambda w, x: torch.tanh(torch.tanh(torch.tanh(x @ w) @ w) @ w).sum()),
    "cond": (chosen, lambda w, x: torch.sin(x @ w).sum()),
}


def drawn() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (4, 6))  # type: ignore[return-value]


@pytest.mark.parametrize("plan", [fp.tensor_parallel("axis", P(None, "axis")), fp.zero(3, "axis")], ids=str)
@pytest.mark.parametrize("name", LOOPS)
def test_in_a_plan(name: str, plan: Any) -> None:
    loss, plain = LOOPS[name]
    step = fp.compile(fp.grad_and_value(plan(loss)), Mesh(axis=2))
    torch.testing.assert_close(step(*drawn()), torch.func.grad_and_value(plain)(*drawn()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LOOPS)
def test_in_a_body(name: str) -> None:
    loss, plain = LOOPS[name]
    found = fp.compile(loss, Mesh(axis=2), in_specs=(P(), P()), out_specs=P())
    torch.testing.assert_close(found(*drawn()), plain(*drawn()), rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.func.grad(found)(*drawn()), torch.func.grad(plain)(*drawn()), rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_depends_on_values_is_refused() -> None:
    refused: list[tuple[Callable[..., Any], str]] = [
        (
            lambda w, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (w,)),
            r"the branch of torch.cond depends on values.*torch.where\(pred, on_true, on_false\)",
        ),
        (
            lambda w, x: while_loop(lambda h: h.sum() > 1, lambda h: (h / 2,), (x,)),
            "the end of torch's while_loop depends on values.*fixed number of rounds",
        ),
        (lambda w, x: flex_attention(x[None, None], x[None, None], x[None, None]), "flex_attention is not supported"),
    ]
    for f, message in refused:
        with pytest.raises(TracingError, match=f"test_control_flow.py:[0-9]+: .*{message}"):
            fp.compile(fp.data_parallel("axis")(f), Mesh(axis=2))(*drawn())
