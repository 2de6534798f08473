"""One rank of one comparison; `compare.py` starts it."""

from __future__ import annotations

import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from model import ADAMW, SIZES, Config, batch, cross_entropy, make
from ours import OURS, staged
from peers import PEERS
from quiet import Quiet
from row import CHECKED_STEPS, row_of, turns_of


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = SIZES[settings["size"]]
    ours, peer = OURS[settings["name"]](make(config)), PEERS[settings["name"]](make(config))
    worst = difference(ours.gradients(batch(config, 0)), peer.gradients(batch(config, 0)))
    losses = [(ours.whole(ours.step(tokens)), peer.whole(peer.step(tokens))) for tokens in data(config)]
    single = plain(config)
    steps = [ours.step, peer.step, on_rank_0(single)]
    quiet = Quiet(OURS[settings["name"]](make(config))) if settings["bounds"] else None
    if quiet is not None:
        steps += [on_rank_0(staged(make(config)).step), single, quiet.step]
    times, work = interleaved(steps, config, settings["rounds"])
    if quiet is not None and (makespan := quiet.makespan()):
        times[-1] = [makespan]
    if settings["profile"]:
        profile(ours.step, config, settings["profile"])
    if dist.get_rank() == 0:
        Path(settings["out"]).write_text(
            json.dumps(row_of(settings, dist.get_world_size(), times, work, losses, worst))
        )
    dist.barrier()
    dist.destroy_process_group()


def data(config: Config) -> list[torch.Tensor]:
    return [batch(config, step) for step in range(CHECKED_STEPS)]


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of a gradient, as a share of that gradient's largest element."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in ours)


def plain(config: Config) -> Callable[[torch.Tensor], object]:
    """A step of eager torch on the whole batch."""
    module = make(config)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)

    def step(tokens: torch.Tensor) -> None:
        cross_entropy(module(tokens[:, :-1]), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def on_rank_0(step: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
    """While the others wait."""
    return step if dist.get_rank() == 0 else lambda tokens: None


def interleaved(
    steps: list[Callable[[torch.Tensor], object]], config: Config, rounds: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Of each kind of step, in turn, the order turning round: seconds of the slowest rank; processor seconds of all.

    A turn is two steps of which the second is timed, since in training a step follows one of its own kind: after one of
    another, caches hold other data and the heap has to grow again.
    """
    times, work = (torch.zeros(len(steps), rounds, dtype=torch.float64) for _ in range(2))
    for which, index, place in turns_of(len(steps), rounds):
        tokens = batch(config, index)
        steps[which](tokens)
        dist.barrier()
        began, worked = time.perf_counter(), time.process_time()
        steps[which](tokens)
        times[which, place] = time.perf_counter() - began
        work[which, place] = time.process_time() - worked
    dist.all_reduce(times, dist.ReduceOp.MAX)
    dist.all_reduce(work)
    return times.tolist(), work.tolist()


def profile(step: Callable[[torch.Tensor], object], config: Config, lines: int) -> None:
    """Our step on rank 0: Python's view, then the kernels'."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as kernels:
        for index in range(5):
            step(batch(config, index))
    profiler = cProfile.Profile()
    profiler.enable()
    for index in range(5):
        step(batch(config, index))
    profiler.disable()
    if dist.get_rank() == 0:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(lines)
        print(kernels.key_averages().table(sort_by="self_cpu_time_total", row_limit=lines), file=sys.stderr)


if __name__ == "__main__":
    main()
