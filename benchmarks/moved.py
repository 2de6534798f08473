"""Kernels of a step, and the bytes that they read and write: ours in bfloat16, and eager torch under autocast.

    python benchmarks/moved.py [tiny|small|wide|base]

No kernel runs: both are counted on tensors without memory. The update is not counted, in which torch and ours differ:
ours also writes the bfloat16 parameters, which autocast casts in each forward.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import optree
import torch
from model import SIZES, Config, batch, cross_entropy, make
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import functional_parallel as fp
from functional_parallel.ir import info
from functional_parallel.program.aliasing import view_base
from functional_parallel.program.work import bytes_moved
from sharding_specs import Mesh

_ROWS = {"embedding", "gather", "index", "index_select"}  # read as many bytes of their first operand as they write
_FREE = {"detach", "empty", "empty_like", "lift_fresh", "new_empty_strided"}

Counts = Counter[str]


class Moved(TorchDispatchMode):
    """Counts inside a `with` block.

    Attributes:
        kernels, bytes: number of ops, and bytes that they read and write, by the name of the op. A view is no kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counts = Counter()
        self.bytes: Counts = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return result
        name = func._schema.name.removeprefix("aten::")
        read, written = (
            [x for x in optree.tree_leaves(tree) if isinstance(x, torch.Tensor)] for tree in ((args, kwargs), result)
        )
        held = {x.untyped_storage()._cdata for x in read}
        is_view = not func._schema.is_mutable and any(x.untyped_storage()._cdata in held for x in written)
        if written and not is_view and name not in _FREE:
            read = [written[0] if name in _ROWS and each is read[0] else each for each in read]
            self.kernels[name] += 1
            self.bytes[name] += sum({id(x): x.nbytes for x in read}.values()) + sum(x.nbytes for x in written)
        return result


def under_autocast(config: Config) -> tuple[Counts, Counts]:
    """Return kernels and bytes of a forward and backward of eager torch."""
    with FakeTensorMode():
        model, tokens = make(config), torch.zeros(config.batch, config.time + 1, dtype=torch.int64)
        with Moved() as moved:
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(model(tokens[:, :-1]), tokens)
            loss.backward()
    return moved.kernels, moved.bytes


def of_ours(config: Config) -> tuple[Counts, Counts]:
    """Return kernels and bytes of our forward and backward, from the program."""
    model, params = fp.functional(make(config))

    def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(params, tokens[:, :-1]), tokens)

    train = fp.train_step(loss, fp.optim.adamw(1e-3), Mesh(), fp.mixed_precision("bf16"))
    kernels: Counts = Counter()
    moved: Counts = Counter()
    for node in train.lower(params, batch(config, 0)).traced.nodes:
        name = getattr(node.target, "__name__", "").partition(".")[0]
        if info(node).phase != "update" and view_base(node) is None and name not in _FREE:
            kernels[name] += 1
            moved[name] += bytes_moved(node)
    return kernels, moved


def main(size: str) -> None:
    config = SIZES[size]
    (theirs, read), (ours, moved) = under_autocast(config), of_ours(config)
    print(f"{size}: {'op':44} {'ours':>6} {'MiB':>9} {'torch':>6} {'MiB':>9}")
    for name in sorted({*ours, *theirs}, key=lambda name: -max(moved[name], read[name])):
        numbers = ours[name], moved[name] / 2**20, theirs[name], read[name] / 2**20
        print(f"{size}: {name:44} {numbers[0]:6} {numbers[1]:9.2f} {numbers[2]:6} {numbers[3]:9.2f}")
    totals = ours.total(), moved.total() / 2**20, theirs.total(), read.total() / 2**20
    print(f"{size}: {'all':44} {totals[0]:6} {totals[1]:9.2f} {totals[2]:6} {totals[3]:9.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["small"])
