"""Partitioned activations of ZeRO-R."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from ..functions import LocalFunction, explain_keywords
from ..ops import MEMORIES
from ..passes import SplitResiduals
from ..quantities import parse_bytes
from ..requests import RunPass
from .transform import Transform


@explain_keywords
@dataclass(frozen=True)
class partition_activations(Transform):
    """Save activations that all ranks of an axis hold as shards, and gather them for the backward.

    This is Pa of ZeRO-R (arXiv 1910.02054 §6.1). With tensor parallelism, all ranks of the axis hold the activations
    between the layers. With `fp.remat()` a step saves nothing else, and each rank stores one n-th of them. Each is
    gathered once per step: one all-gather per layer more.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh, P
    >>> def loss(params, x):
    ...     for layer in params["layers"]:
    ...         x = x + torch.tanh(x @ layer["a"]) @ layer["b"]
    ...     return x.square().sum()
    >>> params = {"layers": [{"a": torch.ones(8, 8), "b": torch.ones(8, 8)}] * 9}
    >>> split = fp.tensor_parallel("tensor", {"*/a": P(None, "tensor"), "*/b": P("tensor")})
    >>> def program(*first):
    ...     step = fp.compile(fp.grad(fp.chain(*first, split)(loss)), Mesh(tensor=4))
    ...     return step.lower(params, torch.ones(4096, 8))
    >>> plain, parts = program(fp.remat()), program(fp.remat(), fp.partition_activations("tensor"))
    >>> plain.memory().peak - parts.memory().peak, parts.counts()["all_gather", ("tensor",)]
    (688128, 8)
    >>> print(parts.notes[0])
    partition_activations('tensor'): 8 saved activations of 1.0 MiB are split, and gathered for the backward

    Beside `fp.remat(budget=…)` the budget chooses the activations that are split.

    Args:
        axis: the mesh axis, usually `fp.tensor_parallel`'s. Values that differ along it are saved as they are.
        memory: memory where a rank keeps its parts: "device", or "host" for Pa+cpu of ZeRO-R.
        at_least: the size of the smallest value that is split: a number of bytes, or a text such as "1MiB".

    Raises:
        ValueError: if `at_least` is not a size, or for an unknown memory.
        MeshError: when the function is compiled, if the mesh has no such axis, or the axis has a pipeline's stages.
    """

    axis: str
    _: KW_ONLY
    memory: str = "device"
    at_least: int | str = "64KiB"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory not in MEMORIES:
            known = ", ".join(map(repr, MEMORIES))
            raise ValueError(f"partition_activations(memory={self.memory!r}): the memories are {known}")
        parse_bytes(self.at_least)  # raises for another text

    def apply(self, f: LocalFunction) -> LocalFunction:
        return f.requesting(RunPass(SplitResiduals(self.axis, parse_bytes(self.at_least), self.memory)))
