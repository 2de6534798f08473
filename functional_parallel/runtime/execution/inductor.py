"""Region of a program, compiled by inductor when it first runs. Equal regions are one object while one is in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import fx

from ... import _torch
from ...errors import BackendError

BACKENDS = ("eager", "inductor", "cudagraphs", "inductor+cudagraphs")
CompiledFn = Callable[..., Sequence[torch.Tensor]]

_regions: WeakValueDictionary[str, CompiledRegion] = WeakValueDictionary()


def check_backend(name: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r}: write one of {', '.join(map(repr, BACKENDS))}")


class CompiledRegion:
    """Ops that are compiled together. Called with tensors, it returns a tuple of tensors in separate memory."""

    __name__ = "region"  # as an op of a graph
    owns_results = True  # read by the analysis of shared memory

    def __init__(self, graph: fx.Graph, describe: str) -> None:
        self.graph, self.describe = graph, describe
        self.compiled: dict[tuple[tuple[int, ...], ...], CompiledFn] = {}  # by the strides of the operands

    def __call__(self, *operands: torch.Tensor) -> Sequence[torch.Tensor]:
        strides = tuple([x.stride() for x in operands])
        if (run := self.compiled.get(strides)) is None:
            run = self.compiled[strides] = self._compile(operands)
        return run(*operands)

    def _compile(self, operands: Sequence[torch.Tensor]) -> CompiledFn:
        try:
            run = _torch.compile_by_inductor(fx.GraphModule({}, self.graph), operands)
            results = run(*operands)
        except Exception as error:
            raise BackendError(_advice(error, self.describe)) from error
        if not _overlap(results, operands):
            return run
        return lambda *operands: [x.clone() for x in run(*operands)]


def region_of(key: str, make: Callable[[], CompiledRegion]) -> CompiledRegion:
    if (region := _regions.get(key)) is None:
        region = _regions[key] = make()
    return region


def _overlap(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> bool:
    """Whether a result shares memory with another result or an operand. This is a fixed property of compiled code."""
    mine, theirs = ([_extent(x) for x in xs if x.numel()] for xs in (results, operands))
    return any(
        a[0] < b[1] and b[0] < a[1] for index, a in enumerate(mine) for b in (*mine[:index], *theirs) if a[2] == b[2]
    )


def _extent(x: torch.Tensor) -> tuple[int, int, torch.device]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize, x.device


def _advice(error: Exception, describe: str) -> str:
    said = f"{type(error).__name__}: {error}"
    fixes = {
        "InvalidCxxCompiler": "it needs a C++ compiler: install one (`apt install g++`), or name yours in CXX",
        "CppCompileError": "the C++ compiler failed; is it g++ 10 or clang 10, or later, with its headers?",
        "TritonMissing": "on this device it needs triton: `pip install triton`",
    }
    fix = next((fix for name, fix in fixes.items() if name in said), "torch's compiler failed on these ops")
    return f"backend='inductor' cannot compile {describe}: {fix}. backend='eager' needs no compiler. torch says: {said}"
