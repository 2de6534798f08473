"""One contestant of the GPU benchmarks in a process of its own: a JSON line in, a JSON line out.

Commands: `["turn", n]` takes n steps and waits for the device after each, `["free", n]` waits once, `["memory", 0]` and
`["kernels", n]` tell what one of the steps holds and launches.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_contestants import CONTESTANTS
from gpu_workloads import TOYS, WORKLOADS

MIB = 1 << 20
WARM = 4  # steps, in which kernels are compiled and recorded
BATCHES = 4


class Worker:
    def __init__(self, workload: str, name: str, device: str, short: bool) -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        self.device, chosen = device, (TOYS if short else WORKLOADS)[workload]
        self.batches = [chosen.batch(index).to(device) for index in range(BATCHES)]
        began = time.perf_counter()
        self.contestant, self.taken = CONTESTANTS[name](chosen, device), 0
        self.losses = [self._step()]
        self.start = time.perf_counter() - began
        self.losses += [self._step() for _ in range(WARM - 1)]
        self.flops = chosen.flops and chosen.flops(self.contestant.parameters)

    def begun(self) -> dict[str, Any]:
        return {"start_s": self.start, "losses": self.losses, "flops": self.flops}

    def turn(self, count: int) -> dict[str, Any]:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            loss = self._step()
            times.append(1e3 * (time.perf_counter() - began))
        return {"ms": times, "loss": loss}

    def free(self, count: int) -> dict[str, Any]:
        self._wait()
        began = time.perf_counter()
        for _ in range(count):
            self._take()
        self._wait()
        return {"ms": 1e3 * (time.perf_counter() - began) / count}

    def memory(self, _: int) -> dict[str, Any]:
        """MiB. A CUDA graph has its own pool, of which the allocator knows what it reserved."""
        predicted = self.contestant.program and self.contestant.program.memory().peak / MIB
        if self.device != "cuda":
            return {"predicted": predicted}
        torch.cuda.reset_peak_memory_stats()
        self._step()
        stats = torch.cuda.memory_stats()
        return {
            "predicted": predicted,
            "peak": stats["allocated_bytes.all.peak"] / MIB,
            "reserved": stats["reserved_bytes.all.peak"] / MIB,
            "split": max((_inactive(segment) for segment in torch.cuda.memory_snapshot()), default=0) / MIB,
        }

    def kernels(self, count: int) -> list[list[Any]]:
        """Name, number of launches and milliseconds of the kernels of a step that take longest, by torch's profiler."""
        from torch.profiler import ProfilerActivity, profile

        on_cuda = self.device == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as profiler:
            self._step()
        taken = (lambda e: e.self_device_time_total) if on_cuda else (lambda e: e.self_cpu_time_total)
        events = sorted(profiler.key_averages(), key=taken, reverse=True)[:count]
        return [[event.key, event.count, taken(event) / 1e3] for event in events]

    def _take(self) -> torch.Tensor:
        self.taken += 1
        return self.contestant.step(self.batches[self.taken % BATCHES])

    def _step(self) -> float:
        return float(self._take())

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _inactive(segment: dict[str, Any]) -> int:
    """The largest free block of a segment that is in use: memory that no other size of tensor may get."""
    free = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
    return max(free, default=0) if segment["active_size"] else 0


def main() -> None:
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # libraries print too
    os.dup2(2, 1)

    def say(answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    worker = Worker(**json.loads(sys.argv[1]))
    say(worker.begun())
    commands: dict[str, Callable[[int], Any]] = {
        "turn": worker.turn,
        "free": worker.free,
        "memory": worker.memory,
        "kernels": worker.kernels,
    }
    for line in sys.stdin:
        command, count = json.loads(line)
        say(commands[command](count))


if __name__ == "__main__":
    main()
