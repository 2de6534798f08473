"""A state goes on where the next batch's shape cuts the model into other stages."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh

from ..processes import run_on_processes

WIDTH, WORDS, LENGTHS = 16, 2000, (2, 400, 2)


def parameters() -> dict[str, Any]:
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64) / 4  # noqa: E731
    return {"layers": [draw(WIDTH, WIDTH) for _ in range(3)], "head": draw(WIDTH, WORDS)}


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    """Layers that grow with the length of the sequence, and a head that does not."""
    for layer in params["layers"]:
        x = x + ((x @ layer) @ x.mT).softmax(-1) @ x
    return (x[:, -1] @ params["head"]).logsumexp(-1).mean()


def trained(mesh: Mesh, plan: Any) -> tuple[list[Any], Any]:
    train = fp.train_step(loss, fp.optim.adamw(0.1), mesh, plan)
    state, losses = train.init(parameters()), []
    for length in LENGTHS:
        x = torch.randn(8, length, WIDTH, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
        state, metrics = train(state, x)
        losses.append(metrics.loss)
    return losses, train.whole(state)


@cache
def on_one_rank() -> tuple[list[Any], Any]:
    return trained(Mesh(data=1), fp.data_parallel("data"))


def plan(stage: int) -> Any:
    return fp.chain(fp.zero(stage, "data"), fp.pipeline("pipe", schedule="1f1b", microbatches=2))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_other_ranks_need_now_is_brought_to_them(stage: int) -> None:
    wanted = on_one_rank()
    with pytest.warns(RuntimeWarning, match=r"other stages .* fp\.stage_boundary"):
        found = trained(Mesh(pipe=2, data=2), plan(stage))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


def on_a_rank(rank: int) -> Any:
    with pytest.warns(RuntimeWarning, match="other stages"):
        return trained(Mesh(pipe=2, data=2), plan(3))


def test_between_processes() -> None:
    wanted = on_one_rank()
    for found in run_on_processes(on_a_rank, 4):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


def values_of_calls(length: int, kind: str) -> list[torch.Tensor]:
    """Values of a function that is cut otherwise than the one that held its parameters."""
    by_stages = fp.pipeline("pipe", microbatches=2)
    first = fp.compile(by_stages(loss), Mesh(pipe=2)).hold(parameters(), torch.zeros(8, 2, WIDTH, dtype=torch.float64))
    x = torch.randn(8, length, WIDTH, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    f = fp.compile(by_stages(loss), Mesh(pipe=2))
    if kind == "as they are":
        with pytest.warns(
            RuntimeWarning, match=r"other stages .* compiled\.hold\(params, …\) moves the parameters once"
        ):
            return [f(first, x)]
    again = f.hold(first, x)
    assert again is not first and f.hold(again, x) is again
    return [f(again, x) for _ in range(2)]  # a warning would be an error


@pytest.mark.parametrize("kind", ["as they are", "held"])
def test_parameters_on_other_stages(kind: str) -> None:
    x = torch.randn(8, 400, WIDTH, generator=torch.Generator().manual_seed(400), dtype=torch.float64)
    for value in values_of_calls(400, kind):
        torch.testing.assert_close(value, loss(parameters(), x))


def on_one_of_two(rank: int) -> list[torch.Tensor]:
    return values_of_calls(400, "held")


def test_parameters_move_between_processes_once() -> None:
    for found in run_on_processes(on_one_of_two, 2):
        assert found == values_of_calls(400, "held")
