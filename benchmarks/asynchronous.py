"""Own steps per second of the fast ranks, with one rank five times slower and without, by method.

    python benchmarks/asynchronous.py --ranks 3 --rounds 5

A step is a small gradient and a sleep, as for a device that computes: processes of one host share its cores. Each round
measures every method with and without the slow rank, one after the other. A row has the median over rounds of the
ratio: 1.0 means that the slow rank delays no other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["METHODS", "main"]

SLOW = 5
METHODS = (
    "synchronous",
    "local SGD",
    "server, staleness 0",
    "server",
    "rotating",
    "server, inner steps",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of a fast rank, per measurement")
    parser.add_argument("--milliseconds", type=float, default=40.0, help="sleep in a fast rank's step")
    parser.add_argument("--width", type=int, default=64, help="of the model")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from launch import launched

    settings = {key: value for key, value in vars(args).items() if key != "json"}
    found = launched(Path(__file__).name, settings, args.ranks)
    if found is None:
        sys.exit(1)
    rows = [
        {"method": name, "alone": statistics.median(alone), "beside": statistics.median(beside), "ratio": ratio}
        for name, (alone, beside) in found.items()
        for ratio in [statistics.median(b / a for a, b in zip(alone, beside, strict=True))]
    ]
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{args.ranks} ranks, steps per second of the slowest fast rank; median of {args.rounds} rounds\n")
    print(f"{'method':<22}{'all fast':>10}{'one slow':>10}{'ratio':>8}")
    for row in rows:
        print(f"{row['method']:<22}{row['alone']:>10.2f}{row['beside']:>10.2f}{row['ratio']:>8.2f}")


# --- on each rank ---


def worker(settings: dict[str, Any]) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in METHODS}
    for number in range(settings["rounds"] + 1):  # the first traces
        for name in METHODS:
            for column, slow in enumerate((1, SLOW)):
                pace = measured(name, settings, slow)
                if number:
                    found[name][column].append(pace)
    if dist.get_rank() == 0:
        Path(settings["out"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


_made: dict[str, Callable[[], tuple[Callable[[Any], Any], Any, Callable[[Any], Any]]]] = {}


def measured(name: str, settings: dict[str, Any], slow: int) -> float:
    """Steps per second of the slowest rank that is not slow; the last rank's step takes `slow` times as long."""
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    if name not in _made:
        _made[name] = starter(name, settings, rank, ranks)
    step, state, finish = _made[name]()
    is_slow, pause = rank == ranks - 1, settings["milliseconds"] / 1000
    together = name in ("synchronous", "local SGD", "server, staleness 0")
    count = settings["steps"] // SLOW if together else settings["steps"]
    count = count // slow if is_slow and not together else count
    dist.barrier()
    began = time.perf_counter()
    for _ in range(max(1, count)):
        time.sleep(pause * (slow if is_slow else 1))
        state = step(state)
    pace = count / (time.perf_counter() - began)
    finish(state)
    paces: list[Any] = [None] * ranks
    dist.all_gather_object(paces, pace)
    return min(paces[:-1])


def starter(name: str, settings: dict[str, Any], rank: int, ranks: int) -> Any:
    """A function that begins a run: its step, its first state, and what ends it."""
    import torch

    import functional_parallel as fp
    from sharding_specs import Mesh

    width = settings["width"]
    mesh, optimizer = Mesh(data=ranks), fp.optim.sgd(1e-3)
    params = {"a": torch.ones(width, width) / width, "b": torch.ones(width, width) / width}
    x = torch.ones(8, width)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ params["a"]) @ params["b"]).square().mean()

    if name in ("synchronous", "local SGD"):
        plan = fp.data_parallel("data") if name == "synchronous" else fp.local_sgd("data", inner=4)
        train: Any = fp.train_step(loss, optimizer, mesh, plan, batch="own")
    elif name == "rotating":
        train = fp.asynchronous.rotating_server(loss, optimizer, mesh)
    else:
        options: dict[str, Any] = {"staleness": 0 if name.endswith("0") else 2 * SLOW * ranks}
        if name.endswith("inner steps"):
            options.update(inner=4, outer=fp.optim.sgd(1.0))
        train = fp.asynchronous.parameter_server(loss, optimizer, mesh, **options)
    finish = getattr(train, "finish", lambda state: state)
    return lambda: (lambda state: train(state, x)[0], train.init(params), finish)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        worker(json.loads(sys.argv[1]))
    else:
        main()
