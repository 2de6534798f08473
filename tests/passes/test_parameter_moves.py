"""Parameters at rest in another memory are read and moved a number of layers ahead of their use."""

from __future__ import annotations

import itertools
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.ir import info, primitive_name
from functional_parallel.ops import TO_MEMORY
from sharding_specs import Mesh

from ..laws.test_offload import is_same, measured, predicted, trained


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in params["layers"]:
        x = x + torch.tanh(x @ layer["up"]) @ layer["down"]
    return x.square().mean()


PARAMS = {"layers": [{"up": torch.empty(16, 16), "down": torch.empty(16, 16)} for _ in range(5)]}


def forward(*plan: fp.Plan) -> str:
    """The reads, moves, gathers and products of the forward, by layer."""
    program = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), fp.chain(*plan)).lower(PARAMS, torch.empty(8, 16))
    found = []
    for node in program.traced.nodes:
        if info(node).backward and "mm" in str(node.target):
            break
        if info(node).backward:  # moved ahead
            continue
        layer = info(node).parameters[0].split("/")[-2] if info(node).parameters else ""
        if node.target is TO_MEMORY:
            found.append({"host": "read", "device": "move"}[node.args[1]] + layer)
        elif primitive_name(node) == "all_gather":
            found.append(f"gather{layer}")
        elif "mm" in str(node.target):
            found.append(".")
    return " ".join(word for word, _ in itertools.groupby(found))


@pytest.mark.parametrize(
    ("ahead", "order"),
    [
        (0, "move0 . move0 . move1 . move1 . move2 . move2 . move3 . move3 . move4 . move4 ."),
        (1, "move0 move1 . move2 . move3 . move4 ."),
        (2, "move0 move1 move2 . move3 . move4 . ."),
    ],
)
def test_layers_move_ahead_of_their_use(ahead: int, order: str) -> None:
    plan = fp.data_parallel("data"), fp.offload(parameters="host", ahead=ahead)
    assert forward(*plan) == order.replace(". .", ".")
    if ahead == 1:
        assert forward(plan[0], fp.offload(parameters="host")) == order


def test_layers_are_read_and_moved_ahead_of_their_gathers() -> None:
    def order(ahead: int, **options: Any) -> str:
        offload = fp.offload(parameters="disk", path=tempfile.gettempdir(), ahead=ahead)
        return forward(fp.zero(3, "data", **options), offload)

    assert order(1) == (  # at the first product: gather 1, move 2, read 3
        "read0 read1 move0 read2 move1 gather0 read3 move2 gather1 . read4 move3 gather2 . move4 gather3 . gather4 ."
    )
    assert order(1, prefetch=0) == (
        "read0 read1 move0 read2 move1 gather0 . gather0 . read3 move2 gather1 . gather1 . read4 move3 gather2 . "
        "gather2 . move4 gather3 . gather3 . gather4 . gather4 ."
    )
    assert order(0) == (
        "read0 move0 gather0 read1 move1 gather1 . read2 move2 gather2 . read3 move3 gather3 . read4 move4 gather4 ."
    )


@settings(max_examples=6, deadline=None)
@given(
    ahead=st.integers(0, 4),
    stage=st.sampled_from([0, 2, 3]),
    memory=st.sampled_from(["host", "disk"]),
    inner=st.sampled_from([[], [fp.remat()]]),
    outer=st.sampled_from([[], [fp.accumulate(2)], [fp.accumulate(2, reduce="each")]]),
    prefetch=st.integers(0, 2),
)
def test_any_number_of_layers(ahead: int, stage: int, memory: str, inner: Any, outer: Any, prefetch: int) -> None:
    """With the bits of the run without, and the predicted peaks."""
    before = [*inner, fp.zero(stage, "data", prefetch=prefetch)]
    offload = fp.offload(parameters=memory, ahead=ahead, path=tempfile.gettempdir())
    a = trained(fp.chain(*before, *outer), Mesh(data=2), "adamw")
    b = trained(fp.chain(*before, offload, *outer), Mesh(data=2), "adamw")
    assert is_same(a[0].whole(a[1]), b[0].whole(b[1])) and is_same(a[2], b[2])
    assert a[0].program.counts() == b[0].program.counts()
    assert predicted(b[0].program) == measured(b[0].program)


def test_a_number_of_layers() -> None:
    with pytest.raises(ValueError, match=r"ahead=-1 is no number of layers, an integer of at least 0"):
        fp.offload(parameters="host", ahead=-1)
