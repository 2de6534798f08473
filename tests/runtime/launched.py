"""A script that every launcher starts: each rank prints its numbers and the sum over all ranks.

`launched.py spawn` starts two ranks itself by torch.multiprocessing.spawn, with the variables set by hand.
"""

from __future__ import annotations

import argparse
import atexit
import os
import socket
import sys

import torch
import torch.distributed as dist

import functional_parallel as fp
from functional_parallel.runtime import launch_of_environment
from sharding_specs import Mesh, P

__all__ = ["free_port", "total"]


def total(ranks: int = 2) -> float:
    """The sum of 0, 1, 2, …, of which each rank holds a part."""
    add = fp.compile(lambda x: fp.psum(x.sum(), "data"), Mesh(data=ranks), in_specs=P("data"), out_specs=P())
    return float(add(torch.arange(2.0 * ranks)))


def write(line: str) -> None:
    """Write a line at once: the ranks share the output, and launchers do not buffer it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(local_rank: int | None = None) -> None:
    torch.set_num_threads(1)
    atexit.register(lambda: write(f"group at the end: {dist.is_initialized()}"))
    launch = launch_of_environment()
    assert launch is not None
    write(f"{launch.by}: rank {fp.rank()} of {launch.size}, local {launch.local_rank}, argument {local_rank}")
    write(f"total {total()}")


def by_hand(rank: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    main()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("how", nargs="?")
    parser.add_argument("--local_rank", "--local-rank", type=int)
    options = parser.parse_args()
    if options.how == "spawn":
        torch.multiprocessing.spawn(by_hand, (free_port(),), nprocs=2)
    else:
        main(options.local_rank)
