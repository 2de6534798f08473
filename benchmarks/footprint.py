"""One rank of one contestant alone: how long it takes to start, what memory it holds, what it sends.

`compare.py` starts it. Nothing else lives in the process, so its peak of resident memory, above what it was after all
imports and before the model was made, is the contestant's. Tensors are counted in steps of another, made after that.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import SIZES, Config, batch, make
from resident import peak, reset_peak, resident, shared
from tensors import peak_of_tensors
from traffic import Traffic

STEPS = 5


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, measured(settings))
    if dist.get_rank() == 0:
        Path(settings["out"]).write_text(json.dumps(slowest_and_largest(found)))
    dist.barrier()
    os._exit(0)  # in some runs torch's own threads are not gone at the end, and abort the process


def measured(settings: dict[str, Any]) -> dict[str, float]:
    """On this rank, in seconds and bytes."""
    made, config = maker(settings), SIZES[settings["size"]]
    dist.barrier()
    gc.collect()
    before = resident()
    module = make(config)
    dist.barrier()
    began = time.perf_counter()
    contestant = made(module)
    del module
    contestant.step(batch(config, 0))
    seconds = time.perf_counter() - began
    found = {"start_s": seconds, "start_peak_bytes": peak() - before}
    contestant.step(batch(config, 1))
    reset_peak()
    for index in range(STEPS):
        contestant.step(batch(config, 2 + index))
    found["peak_bytes"] = peak() - before
    found["tensor_bytes"] = peak_of_tensors(lambda: begun(made, config)) + shared()
    if settings["side"] == "ours":
        found["program_bytes"] = sum(contestant.train.program.bytes_sent().values())
        contestant.leave_to_backend()
        contestant.step(batch(config, 0))  # ranks compare their programs again
    with Traffic() as traffic:
        contestant.step(batch(config, 2 + STEPS))
    return {**found, "sent_bytes": sum(traffic.bytes.values())}


def begun(made: Callable[..., Any], config: Config) -> Callable[[], object]:
    """What takes a step of another contestant, which has taken two."""
    contestant = made(make(config))
    for index in range(2):
        contestant.step(batch(config, index))
    return lambda: contestant.step(batch(config, 2))


def maker(settings: dict[str, Any]) -> Any:
    """How the contestant is made; only what it needs is imported."""
    if settings["side"] == "ours":
        from ours import OURS

        return OURS[settings["name"]]
    from peers import PEERS

    return PEERS[settings["name"]]


def slowest_and_largest(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


if __name__ == "__main__":
    main()
