"""A GPT that is trained under a limit of the anonymous memory of its process: `python -m … [disk]`.

First the program is lowered and run once, so that torch and the library have what they need. Then the process may use
as much more memory as its program says, and an overhead. It prints the bytes of the states, the peaks, and the losses.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import sys
import tempfile
from functools import partial
from pathlib import Path

import optree
import torch

import functional_parallel as fp
from sharding_specs import Mesh, split

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import gpt

OVERHEAD = 16 << 20  # bytes of Python objects, of torch's allocator and of kernels
CONFIG = gpt.Config(layers=8, embed=192, heads=4, time=32)


def data_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmData"))
    return int(line.split()[1]) << 10


def main(is_on_disk: bool, limit: int) -> None:
    torch.set_num_threads(1)
    params, _ = split(gpt.init(CONFIG, 0))
    states = 16 * sum(x.numel() for x in optree.tree_leaves(params))  # parameters, gradients and two moments
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    away = fp.offload(state="disk", parameters="disk", path=tempfile.gettempdir(), group="256KiB", ahead=0)
    plan = fp.chain(fp.remat(), fp.zero(0, "data"), *[away] * is_on_disk)
    budget = fp.Memory(device=states // 8) if is_on_disk else None
    train = fp.train_step(
        partial(gpt.loss, config=CONFIG), fp.optim.adamw(1e-2), Mesh(data=1), plan, bucket=None, memory=budget
    )
    state, losses = train.init(params), []
    del params
    state, metrics = train(state, tokens)
    losses.append(metrics.loss.item())
    assert train.program is not None
    peaks = train.program.memory().peaks
    held = 0 if is_on_disk else 3 * states // 4  # parameters and moments, which are there when the limit is set
    used = limit or peaks["device"] + peaks.get("host", 0) + OVERHEAD
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() - held + used,) * 2)
    for _ in range(3):
        state, metrics = train(state, tokens)
        losses.append(metrics.loss.item())
    print(json.dumps({"states": states, "peaks": peaks, "losses": losses, "limit": used}))


if __name__ == "__main__":
    main(sys.argv[1] == "disk", int(sys.argv[2]))
