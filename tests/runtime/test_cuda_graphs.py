"""backend="cudagraphs", on a recorder that does what CUDA does: it keeps ops with their tensors, and repeats them.

Nothing of Python runs again. What the host read or computed while ops were recorded therefore stays as it was, as in a
graph, and a value that leaves the graph without a copy is overwritten by the next launch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import optree
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import functional_parallel as fp
from functional_parallel import _torch
from functional_parallel.optim import host_rates
from functional_parallel.runtime.execution import cuda_graphs, regions
from functional_parallel.runtime.processes import ProcessCommunicator
from sharding_specs import Mesh, P

from ..laws.random_functions import Program, arguments, programs
from ..processes import run_on_processes

pytestmark = pytest.mark.filterwarnings("ignore::functional_parallel.errors.NotTrainedWarning")

Tensors = list[torch.Tensor]


class Ops(TorchDispatchMode):
    """Record ops with their tensors. Ops that are composed of others are recorded as these."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Callable[[], Any], Tensors]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError("operation not permitted when stream is capturing")
        names = ["CompositeImplicitAutograd", "CompositeExplicitAutograd", "CPU"]
        for name in names[:1] if func.namespace == "aten" else names:
            key = getattr(torch._C.DispatchKey, name)
            if func.has_kernel_for_dispatch_key(key):
                with self:
                    return func._op_dk(key, *args, **(kwargs or {}))
        call = partial(func, *args, **(kwargs or {}))
        result = call()
        has_kernel = not func._schema.name.startswith("aten::empty") and "_unsafe_view" not in func._schema.name
        if has_kernel:
            is_new = all(each.alias_info is None for each in func._schema.returns)
            made = [x for x in optree.tree_leaves(result) if isinstance(x, torch.Tensor)]
            self.ops.append((call, made if is_new else []))
        return result

    def repeat(self) -> None:
        for call, made in self.ops:
            result = [x for x in optree.tree_leaves(call()) if isinstance(x, torch.Tensor)]
            for x, new in zip(made, result, strict=False):
                x.copy_(new)


class Recorder:
    """Recorder in main memory. Recording leaves memory as it was."""

    def __init__(self) -> None:
        self.aside = self.recorded = self.launches = 0

    def wait(self, device: torch.device) -> None:
        pass

    def run_aside(self, device: torch.device, run: Callable[[], Tensors]) -> Tensors:
        self.aside += 1
        return run()

    def record(self, device: torch.device, run: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
        self.recorded += 1
        buffers = run.__self__.buffers  # type: ignore[attr-defined]
        before, ops = [x.clone() for x in buffers], Ops()
        try:
            with ops:
                results = run()
        finally:
            for buffer, old in zip(buffers, before, strict=True):
                buffer.copy_(old)

        def launch() -> None:
            self.launches += 1
            ops.repeat()

        return results, launch


def _on_device(p: Any, g: Any, m: Any, v: Any, step: torch.Tensor, lr: torch.Tensor, *given: Any) -> None:
    """The fused AdamW as on CUDA, where it reads a rate of the device there."""
    *numbers, skip = given
    options = dict(zip(("beta1", "beta2", "weight_decay", "eps"), numbers, strict=True))
    if skip is not None:
        options["found_inf"] = skip.float()
    torch._fused_adamw_(p, g, m, v, [], [step.float()] * len(p), lr=lr, amsgrad=False, maximize=False, **options)


@contextmanager
def recording() -> Iterator[Recorder]:
    """A machine on which graphs of programs in main memory are recorded."""
    with (
        mock.patch.object(cuda_graphs, "RECORDER", Recorder()) as made,
        mock.patch.object(_torch, "fused_adamw_", _on_device),
        mock.patch.object(host_rates, "in_main_memory", return_value=False),
        mock.patch.object(sys.modules["functional_parallel.ops.adamw_kernel"], "in_main_memory", return_value=False),
        mock.patch.object(sys.modules["functional_parallel.lowering.lower"], "require_capturable"),
    ):
        yield made


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with recording() as made:
        yield made


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ params["w"] + params["b"])
    return (hidden @ params["v"] - 1).square().mean()


def params() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (4, 8), "b": (8,), "v": (8, 2), "unused": (4,)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def batch(step: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def by_host(count: int) -> float:
    return 0.1 * math.cos(count) if count > 1 else 0.1


OPTIMIZERS = {
    "adamw": fp.optim.adamw(0.1),
    "host rate": fp.optim.adamw(by_host),
    "schedule": fp.optim.sgd(fp.optim.schedules.cosine(0.1, 10), momentum=0.9),
    "lion": fp.optim.lion(1e-2),
    "lamb": fp.optim.lamb(1e-2),
    "adafactor": fp.optim.adafactor(1e-2),
    "muon": fp.optim.by_path({"[wv]": fp.optim.muon(1e-2), "*": fp.optim.sgd(0.1)}),
    "by path": fp.optim.by_path({"w": fp.optim.sgd(0.1), "*": fp.optim.adamw(0.1)}),
}
PLANS: dict[str, tuple[Any, Mesh]] = {
    "one rank": (None, Mesh()),
    "data": (fp.data_parallel("data"), Mesh(data=2)),
    "zero 1": (fp.zero(1, "data"), Mesh(data=2)),
    "zero 3, flat": (fp.zero(2, "data", layout="flat"), Mesh(data=2)),
    "zero 3": (fp.chain(fp.remat(), fp.zero(3, "data")), Mesh(data=2)),
    "accumulate": (fp.chain(fp.zero(1, "data"), fp.accumulate(2)), Mesh(data=2)),
    "bf16": (fp.chain(fp.mixed_precision("bf16"), fp.zero(1, "data")), Mesh(data=2)),
    "fp16": (fp.chain(fp.mixed_precision("fp16"), fp.zero(1, "data")), Mesh(data=2)),
}


def steps(optimizer: str, plan: str, backend: str, **options: Any) -> Any:
    transform, mesh = PLANS[plan]
    return fp.train_step(loss, OPTIMIZERS[optimizer], mesh, transform, clip=1.0, backend=backend, **options)


def everything(train: Any, state: Any, metrics: Any) -> Tensors:
    return [torch.as_tensor(x).clone() for x in optree.tree_leaves((train.whole(state), metrics))]


def same(a: Tensors, b: Tensors) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)), (x, y)


def run(train: Any, count: int = 5) -> list[Tensors]:
    state, found = train.init(params()), []
    for step in range(count):
        state, metrics = train(state, batch(step))
        found.append(everything(train, state, metrics))
    return found


CASES = [
    *(pytest.param(name, "zero 1", {}, id=name) for name in OPTIMIZERS),
    *(pytest.param("adamw", name, {}, id=name) for name in PLANS if name != "zero 1"),
    pytest.param("adamw", "zero 3", {"donate": False}, id="not donated"),
    pytest.param("lion", "data", {"donate": False}, id="lion, not donated"),
    pytest.param("lion", "data", {"seed": 0}, id="seed"),
]


@pytest.mark.parametrize(("optimizer", "plan", "options"), CASES)
def test_steps_have_the_bits_of_eager_steps(recorder: Recorder, optimizer: str, plan: str, options: Any) -> None:
    want = run(steps(optimizer, plan, "eager", **options))
    for found, wanted in zip(run(steps(optimizer, plan, "cudagraphs", **options)), want, strict=True):
        same(found, wanted)
    assert (recorder.aside, recorder.recorded, recorder.launches) == (1, 1, 4)


class SwapState(NamedTuple):
    step: torch.Tensor
    a: Any
    b: Any


def swapping() -> fp.optim.Optimizer:
    """An optimizer whose new state is its old state in other places."""

    def init(params: Any) -> SwapState:
        a, b = (optree.tree_map(like, params) for like in (torch.ones_like, torch.zeros_like))
        return SwapState(torch.zeros(()), a, b)

    def update(grads: Any, state: SwapState, params: Any) -> tuple[Any, SwapState]:
        new = optree.tree_map(lambda p, g, a: p - 0.1 * g * a, params, grads, state.a)
        return new, SwapState(state.step + 1, state.b, state.a)

    return fp.optim.Optimizer(init, update)


def test_state_that_changes_places() -> None:
    def swapped_by(backend: str) -> list[Tensors]:
        return run(fp.train_step(loss, swapping(), Mesh(data=2), fp.data_parallel("data"), backend=backend))

    with recording():
        found = swapped_by("cudagraphs")
    for mine, want in zip(found, swapped_by("eager"), strict=True):
        same(mine, want)


def test_aux_with_the_old_parameters(recorder: Recorder) -> None:
    """What a step returns of its old state is not what the graph writes there."""

    def with_aux(params: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return loss(params, x), (params["w"], params["w"].T[:2])

    losses = {}
    for backend in ("eager", "cudagraphs"):
        train = fp.train_step(with_aux, fp.optim.lion(0.1), Mesh(), has_aux=True, backend=backend)
        state = train.init(params())
        losses[backend] = []
        for step in range(4):
            state, metrics = train(state, batch(step))
            losses[backend] += optree.tree_leaves(metrics)
    same(losses["cudagraphs"], losses["eager"])


def test_what_is_done_between_steps(recorder: Recorder, tmp_path: Path) -> None:
    found: dict[str, Tensors] = {}
    for backend in ("eager", "cudagraphs"):
        train = steps("lion", "zero 1", backend, donate=True)
        evaluate = train.compile(PLANS["zero 1"][0](loss))
        state, seen = train.init(params()), []
        for step in range(6):
            old = state
            state, metrics = train(state, batch(step))
            with pytest.raises(fp.DonatedStateError, match="was given to a step"):
                train.params(old)
            seen += [evaluate(state, batch(0)), metrics.loss, *optree.tree_leaves(train.params(state))]
            if step == 2:
                train.save(state, tmp_path / backend)
            if step == 4:
                del old, state
                state = train.restore(tmp_path / backend)
        found[backend] = seen
    same(found["cudagraphs"], found["eager"])  # at the end: later launches have not changed them
    assert (recorder.recorded, recorder.launches) == (1, 5)  # the restored state took the place of the old one


def test_states_in_use_at_the_same_time(recorder: Recorder) -> None:
    def both(train: Any) -> list[Tensors]:
        states, found = [train.init(params()), train.init(optree.tree_map(torch.neg, params()))], []
        states.append(train.copy(states[0]))
        for step in range(9):
            states[step % 3], metrics = train(states[step % 3], batch(step))
            found += [everything(train, state, metrics) for state in states]
        return found

    for mine, want in zip(both(steps("lion", "data", "cudagraphs")), both(steps("lion", "data", "eager")), strict=True):
        same(mine, want)
    assert recorder.recorded == 3


def test_batches_of_other_shapes(recorder: Recorder) -> None:
    rows = [4, 4, 8, 4, 8, 8, 4]
    found = []
    for backend in ("eager", "cudagraphs"):
        train = steps("adamw", "zero 1", backend)
        state = train.init(params())
        for step, count in enumerate(rows):
            state, metrics = train(state, batch(step, count))
        found.append(everything(train, state, metrics))
    same(*found)
    assert (recorder.aside, recorder.recorded, recorder.launches) == (2, 2, 5)


def test_programs_that_take_turns_on_one_state(recorder: Recorder) -> None:
    found = []
    for backend in ("eager", "cudagraphs"):
        plan = fp.local_sgd("data", inner=2)
        train = fp.train_step(loss, fp.optim.sgd(0.1, momentum=0.9), Mesh(data=2), plan, backend=backend)
        state = train.init(params())
        for step in range(8):
            state, _ = train(state, batch(step))
        found.append(everything(train, state, None))
    same(*found)
    assert (recorder.recorded, recorder.launches) == (2, 6)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(f=programs(), data=st.sampled_from([1, 2]), stage=st.integers(0, 3), seed=st.integers(0, 1000))
def test_random_functions(recorder: Recorder, f: Program, data: int, stage: int, seed: int) -> None:
    plan, mesh = fp.zero(stage, "data"), Mesh(data=data)
    calls = [arguments(seed + number) for number in range(3)]
    captured, plain = (
        fp.compile(fp.grad_and_value(plan(f)), mesh, backend=backend) for backend in ("cudagraphs", "eager")
    )
    found = [optree.tree_leaves(captured(*each)) for each in calls]
    for mine, each in zip(found, calls, strict=True):
        same(mine, optree.tree_leaves(plain(*each)))


def test_with_compiled_regions(recorder: Recorder) -> None:
    with (
        mock.patch.object(_torch, "compile_by_inductor", side_effect=lambda module, operands: module) as compiler,
        mock.patch.object(regions, "_LEAST_OPS", 1),
    ):
        found = run(steps("adamw", "zero 1", "inductor+cudagraphs"))
    assert compiler.called and recorder.launches == 4
    for mine, want in zip(found, run(steps("adamw", "zero 1", "eager")), strict=True):
        same(mine, want)


# --- What cannot be captured ---


@torch.library.custom_op("tests::reads", mutates_args=())
def reads(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


@reads.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_op_that_fails_while_it_is_recorded(recorder: Recorder) -> None:
    f = fp.compile(lambda x: reads(x).sum(), Mesh(), in_specs=P(), out_specs=P(), backend="cudagraphs")
    assert f(torch.ones(2)) == 4  # the first call runs op by op
    for _ in range(2):
        with pytest.raises(
            fp.BackendError, match=r"cannot capture <lambda>: tests.reads.default at test_cuda_graphs.py:\d+ .*captur"
        ):
            f(torch.ones(2))


def test_the_cpu_is_refused_by_name() -> None:
    train = steps("adamw", "zero 1", "cudagraphs")
    state = train.init(params())
    with pytest.raises(fp.BackendError, match=r"backend='cudagraphs' .* train_step runs on the CPU: .*'inductor'"):
        train(state, batch(0))
    assert state.handles  # it was not donated


def test_a_pipeline_is_refused() -> None:
    train = fp.train_step(
        loss, fp.optim.sgd(0.1), Mesh(pipe=2), fp.pipeline("pipe", microbatches=2), backend="inductor+cudagraphs"
    )
    with pytest.raises(fp.BackendError, match="several programs per step"):
        train.lower(params(), batch(0))


def test_memory_counts_the_copies(recorder: Recorder) -> None:
    plain, captured = (
        steps("adamw", "zero 1", backend).lower(params(), batch(0)) for backend in ("eager", "cudagraphs")
    )
    copied = 2 * 4 * 8 + 2 * 8  # a rank's half of the batch; loss and norm
    memory = captured.memory()
    assert (memory.copied, memory.peak) == (copied, plain.memory().peak + copied)
    assert sum(memory.alive.values()) == memory.peak and "copies for a CUDA graph" in str(memory)


# --- On processes ---


def test_a_backend_whose_host_takes_part_is_refused() -> None:
    carrier = ProcessCommunicator.__new__(ProcessCommunicator)
    carrier._groups = mock.Mock(over=lambda axes: mock.Mock(backend="nccl" if axes == ("data",) else "gloo"))
    carrier.require_capturable("step", [("data",)])
    with pytest.raises(fp.BackendError, match=r"cannot capture step: its collectives over \('pipe',\) go by gloo"):
        carrier.require_capturable("step", [("data",), ("pipe",)])


def on_process(rank: int, ranks: int) -> Any:
    with recording():
        train = fp.train_step(loss, OPTIMIZERS["lion"], Mesh(data=ranks), fp.zero(1, "data"), backend="cudagraphs")
        if ranks == 1:
            return run(train)
        state = train.init(params())
        with pytest.raises(fp.BackendError) as error:
            train(state, batch(0))
        assert state.handles  # it was not donated
        return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_processes(ranks: int) -> None:
    found = run_on_processes(on_process, ranks, ranks)
    if ranks == 2:
        assert all("collectives over ('data',) go by gloo" in each for each in found)
        return
    want = run(fp.train_step(loss, OPTIMIZERS["lion"], Mesh(data=1), fp.zero(1, "data")))
    for mine, wanted in zip(found[0], want, strict=True):
        same(mine, wanted)
