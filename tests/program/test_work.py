"""What an op costs, by shapes: torch's own counter says the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

import functional_parallel as fp
from functional_parallel.program.work import flops, recompute_cost
from functional_parallel.quantities import parse_bytes, readable_bytes
from sharding_specs import Mesh, P

F = torch.nn.functional
CASES: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "mm": (lambda x, w: x @ w, ((3, 5), (5, 7))),
    "bmm": (lambda x, w: x @ w, ((2, 3, 5), (2, 5, 7))),
    "addmm": (lambda x, w: F.linear(x, w, x.new_ones(7)), ((3, 5), (7, 5))),
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1), ((2, 3, 8, 8), (4, 3, 3, 3))),
    "grouped convolution": (lambda x, w: F.conv1d(x, w, stride=2, groups=2), ((2, 4, 9), (6, 2, 3))),
    "none": (lambda x, w: torch.softmax(x + w, -1).sum(), ((3, 5), (3, 5))),
}


def nodes(f: Any, *shapes: tuple[int, ...]) -> list[torch.fx.Node]:
    specs = tuple(P() for _ in shapes)
    program = fp.compile(f, Mesh(), in_specs=specs, out_specs=P()).lower(*map(torch.ones, shapes))
    return list(program.traced.nodes)


@pytest.mark.parametrize("name", CASES)
def test_flops_are_those_of_torchs_counter(name: str) -> None:
    f, shapes = CASES[name]
    with FlopCounterMode(display=False) as counter:
        f(*map(torch.ones, shapes))
    assert sum(map(flops, nodes(f, *shapes))) == counter.get_total_flops()
    assert (name == "none") == (counter.get_total_flops() == 0)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_one_kernel_counts_its_two_products(causal: bool) -> None:
    q, k = (2, 4, 16, 8), (2, 4, 32, 8)
    found = nodes(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), q, k, k)
    assert sum(map(flops, found)) == 2 * 2 * (2 * 4) * 16 * 32 * 8


def test_attentions_backward_counts_five_products() -> None:
    """As torch's counter has it for the kernels that it knows: the scores again, and four gradients."""
    q, k = (2, 4, 16, 8), (2, 4, 32, 8)

    def f(q: Any, k: Any, v: Any) -> Any:
        return fp.grad(lambda v, q, k: F.scaled_dot_product_attention(q, k, v).sum())(v, q, k)

    found = nodes(f, q, k, k)
    assert sum(map(flops, found)) == 2 * (2 * 4) * 16 * 32 * 8 * (2 + 5)
    assert sdpa_backward_flop_count(q, q, k, k) == 2 * (2 * 4) * 16 * 32 * 8 * 5


def test_views_cost_nothing_and_communication_is_dear() -> None:
    mesh = Mesh(tensor=4)
    f = fp.compile(lambda x: fp.psum(x.t().relu(), "tensor"), mesh, in_specs=P("tensor"), out_specs=P())
    cost = {str(node.target): recompute_cost(node, mesh) for node in f.lower(torch.ones(64, 32)).traced.nodes}
    assert cost["aten.t.default"] == 0
    relu, psum = cost["aten.relu.default"], cost["fp.psum.default"]
    assert 0 < relu < psum / 10


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("8GB", 8 * 10**9), ("8 GiB", 8 << 30), (".5 kb", 500), ("1.5mib", 3 << 19), ("2T", None), (12, 12)],
)
def test_bytes_as_people_write_them(text: Any, size: int | None) -> None:
    if size is None:
        with pytest.raises(ValueError, match=r"'2T' is no size: write bytes, as 8 << 30, or with a unit"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == size


@pytest.mark.parametrize("size", [1, 1023, 1024, 3 << 20, 5 << 30, 7 << 40])
def test_what_is_printed_can_be_read(size: int) -> None:
    assert parse_bytes(readable_bytes(size)) == size
