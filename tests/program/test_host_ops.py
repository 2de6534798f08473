"""Ops for which the host waits for the device, or which a CUDA graph cannot hold; no step has one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import functional_parallel as fp
from functional_parallel.errors import BackendError
from functional_parallel.program import require_capturable
from sharding_specs import Mesh, P

from ..lowering import test_for_cuda as for_cuda


def found(f: Any, *args: Any) -> list[tuple[str, bool]]:
    """The ops found in a function, without the namespace aten, and whether the host waits at each."""
    return [(each.op.removeprefix("aten."), each.waits) for each in lowered(f, *args).host_ops()]


def lowered(f: Any, *args: Any) -> Any:
    """The program for CUDA. Numbers stay in main memory."""
    given = [x if x.ndim == 0 else fp.abstract(x, "cuda") for x in args]
    return fp.compile(f, Mesh(), in_specs=(P(),) * len(args), out_specs=P(), name="f").lower(*given)


# --- Single ops ---


@torch.library.custom_op("tests::compliant", mutates_args=())
def compliant(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@compliant.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_LIBRARY = torch.library.Library("tests_of_host", "DEF")
for _name, _tags in {"untagged": (), "unsafe": (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)}.items():
    _LIBRARY.define(f"{_name}(Tensor x) -> Tensor", tags=_tags)
    _LIBRARY.impl(_name, lambda x: x.clone(), "CompositeExplicitAutograd")

X, EVEN = torch.ones(4, 4), torch.arange(4) % 2 == 0
ENDS = torch.tensor([1, 4], dtype=torch.int32)
CASES: dict[str, tuple[Any, tuple[torch.Tensor, ...], list[tuple[str, bool]]]] = {
    "eigenvalues": (lambda x: torch.linalg.eigvalsh(x), (X,), [("_linalg_eigh.default", True)]),
    "a product": (lambda x: x @ x, (X,), []),
    "assignment by a mask": (lambda x, m: x.index_put((m,), x[:1]), (X, EVEN), []),  # it becomes a `where`
    "assignment by numbers": (lambda x, m: x.index_put((m,), x[:2]), (X, torch.arange(2)), []),
    "lookup": (lambda x, m: x[m], (X, torch.arange(2)), []),
    "embedding": (lambda x, m: F.embedding(m, x), (X, torch.arange(2)), []),
    "groups": (lambda x, w, ends: F.grouped_mm(x, w, offs=ends), (X, torch.ones(2, 4, 4), ENDS), []),
    "groups without alignment": (
        lambda x, w, ends: F.grouped_mm(x, w, offs=ends),
        (X, torch.ones(2, 4, 3), ENDS),
        [("fp.grouped_mm.default", True)],
    ),
    "ctc": (
        lambda x, y: F.ctc_loss(x.log_softmax(-1)[:, None], y, (4,), (2,)),
        (X, torch.ones(1, 2, dtype=torch.int64)),
        [("fp.ctc.default", True)],
    ),
    "a user's op": (lambda x: compliant(x), (X,), []),
    "a user's op without the tag": (
        lambda x: torch.ops.tests_of_host.untagged(x),
        (X,),
        [("tests_of_host.untagged.default", False)],
    ),
    "a user's op that is not for graphs": (
        lambda x: torch.ops.tests_of_host.unsafe(x),
        (X,),
        [("tests_of_host.unsafe.default", False)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ops(name: str) -> None:
    f, args, want = CASES[name]
    assert found(f, *args) == want


def test_values_in_main_memory() -> None:
    x, count = torch.ones(3), torch.tensor(2.0)
    assert found(lambda x, n: x * (n + 1), x, count) == [("1", False), ("add.Tensor", False)]
    assert found(lambda x, n: x * n.to(x.device), x, count) == [("1", False)]  # it becomes an argument of a kernel
    assert found(lambda x, n: x * 2, x, count) == []  # an input that nothing reads
    assert found(lambda x: x + torch.ones(3).to(x.device), x) == [("_to_copy.default", False)]
    assert found(lambda x: x.cpu() * 2, x) == [("_to_copy.default", True), ("mul.Tensor", False)]
    assert found(lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device), x) == []


def test_programs_in_main_memory() -> None:
    step = fp.train_step(lambda w, x: (x @ w).sum(), fp.optim.sgd(0.1), Mesh()).lower(torch.ones(3), torch.ones(2, 3))
    assert step.host_ops() and not any(each.waits for each in step.host_ops())
    with pytest.raises(BackendError, match="train_step runs on the CPU: give it tensors on CUDA"):
        require_capturable("train_step", step.traced)


def test_the_error_names_ops_and_lines() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (torch.linalg.eigvalsh(x) + torch.linalg.eigvals(x).real).sum()

    with pytest.raises(
        BackendError,
        match=r"cannot capture f, [^\n]*\n  aten._linalg_eigh.default at test_host_ops.py:\d+: the host reads a value "
        r"[^\n]*\n  aten.linalg_eig[^\n]*\n[^\n]*program.host_ops\(\)",
    ):
        fp.compile(f, Mesh(), in_specs=P(), out_specs=P(), backend="cudagraphs").lower(
            fp.abstract(torch.eye(3), "cuda")
        )


# --- Steps; tests/lowering/test_for_cuda.py counts the waits of every plan ---


def by_host(count: int) -> float:
    return 0.1 if count > 2 else 0.01


@pytest.mark.parametrize("name", ["no plan", "zero 3", "flat", "fp16", "DiLoCo"])
@pytest.mark.every(3)
def test_a_graph_can_hold_a_step(name: str) -> None:
    assert for_cuda.lower_step(*for_cuda.STEPS[name]).host_ops() == []


@pytest.mark.parametrize("scaled", [False, True])
def test_a_rate_on_the_host(scaled: bool) -> None:
    """With a loss scale, the device alone knows which steps are skipped, and so the number of updates."""
    plan = fp.mixed_precision("fp16" if scaled else "bf16")
    program = for_cuda.lower_step(for_cuda.loss, Mesh(), plan, fp.optim.adamw(by_host), {})
    assert {(each.op, each.waits) for each in program.host_ops()} == (
        {("fp.rate_on_host.default", True)} if scaled else set()
    )


def test_waits_of_a_pipeline() -> None:
    def f(params: Any, x: torch.Tensor) -> torch.Tensor:
        for w in params:
            x = torch.tanh(x @ w) + torch.linalg.eigvalsh(w)
        return x.square().mean()

    train = fp.train_step(f, fp.optim.sgd(0.1), Mesh(pipe=2), fp.pipeline("pipe", microbatches=2))
    program = train.lower(*fp.abstract(([X, X], X), "cuda"))
    assert {each.op for each in program.host_ops() if each.waits} == {"aten._linalg_eigh.default"}
