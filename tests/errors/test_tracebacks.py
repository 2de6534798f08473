"""Tracebacks of errors in a loss show the user's lines, and not those of torch and of this library between them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.ir import with_short_tracebacks
from sharding_specs import Mesh, P

PARAMS = {"a": torch.ones(4, 4), "b": torch.ones(8, 4)}
X = torch.ones(4, 4)


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def of_wrong_shapes(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return block(block(x, params["a"]), params["b"]).square().mean()


def that_reads_values(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    total = block(x, params["a"]).sum()
    return total if total > 0 else -total


def through_a_module(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(3, 4))
    return fp.functional(net)[0](fp.functional(net)[1], block(x, params["a"])).mean()


PLAN = fp.chain(
    fp.mixed_precision("bf16"),
    fp.remat(),
    fp.tensor_parallel("tensor", {"a": P(None, "tensor"), "b": P()}),
    fp.zero(3, "data"),
    fp.accumulate(2),
)
MESH = Mesh(data=2, tensor=2)


def by_a_step(loss: Callable[..., torch.Tensor]) -> None:
    train = fp.train_step(loss, fp.optim.adamw(0.1), MESH, PLAN)
    train(train.init(PARAMS), X)


def by_lowering(loss: Callable[..., torch.Tensor]) -> None:
    fp.train_step(loss, fp.optim.adamw(0.1), MESH, PLAN).lower(PARAMS, X)


def by_a_compiled_function(loss: Callable[..., torch.Tensor]) -> None:
    fp.compile(fp.grad(PLAN(loss)), MESH)(PARAMS, X)


def by_a_pipeline(loss: Callable[..., torch.Tensor]) -> None:
    train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(pipe=2), fp.pipeline("pipe", microbatches=2))
    train(train.init(PARAMS), X)


def on_a_state(loss: Callable[..., torch.Tensor]) -> None:
    train = fp.train_step(lambda p, x: (x @ p["a"]).mean(), fp.optim.sgd(0.1), Mesh(data=2), fp.zero(3, "data"))
    train.compile(fp.zero(3, "data")(loss))(train.init(PARAMS), X)


def printed(call: Callable[[Any], None], loss: Callable[..., torch.Tensor]) -> list[str]:
    try:
        call(loss)
    except (RuntimeError, fp.errors.TracingError):
        return traceback.format_exc().splitlines()
    raise AssertionError("no error")


CALLS = [by_a_step, by_lowering, by_a_compiled_function, by_a_pipeline, on_a_state]


@pytest.mark.parametrize("loss", [of_wrong_shapes, that_reads_values, through_a_module])
@pytest.mark.parametrize("call", CALLS)
def test_frames_between_are_left_out(call: Callable[[Any], None], loss: Callable[..., torch.Tensor]) -> None:
    lines = printed(call, loss)
    frames = [line for line in lines if line.startswith("  File ")]
    assert any(f"in {loss.__name__}" in line for line in frames)
    assert not any("torch/" in line for line in frames)
    assert sum("functional_parallel/" in line for line in frames) == 1  # the one that says how to see them all
    assert len(lines) <= 24


def test_all_frames_are_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    short = printed(by_a_step, of_wrong_shapes)
    monkeypatch.setenv("FUNCTIONAL_PARALLEL_FULL_TRACEBACK", "1")
    full = printed(by_a_step, of_wrong_shapes)
    assert len(full) > 4 * len(short) and full[-1] == short[-1]
    assert "FUNCTIONAL_PARALLEL_FULL_TRACEBACK=1" in "\n".join(short)


def test_an_error_from_within_keeps_its_last_frame() -> None:
    """An error that is none of this library's own may be a fault of it."""

    @with_short_tracebacks
    def outer() -> None:
        fp.testing.assert_same(None, None, None, None, None)  # type: ignore[arg-type]

    with pytest.raises(Exception) as caught:
        outer()
    names = [str(frame.f_globals["__name__"]) for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert names[:3] == [__name__, "functional_parallel.ir.tracebacks", __name__]
    assert len(names) == 4 and names[3].startswith("functional_parallel.")


def test_causes_are_shortened_too() -> None:
    @with_short_tracebacks
    def outer() -> None:
        try:
            torch.nn.Linear(2, 2)(torch.ones(3))
        except RuntimeError as error:
            raise ValueError("outer") from error

    with pytest.raises(ValueError, match="outer") as caught:
        outer()
    cause = caught.value.__cause__
    assert cause is not None
    assert {frame.name for frame in traceback.extract_tb(cause.__traceback__)} == {"outer"}
