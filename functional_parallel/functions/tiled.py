"""A linear layer in tiles of its weight, each a parameter of its own (ZeRO-Infinity, arXiv 2104.07857)."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from ..quantities import is_positive_int

Tiles = dict[str, Any]  # "weight": rows of tiles by output, each a list by input; "bias": a tensor per row, or None


def into_tiles(weight: Tensor, bias: Tensor | None = None, *, outputs: int = 1, inputs: int = 1) -> Tiles:
    """Split the weight and bias of a linear layer into tiles, for `fp.tiled`. The first tiles may be one larger.

    >>> import torch, functional_parallel as fp
    >>> [[tuple(tile.shape) for tile in row] for row in fp.into_tiles(torch.ones(5, 6), outputs=2, inputs=2)["weight"]]
    [[(3, 3), (3, 3)], [(2, 3), (2, 3)]]

    Args:
        weight, bias: as in `torch.nn.Linear`; the weight has the shape (outputs, inputs).
        outputs, inputs: the numbers of tiles along the two dims.

    Raises:
        ValueError: for numbers of tiles that the dims do not have, or other shapes.
    """
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = " and a bias of shape ".join(str(tuple(each.shape)) for each in (weight, bias) if each is not None)
        raise ValueError(f"into_tiles: a weight of shape {shapes}; a linear layer has (outputs, inputs) and (outputs,)")
    for size, count, name in zip(weight.shape, (outputs, inputs), ("outputs", "inputs"), strict=True):
        if not is_positive_int(count) or count > size:
            raise ValueError(f"into_tiles({name}={count}): the weight has {size} {name}, so 1 to {size} tiles")
    copy = partial(torch.clone, memory_format=torch.contiguous_format)  # each with a storage of its own
    rows = [[*map(copy, row.tensor_split(inputs, 1))] for row in weight.tensor_split(outputs)]
    return {"weight": rows, "bias": None if bias is None else [*map(copy, bias.tensor_split(outputs))]}


def tiled(x: Tensor, tiles: Tiles) -> Tensor:
    """Apply a linear layer tile by tile. Its values equal the undivided layer's, up to the order of sums.

    Each tile is a parameter of its own. `fp.zero(3, axis, prefetch=0)` gathers one, uses it and drops it before the
    next, so that a layer may be larger than the memory of a device. Buckets merge the gradients of tiles up to
    `train_step(bucket=…)` bytes.

    >>> import torch, functional_parallel as fp
    >>> tiles = fp.into_tiles(torch.ones(4, 6), torch.arange(4.0), outputs=2, inputs=3)
    >>> fp.tiled(torch.ones(6), tiles)
    tensor([6., 7., 8., 9.])

    Args:
        x: the input, with any leading dims.
        tiles: the result of `fp.into_tiles`.
    """
    parts = x.split([tile.shape[1] for tile in tiles["weight"][0]], -1)
    results = list[Tensor]()
    for row, bias in zip(tiles["weight"], tiles["bias"] or [None] * len(tiles["weight"]), strict=True):
        biases = [*[None] * (len(row) - 1), bias]
        results.append(reduce(torch.add, map(torch.nn.functional.linear, parts, row, biases)))
    return torch.cat(results, -1)
