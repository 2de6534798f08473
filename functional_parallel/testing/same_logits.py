"""Check that generation computes the logits of the training forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..compile import compile
from ..errors import NotEquivalentError
from ..functions import PyTree
from ..generation import Generator, serving_plan

_TOLERANCE = 1e-12  # in float64


def same_logits(
    forward: Callable[..., torch.Tensor],
    generator: Generator,
    params: PyTree,
    tokens: torch.Tensor,
    *,
    calls: Sequence[int] | None = None,
    tolerance: float | None = None,
) -> float:
    """Check that a text that is read in several calls, with a cache, has the logits of one forward. Return the drift.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> def forward(params, tokens):
    ...     return params[tokens].cumsum(1)
    >>> def model(params, cache, tokens, positions):
    ...     cache = cache + params[tokens].sum(1)
    ...     return cache[:, None], cache
    >>> generator = fp.Generator(
    ...     model, Mesh(data=2), fp.data_parallel("data"), cache=lambda params, rows, length: params.new_zeros(rows, 4))
    >>> fp.testing.same_logits(forward, generator, torch.eye(4).double(), torch.tensor([[1, 2], [3, 0]]), calls=[1, 1])
    0.0

    Args:
        forward: function of params and tokens (rows, columns) that returns the logits of all columns: the function of
            the training loss, plain or compiled.
        generator: the generator of the model.
        params: full parameters.
        tokens: the text.
        calls: number of columns of each call; by default half of them, and then one by one.
        tolerance: largest absolute difference. By default 1e-12 in float64, and none in other dtypes.

    Raises:
        NotEquivalentError: if the logits differ by more.
    """
    half = tokens.shape[1] // 2
    calls = [half, *[1] * (tokens.shape[1] - half)] if calls is None else calls
    if sum(calls) != tokens.shape[1]:
        raise ValueError(f"calls={list(calls)}: they read {sum(calls)} columns, and the tokens have {tokens.shape[1]}")
    expected, found = forward(params, tokens), logits_of(generator, params, tokens, calls)
    drift = float((expected.detach() - found).abs().max())
    most = _TOLERANCE if tolerance is None and found.dtype is torch.float64 else tolerance
    if most is not None and not drift <= most:
        column = int((expected.detach() - found).abs().amax(dim=(0, 2)).argmax())
        raise NotEquivalentError(
            f"the logits of generation differ from those of the forward by {drift:.1e}, most in column {column}; at "
            f"most {most:.1e} is rounding. The calls read {list(calls)} columns"
        )
    return drift


def logits_of(generator: Generator, params: PyTree, tokens: torch.Tensor, calls: Sequence[int]) -> torch.Tensor:
    model, mesh, (rows, length) = generator.model, generator.mesh, tokens.shape
    first, *later = tokens.split(list(calls), 1)

    def begin(params: PyTree, state: None, tokens: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return model.begin(params, tokens, lengths, length)

    def proceed(params: PyTree, cache: Any, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return model.proceed(params, cache, tokens, positions)

    prefill = compile(serving_plan(generator.plan)(begin), mesh, state=1)
    logits, cache = prefill(params, None, first, torch.full((rows,), calls[0]))
    decode = compile(serving_plan(generator.plan, cache.specs, arguments=3)(proceed), mesh, state=1)
    found, start = [logits], calls[0]
    for each in later:
        positions = torch.arange(start, start + each.shape[1]).expand(rows, -1)
        logits, cache = decode(params, cache, each, positions)
        found.append(logits)
        start += each.shape[1]
    return torch.cat(found, 1)
