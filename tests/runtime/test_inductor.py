"""backend="inductor": the same program, stretches of pure compute compiled, collectives where they were.

Which ops a region holds is tested with a compiler that changes nothing, so to the bit; what inductor makes of them
within rounding, and only where it has to compile, which takes seconds each time.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import optree
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

import functional_parallel as fp
from functional_parallel import _torch
from functional_parallel.errors import BackendError, ProgramMismatchError
from functional_parallel.ir import cuts_between_repeats
from functional_parallel.ir.graph import primitive_name
from functional_parallel.program.aliasing import is_only_use_of_own_memory, readers_before_writes
from functional_parallel.program.overlap import overlapped
from functional_parallel.runtime import SimulatedRuntime
from functional_parallel.runtime.execution import regions
from functional_parallel.runtime.execution.inductor import CompiledRegion
from sharding_specs import Mesh, P, split

from ..laws.random_functions import Program, arguments, programs
from ..processes import run_on_processes

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import gpt

CONFIG = gpt.Config(1, 16, 2, 8)
SPECS = split(gpt.init(CONFIG))[1]
PLANS: dict[str, tuple[Any, Mesh]] = {
    "one rank": (None, Mesh()),
    "data parallel": (fp.data_parallel("data"), Mesh(data=2)),
    "zero 1": (fp.zero(1, "data"), Mesh(data=2)),
    "zero 3": (fp.zero(3, "data"), Mesh(data=2)),
    "tensor": (fp.tensor_parallel("tensor", SPECS), Mesh(tensor=2)),
    "remat, tensor, zero 2": (
        fp.chain(fp.remat(), fp.tensor_parallel("tensor", SPECS), fp.zero(2, "data"), fp.accumulate(2)),
        Mesh(data=2, tensor=2),
    ),
    "pipeline": (
        fp.chain(fp.zero(1, "data"), fp.pipeline("pipe", schedule="1f1b", microbatches=2)),
        Mesh(pipe=2, data=2),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What inductor writes stays among the tests' files, and processes find what was compiled before them."""
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path_factory.mktemp("inductor"))):
        yield


@pytest.fixture
def as_is() -> Iterator[mock.Mock]:
    """A compiler that leaves a region as it is, and compiles whatever there is."""
    with (
        mock.patch.object(_torch, "compile_by_inductor", side_effect=lambda module, operands: module) as compiler,
        mock.patch.object(regions, "_LEAST_OPS", 1),
        mock.patch.object(regions, "_MOST_OPS", 30),
    ):
        yield compiler


def trained(
    name: str, backend: str, optimizer: Any = None, steps: int = 2, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[list[torch.Tensor], Any]:
    plan, mesh = PLANS[name]
    params = optree.tree_map(lambda x: x.to(dtype), split(gpt.init(CONFIG))[0])
    tokens = torch.randint(0, 256, (2, 8, 9), generator=torch.Generator().manual_seed(0))
    train = fp.train_step(
        partial(gpt.loss, config=CONFIG),
        optimizer or fp.optim.adamw(1e-2),
        mesh,
        plan,
        clip=1.0,
        backend=backend,
        **options,
    )
    state, losses = train.init(params), []
    for step in range(steps):
        state, metrics = train(state, tokens[step % 2])
        losses.append(metrics.loss)
    return optree.tree_leaves((train.whole(state), losses)), train.program


@cache
def lowered(layers: int, name: str) -> tuple[Any, list[torch.Tensor]]:
    """The program of a gradient, and what it is run on."""
    config = gpt.Config(layers, 16, 2, 8)
    params, specs = split(gpt.init(config))
    plan, mesh = (fp.tensor_parallel("tensor", specs), Mesh(tensor=2)) if name == "tensor" else PLANS[name]
    arguments = params, torch.zeros(8, 9, dtype=torch.int64)
    step = fp.compile(
        fp.grad_and_value(plan(partial(gpt.loss, config=config))), mesh, bucket="auto", backend="inductor"
    )
    return step.lower(*arguments), optree.tree_leaves(arguments)


def works(graph: fx.Graph) -> Iterator[fx.Node]:
    """The ops that compute something, in order, those of regions among them."""
    for node in graph.nodes:
        if isinstance(node.target, CompiledRegion):
            yield from works(node.target.graph)
        elif node.op == "call_function" and not (node.target is operator.getitem or regions._is_view(node)):
            yield node


# -----------------------------------------------------------------------------
# Which ops, and where they are cut
# -----------------------------------------------------------------------------


@settings(max_examples=8)
@given(
    period=st.integers(8, 40),
    copies=st.integers(2, 6),
    before=st.integers(0, 30),
    after=st.integers(0, 30),
    kinds=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_a_repeat_is_cut_into_equal_pieces(
    period: int, copies: int, before: int, after: int, kinds: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = [*torch.randint(0, kinds, (period - 1,), generator=generator).tolist(), "once a layer"]
    ends = [f"before {index}" for index in range(before)], [f"after {index}" for index in range(after)]
    tokens = [*ends[0], *layer * copies, *ends[1]]
    cuts = cuts_between_repeats(tokens, [0] * len(tokens))
    assert cuts == sorted(set(cuts)) and not {0, len(tokens)} & set(cuts)
    if period * copies <= 64:
        return
    pieces = [tuple(tokens[a:b]) for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    assert max(map(pieces.count, pieces)) >= copies - 1, "but for one, where the cut is shifted"


def test_of_equal_cuts_the_cheapest_is_taken() -> None:
    tokens = [*range(40), *range(40), *range(40), *range(7)]
    crossing = [9 if index % 40 != 5 else 1 for index in range(len(tokens))]
    assert cuts_between_repeats(tokens, crossing) == [5, 45, 85, 125]


@pytest.mark.parametrize("name", ["data parallel", "zero 3", "tensor"])
def test_equal_layers_are_one_region(name: str) -> None:
    """More layers are more calls; what is compiled stays as much, but where buckets of gradients begin and end."""
    few, many = (regions.with_regions(lowered(layers, name)[0]).calls for layers in (3, 5))
    assert len(many) >= len(few) + 2 * 2
    assert len(set(many)) <= len(set(few)) + 3


def test_a_region_is_compiled_once_for_all_layers(as_is: mock.Mock) -> None:
    program, tensors = lowered(5, "tensor")
    runtime = SimulatedRuntime(program.mesh)
    with mock.patch.dict(program.cache, clear=True):  # which keeps the regions that other tests cut otherwise
        runtime.run_whole(program, tensors)
        calls = regions.with_regions(program).calls
        assert as_is.call_count <= 1.3 * len(set(calls)) < len(calls), "some for other strides"
        runtime.run_whole(program, tensors)
        assert as_is.call_count == sum(len(region.compiled) for region in set(calls))


def test_regions_of_one_structure_are_one_object() -> None:
    """Across programs too, and staged from shapes alone; but not of another dtype or with another number in an op."""

    def region(x: torch.Tensor, number: float = 1.0) -> CompiledRegion:
        step = fp.compile(lambda x: (x.sin() * number + x.cos()).exp(), Mesh(), in_specs=P(), out_specs=P())
        (found,) = regions.with_regions(step.lower(x)).calls
        return found

    x = torch.ones(3)
    same, others = region(x), [region(x.double()), region(x, 2.0), region(x[:2])]
    assert region(torch.zeros(3)) is same and region(x.to("meta")) is same and len({same, *others}) == 4


@pytest.mark.parametrize("name", ["data parallel", "zero 3", "tensor"])
def test_collectives_start_after_the_same_work(name: str) -> None:
    """So that just as much is computed while they are under way."""
    program, _ = lowered(3, name)
    order = overlapped(program.traced, readers_before_writes(program.traced))
    plain = fx.Graph()
    new = {node: plain.node_copy(node) for node in program.traced.graph.nodes if node.op in ("placeholder", "get_attr")}
    for node in order:
        new[node] = plain.node_copy(node, new.__getitem__)
    found = [
        [str(node.target).removeprefix("fp.") for node in works(graph)]
        for graph in (plain, regions.with_regions(program).traced.graph)
    ]
    marks = [[index for index, name in enumerate(names) if name.startswith("psum")] for names in found]
    assert len(found[0]) == len(found[1]) and marks[0] == marks[1] and len(marks[0]) > 1


def test_a_split_of_a_region_s_result_is_no_view_of_the_whole() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            a, b = (x.sin() * x.cos() + x).chunk(2)
            x = torch.cat([b.sin() * a.exp() + b, a]) @ w
        return x

    step = fp.compile(f, Mesh(), in_specs=(P(), P()), out_specs=P())
    assert regions.with_regions(step.lower(torch.ones(4, 4), torch.ones(4, 4))).calls


def test_what_gains_nothing_stays_as_it_is() -> None:
    step = fp.compile(lambda w, x: fp.psum((x @ w).t(), "data"), Mesh(data=2), in_specs=(P(), P("data")), out_specs=P())
    assert regions.with_regions(step.lower(torch.ones(3, 3), torch.ones(4, 3))).calls == []


# -----------------------------------------------------------------------------
# To the bit, with a compiler that changes nothing
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [fp.optim.adamw(1e-2), fp.optim.sgd(0.1, momentum=0.9)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.every(4)
def test_regions_change_no_bit(name: str, optimizer: Any, as_is: mock.Mock) -> None:
    found, _ = trained(name, "inductor", optimizer)
    assert as_is.called
    plain, _ = trained(name, "eager", optimizer)
    assert all(map(torch.equal, found, plain))


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(f=programs(), data=st.sampled_from([1, 2, 4]), stage=st.integers(0, 3), seed=st.integers(0, 1000))
def test_random_functions(as_is: mock.Mock, f: Program, data: int, stage: int, seed: int) -> None:
    mesh, plan = Mesh(data=data), fp.zero(stage, "data")
    params, x = arguments(seed)
    found, plain = (
        fp.compile(fp.grad_and_value(plan(f)), mesh, backend=backend)(params, x) for backend in ("inductor", "eager")
    )
    assert all(map(torch.equal, optree.tree_leaves(found), optree.tree_leaves(plain)))


def test_derivatives_from_outside_do_without_it(as_is: mock.Mock) -> None:
    step = fp.compile(
        lambda x: fp.psum((x.sin() * x.cos() + x.tanh()).sum(), "data"),
        Mesh(data=2),
        in_specs=P("data"),
        out_specs=P(),
        backend="inductor",
    )
    x = torch.arange(4.0, dtype=torch.float64)
    assert torch.equal(step(x), (x.sin() * x.cos() + x.tanh()).sum()) and as_is.called
    torch.testing.assert_close(torch.func.grad(step)(x), (2 * x).cos() + 1 - x.tanh() ** 2)


def test_results_lie_in_memory_of_their_own() -> None:
    """Whatever a compiler makes of ops that change nothing: what follows may write there."""
    step = fp.compile(
        lambda x: (x.sin() + x.cos(), x * 1, 2 + x), Mesh(), in_specs=P(), out_specs=P(), backend="inductor"
    )
    compiled = lambda x: (y := x + 2, x, y)  # noqa: E731
    with mock.patch.object(_torch, "compile_by_inductor", return_value=compiled):
        for _ in range(2):
            x = torch.ones(3)
            results = step(x)
            results[0].zero_()
            assert [each.tolist() for each in results[1:]] == [[1.0] * 3, [3.0] * 3]
            assert results[1].data_ptr() != x.data_ptr()


def test_a_sum_of_a_result_overwrites_it() -> None:
    program, _ = lowered(3, "tensor")
    graph = regions.with_regions(program).traced.graph
    sums = [node for node in graph.nodes if primitive_name(node) == "psum"]
    assert any(is_only_use_of_own_memory(node.args[0]) for node in sums)
    assert not any(is_only_use_of_own_memory(node.args[0]) for node in sums if len(node.args[0].users) > 1)


# -----------------------------------------------------------------------------
# Compiled
# -----------------------------------------------------------------------------


def layer(params: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    hidden = x @ params
    return torch.tanh(hidden * hidden.exp()).mean()


def layer_trained(rank: int, backend: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    train = fp.train_step(
        layer, fp.optim.sgd(0.1, momentum=0.9), Mesh(data=2), fp.zero(3, "data"), reduction="ordered", backend=backend
    )
    state, losses = train.init(draw(5, 6)), []
    for _ in range(3):
        state, metrics = train(state, draw(8, 5))
        losses.append(metrics.loss)
    return optree.tree_leaves((train.whole(state), losses))


def on_processes(rank: int) -> list[torch.Tensor]:
    with pytest.raises(ProgramMismatchError, match="backend"):
        layer_trained(rank, "inductor" if rank else "eager")
    return layer_trained(rank, "inductor")


def test_processes_give_the_bits_of_simulated_ranks() -> None:
    """Both call the same regions; and those round little otherwise than torch's kernels."""
    found = layer_trained(0, "inductor")
    torch.testing.assert_close(found, layer_trained(0, "eager"), rtol=1e-9, atol=1e-12)
    for rank in run_on_processes(on_processes, 2, timeout=300):
        assert all(map(torch.equal, rank, found))


def test_operands_that_lie_otherwise_are_compiled_for(as_is: mock.Mock) -> None:
    step = fp.compile(
        lambda x, y: (x - y).exp() * 2 + y, Mesh(), in_specs=(P(), P()), out_specs=P(), backend="inductor"
    )
    x, y = torch.ones(2, 3), torch.zeros(3, 2).t()
    for _ in range(2):
        for a, b in ((x, x), (x, y), (y, x)):
            assert torch.equal(step(a, b), (a - b).exp() * 2 + b)
    assert as_is.call_count == 3


def test_large_products_are_those_of_the_default_backend() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (2 * a).mm(b.t()).abs() - 1

    a, b = torch.randn(2, 128, 130, generator=torch.Generator().manual_seed(0))
    steps = {
        backend: fp.compile(f, Mesh(), in_specs=(P(), P()), out_specs=P(), backend=backend)
        for backend in ("inductor", "eager")
    }
    assert torch.equal(steps["inductor"](a, b), steps["eager"](a, b))
    (region,) = regions.with_regions(steps["inductor"].program).calls
    assert torch.ops.aten.mm.default in [node.target for node in region.graph.nodes]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_gpt_trains_alike(name: str) -> None:
    found, _ = trained(name, "inductor")
    plain, _ = trained(name, "eager")
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def gpt_on_processes(rank: int, names: list[str]) -> dict[str, list[torch.Tensor]]:
    return {name: trained(name, "inductor", reduction="ordered")[0] for name in names}


@pytest.mark.slow
def test_a_gpt_has_the_same_bits_on_processes() -> None:
    names = ["data parallel", "zero 3", "tensor"]
    simulated = gpt_on_processes(0, names)
    for found in run_on_processes(gpt_on_processes, 2, names, timeout=900):
        for name in names:
            assert all(map(torch.equal, found[name], simulated[name])), name


# -----------------------------------------------------------------------------
# Errors
# -----------------------------------------------------------------------------


def test_an_unknown_backend_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="backend='jax': write one of 'eager', 'inductor'"):
        fp.compile(lambda x: x, Mesh(), in_specs=P(), out_specs=P(), backend="jax")
    with pytest.raises(ValueError, match="backend='graphs': write one of 'eager', 'inductor'"):
        fp.train_step(layer, fp.optim.sgd(0.1), Mesh(), backend="graphs")


def test_without_a_compiler_the_error_says_what_to_install() -> None:
    import torch._inductor.config as config

    step = fp.compile(lambda x: (x.sin() * 3 + x.cos()).exp(), Mesh(), in_specs=P(), out_specs=P(), backend="inductor")
    with (
        config.patch({"cpp.cxx": ("/nowhere/g++",)}),
        pytest.raises(BackendError, match=r"needs a C\+\+ compiler: install one .*backend='eager'"),
    ):
        step(torch.ones(5))


def test_what_inductor_cannot_do_is_an_error_that_names_the_line() -> None:
    step = fp.compile(lambda x: (x.sin() * 5 + x.cos()).exp(), Mesh(), in_specs=P(), out_specs=P(), backend="inductor")
    with (
        mock.patch.object(_torch, "compile_by_inductor", side_effect=AssertionError("broken")),
        pytest.raises(BackendError, match=r"cannot compile 5 ops from test_inductor.py:\d+.*AssertionError: broken"),
    ):
        step(torch.ones(5))
