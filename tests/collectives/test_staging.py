"""Traced, each collective is one named node, and its derivative is the transposed one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functional_parallel import collectives as fp

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

PAIRS = [
    (lambda x: fp.psum(x, "i"), "psum", "pcast"),
    (lambda x: fp.psum_scatter(x, "i"), "psum_scatter", "all_gather"),
    (lambda x: fp.all_gather(x, "i"), "all_gather", "psum_scatter"),
    (lambda x: fp.all_gather(x, "i", to="invariant"), "all_gather", "pscatter"),
    (lambda x: fp.pscatter(x, "i"), "pscatter", "all_gather"),
    (lambda x: fp.all_to_all(x, "i", 0, 1), "all_to_all", "all_to_all"),
    (lambda x: fp.ppermute(x, "i", [(0, 1)]), "ppermute", "ppermute"),
    (lambda x: fp.pvary(x, "i"), "pcast", "psum"),
    (lambda x: fp.pcast(x, "i", to="unreduced"), "pcast", "pcast"),
]


def collectives_in(fn: object, *args: torch.Tensor) -> Counter[str]:
    with fp.bind({"i": 4, "j": 2}, None):
        graph = make_fx(fn, tracing_mode="fake")(*args).graph
    targets = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return Counter(op._schema.name.split("::")[1] for op in targets if op.namespace == "fp")


@pytest.mark.parametrize("fn, forward, transposed", PAIRS)
def test_one_node_each(fn: object, forward: str, transposed: str) -> None:
    x = torch.ones(4, 4)
    assert collectives_in(fn, x) == {forward: 1}
    assert collectives_in(lambda x: torch.func.vjp(fn, x)[0], x) == {forward: 1}
    gradient = torch.func.grad(lambda x: (fn(x) ** 2).sum())  # type: ignore[operator]
    assert collectives_in(gradient, x) == Counter([forward, transposed])
    both = Counter([forward, transposed])
    assert collectives_in(lambda x: torch.func.jvp(gradient, (x,), (x,))[1], x) == both + both


@pytest.mark.parametrize("fn, forward, transposed", PAIRS)
def test_a_batch_is_one_collective(fn: object, forward: str, transposed: str) -> None:
    per_sample = torch.func.vmap(torch.func.grad(lambda x: (fn(x) ** 2).sum()))  # type: ignore[operator]
    assert collectives_in(per_sample, torch.ones(5, 4, 4)) == Counter([forward, transposed])


def test_axis_index_and_several_axes() -> None:
    assert collectives_in(lambda x: fp.psum(x, ("i", "j")), torch.ones(2)) == {"psum": 1}
    assert collectives_in(lambda x: x * fp.axis_index(("j", "i")), torch.ones(2)) == {"axis_index": 1}


def test_shapes_of_a_trace() -> None:
    with fp.bind({"i": 4}, None):
        graph = make_fx(
            lambda x: (fp.all_gather(x, "i", 1), fp.psum_scatter(x, "i", 0), fp.all_to_all(x, "i", 0, 1)),
            tracing_mode="fake",
        )(torch.ones(8, 3))
    shapes = [tuple(node.meta["val"].shape) for node in graph.graph.nodes if node.op == "call_function"]
    assert shapes == [(8, 12), (2, 3), (2, 12)]


def test_a_vmap_level_leaves_only_arithmetic() -> None:
    named = fp.vmap(lambda x: fp.psum(x, "k") + fp.psum(x, "i"), axis_name="k")
    assert collectives_in(named, torch.ones(3, 2)) == {"psum": 1}


def test_size_one_axes_are_traced_but_move_nothing() -> None:
    """The checker needs the node for its type; the op asks no carrier."""
    x = torch.arange(4.0)
    with fp.bind({"i": 1}, None):
        assert torch.equal(fp.psum(x, "i"), x)
        assert torch.equal(fp.all_gather(fp.psum_scatter(x, "i"), "i"), x)
        assert torch.equal(fp.ppermute(x, "i", [(0, 0)]), x) and not fp.ppermute(x, "i", []).any()
        assert fp.axis_index("i") == 0
        traced = make_fx(lambda x: fp.psum(x, "i"), tracing_mode="fake")(x)
        fp.pvary(x, "i").zero_()
    assert "torch.ops.fp.psum" in traced.code
    assert torch.equal(x, torch.arange(4.0)), "a collective's result shares no memory with its operand"


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.grad(lambda x: f(x).sum()),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
        torch.func.vmap,
        lambda f: lambda x: f(x.requires_grad_()),
    ],
    ids=["grad", "jvp", "vmap", "autograd"],
)
def test_the_raw_op_refuses_transforms(transform: object) -> None:
    """torch would return a zero gradient, a zero tangent, or one collective per entry."""
    with fp.bind({"i": 1}, None), pytest.raises(TypeError, match=r"collectives.apply_primitive\('psum', ...\)"):
        transform(lambda x: torch.ops.fp.psum(x, ["i"], "varying"))(torch.ones(2))  # type: ignore[operator]
