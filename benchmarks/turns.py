"""A contestant that takes its steps when it is told to: one JSON line in, one out.

For peers that cannot share processes with ours, such as JAX, whose ranks are devices of one process. `by_turns.py`
starts both and tells them, never two at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from model import SIZES, batch, make
from resident import peak, reset_peak, resident

Answer = dict[str, Any]


class Timed:
    """Answers with what a step took; beside it what it is for the ranks to come together."""

    def __init__(self, size: str, step: Callable[[torch.Tensor], float | None], together: Callable[[], object]) -> None:
        self.config, self._step, self._together = SIZES[size], step, together

    def __call__(self, index: int) -> Answer:
        tokens = batch(self.config, index)
        self._together()
        began, worked = time.perf_counter(), time.process_time()
        loss = self._step(tokens)
        return {"s": time.perf_counter() - began, "work_s": time.process_time() - worked, "loss": loss}


def ours(settings: Any) -> dict[str, Callable[..., Answer]]:
    """What our ranks can be told, by name."""
    from ours import OURS, staged
    from quiet import Quiet
    from worker import plain

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, config = settings["size"], SIZES[settings["size"]]
    contestant, first = OURS[settings["name"]](make(config)), dist.get_rank() == 0
    single = plain(config)

    def gradients(index: int) -> Answer:
        found = contestant.gradients(batch(config, index))
        if first:
            np.savez(settings["gradients"], **{name: gradient.numpy() for name, gradient in found.items()})
        return {}

    def without_loss(step: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], None]:
        def run(tokens: torch.Tensor) -> None:
            step(tokens)

        return run

    def on_rank_0(step: Callable[[torch.Tensor], object]) -> Timed:
        return Timed(size, without_loss(step) if first else lambda tokens: None, dist.barrier)

    return {
        "gradients": gradients,
        "step": Timed(size, lambda tokens: contestant.whole(contestant.step(tokens)), dist.barrier),
        "plain": on_rank_0(single),
        "plain at once": Timed(size, without_loss(single), dist.barrier),
        "staged": on_rank_0(staged(make(config)).step),
        "quiet": Timed(size, without_loss(Quiet(OURS[settings["name"]](make(config))).step), dist.barrier),
    }


def jax(settings: Any) -> dict[str, Callable[..., Answer]]:
    """What JAX's process can be told, by name."""
    from jax_gpt import JaxStep, bytes_of_arrays, bytes_sent

    kind = {"JAX DP": "data", "JAX TP": "tensor"}[settings["name"]]
    config, ranks = SIZES[settings["size"]], settings["ranks"]
    made: list[JaxStep] = []

    def contestant() -> JaxStep:
        if not made:
            made.append(
                JaxStep({name: p.detach().numpy() for name, p in make(config).named_parameters()}, kind, config)
            )
        return made[0]

    def step(tokens: torch.Tensor) -> float:
        return contestant().step(tokens.numpy())

    def gradients(index: int) -> Answer:
        np.savez(settings["gradients"], **contestant().gradients(batch(config, index).numpy()))
        return {}

    def alone(index: int) -> Answer:
        """As `footprint.py` does; memory is that of all devices over their number."""
        before, began = resident(), time.perf_counter()
        step(batch(config, index))
        found = {"start_s": time.perf_counter() - began, "start_peak_bytes": (peak() - before) // ranks}
        step(batch(config, index))
        reset_peak()
        for _ in range(5):
            step(batch(config, index))
        found["peak_bytes"] = (peak() - before) // ranks
        compiled = contestant().compiled(batch(config, index).numpy())
        return {
            **found,
            "tensor_bytes": bytes_of_arrays(compiled),
            "sent_bytes": bytes_sent(compiled.as_text(), ranks),
        }

    timed = Timed(settings["size"], step, lambda: None)
    return {"gradients": gradients, "step": timed, "alone": alone}


def main() -> None:
    settings = json.loads(sys.argv[1])
    commands = {"ours": ours, "jax": jax}[settings["side"]](settings)
    for line in sys.stdin:
        name, index = json.loads(line)
        print(json.dumps(commands[name](index)), flush=True)
    Path(settings["out"]).write_text("{}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
