"""Random numbers keyed by seed, site, step and global position. Every mesh draws the same numbers.

A draw is a pure function: it hashes the key and the position of the element in the full tensor. Sharding a value only
changes the positions that a rank draws. In a traced forward a draw is one op, `torch.ops.fp.uniform`, or for dropout
`torch.ops.fp.kept`. The partitioner adds the splits to its arguments. `draws` has its definition and its kernels.

Models draw from the ambient key, set by `with fp.random.using(key)`; `train_step(seed=…)` enters it in each step. Each
call of `dropout` or `next_key` is a separate site. Sites are numbered in the order of the trace. A model may also pass
a key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from . import _torch
from .collectives import hidden_axes, keeping_grad_mode
from .draws import GOLDEN, defined, drawn, mixed, places
from .errors import RandomKeyError
from .ir import define_op, register_differentiable
from .tracing import AmbientKey, ambient_keys, intercept, intercept_op, is_kept

__all__ = ["dropout", "fold_in", "key", "next_key", "normal", "uniform", "using"]


def key(seed: int) -> torch.Tensor:
    """Return a key for a seed, as an int64 scalar in main memory. A draw copies it to its device.

    >>> import functional_parallel as fp
    >>> fp.random.key(3).shape
    torch.Size([])

    Args:
        seed: any signed 64-bit integer.
    """
    return mixed(torch.tensor(seed, dtype=torch.int64, device="cpu") + GOLDEN)


def fold_in(key: torch.Tensor, number: int | torch.Tensor) -> torch.Tensor:
    """Return a new key derived from a key and a number (a step, a site, a layer).

    >>> import functional_parallel as fp
    >>> bool(fp.random.fold_in(fp.random.key(0), 1) == fp.random.fold_in(fp.random.key(0), 2))
    False

    Args:
        key: an int64 scalar.
        number: number of the derived key. It may be a tensor, such as `axis_index`.
    """
    number = torch.as_tensor(number, dtype=torch.int64, device=key.device)
    return mixed(key * GOLDEN + mixed(number + GOLDEN))  # not symmetric: step 1 of seed 0 is not step 0 of seed 1


def uniform(key: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Draw uniform numbers in [0, 1) with the shape and dtype of `like`.

    >>> import torch, functional_parallel as fp
    >>> x = fp.random.uniform(fp.random.key(0), torch.empty(1000))
    >>> bool((x >= 0).all() and (x < 1).all() and (x.mean() - 0.5).abs() < 0.05)
    True

    Args:
        key: an int64 scalar, from `key` or `fold_in`. For several keys, use torch.func.vmap.
        like: tensor that provides shape, dtype and device. If it is sharded, the numbers are the shards of the numbers
            of the full tensor.

    Raises:
        ValueError: when the key is not a scalar.
    """
    if key.ndim:
        raise ValueError(f"a draw takes one key, a scalar, not {tuple(key.shape)}: map over keys by torch.func.vmap")
    found: torch.Tensor = OP(like.detach(), key.to(like.device), list(like.shape), [], [])
    return found


def normal(key: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Draw standard normal numbers with the shape and dtype of `like` (Box-Muller transform of two uniforms).

    >>> import torch, functional_parallel as fp
    >>> x = fp.random.normal(fp.random.key(0), torch.empty(10_000))
    >>> bool(x.mean().abs() < 0.05 and (x.std() - 1).abs() < 0.05)
    True

    Args:
        key, like: as for `uniform`.
    """
    radius = torch.sqrt(-2 * torch.log1p(-uniform(fold_in(key, 1), like)))
    return radius * torch.cos(2 * math.pi * uniform(fold_in(key, 2), like))


def dropout(x: torch.Tensor, p: float = 0.5, *, key: torch.Tensor | None = None) -> torch.Tensor:
    """Zero each element with probability p and scale the others by 1 / (1 − p). Every mesh gives the same result.

    >>> import torch, functional_parallel as fp
    >>> y = fp.random.dropout(torch.ones(1000), 0.25, key=fp.random.key(0))
    >>> sorted(set(y.tolist())) == [0.0, y.max().item()], bool((y.mean() - 1).abs() < 0.1)
    (True, True)

    Args:
        x: any floating tensor.
        p: probability of zero, in [0, 1].
        key: an int64 scalar. Without it, the key of the next site of the ambient key.

    Raises:
        RandomKeyError: when neither `key` nor an ambient key is given.
        ValueError: when p is not in [0, 1].
    """
    if not 0 <= p <= 1:
        raise ValueError(f"the dropout probability must be in [0, 1], not {p}")
    if p == 0:
        return x
    if p == 1:
        return x * 0
    return _scaled(x, _kept(p, x, next_site("dropout") if key is None else key), 1 / (1 - p))


def happens(p: float | torch.Tensor, x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    if not isinstance(p, torch.Tensor):
        return ~_kept(p, x, key)
    like = torch.empty_like(x, dtype=torch.float32) if x.dtype.itemsize < 4 else x  # enough digits to hit p
    return uniform(key, like) < p


def _scaled(x: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:
    """Return x · kept · scale, by torch's fused kernel for the gradient of dropout."""
    if _torch.needs_higher_derivatives() or x.is_complex() or _torch.mapped_dims(x) or _torch.mapped_dims(kept):
        return x * kept * scale
    with keeping_grad_mode():
        return _apply_scaled(x, kept, scale)


def _kept(p: float, x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    if not 0 < p < 1:
        return torch.full_like(x, p <= 0, dtype=torch.bool)
    found: torch.Tensor = KEPT(x.detach(), key.to(x.device), list(x.shape), [], [], p)
    return found


@contextmanager
def using(key: torch.Tensor) -> Iterator[None]:
    """Use a key as the ambient key inside a `with` block. The first draw is site 0, the second is site 1.

    In a compiled function, write the block inside the function, with an argument as the key.

    >>> import torch, functional_parallel as fp
    >>> with fp.random.using(fp.random.key(0)):
    ...     a, b = (fp.random.dropout(torch.ones(8)) for _ in range(2))
    >>> bool((a == b).all())
    False

    Args:
        key: an int64 scalar, from `key` or `fold_in`.
    """
    with _torch.pushed(ambient_keys(), AmbientKey(key, is_kept())):
        yield


def sites_drawn() -> int:
    return sum(each.drawn for each in ambient_keys())


def next_key() -> torch.Tensor:
    """Return a key for one draw in a model: the key of the next site of the ambient key.

    >>> import torch, functional_parallel as fp
    >>> with fp.random.using(fp.random.key(0)):
    ...     a, b = (fp.random.normal(fp.random.next_key(), torch.empty(8)) for _ in range(2))
    >>> bool((a == b).any())
    False

    Raises:
        RandomKeyError: when there is no ambient key.
    """
    return next_site("fp.random.next_key()")


def next_site(what: str) -> torch.Tensor:
    keys = ambient_keys()
    if not keys:
        raise RandomKeyError(
            f"{what} draws random numbers, but no key is given: pass key=fp.random.key(seed), wrap the call in "
            "`with fp.random.using(key):`, use train_step(seed=…), or set the model to eval mode"
        )
    if is_kept() and not keys[-1].in_program:
        raise RandomKeyError(
            f"{what} draws from a key that was set outside a compiled function: all calls would use the first key. "
            "Write `with fp.random.using(key):` inside it, with an argument as key, or use train_step(seed=…)"
        )
    return fold_in(keys[-1].key, keys[-1].next_site())


@intercept(torch.nn.functional.dropout, always=True)
def _traced_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training:
        return input
    return input.copy_(dropout(input, p)) if inplace else dropout(input, p)


@intercept_op(torch.ops.aten.native_dropout.default)
def _keyed_native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = _kept(p, x, next_site("dropout"))
    return _scaled(x, kept, 1 / (1 - p)) if p < 1 else x * 0, kept


def _draw(
    like: torch.Tensor,
    key: torch.Tensor,
    shape: Sequence[int],
    axes: Sequence[str],
    splits: Sequence[int],
    p: float | None = None,
) -> torch.Tensor:
    if hidden_axes():  # a transform outside splits this trace too, and adds its axis
        found: torch.Tensor = (
            OP(like, key, shape, axes, splits) if p is None else KEPT(like, key, shape, axes, splits, p)
        )
        return found
    where = places(like, key, shape, axes, splits)
    is_mapped = any(map(_torch.is_functorch_wrapped, where[-1]))  # by a vmap over the ranks
    return (defined if is_mapped else DRAW)(*where, like.dtype, p)


def _vmap(
    op: Any,
    info: _torch.VmapInfo,
    in_dims: Sequence[int | None],
    like: torch.Tensor,
    key: torch.Tensor,
    *where: Sequence[int] | Sequence[str] | float,
) -> tuple[torch.Tensor, int | None]:
    """Map over keys. Only the shape, dtype and device of `like` matter, so a mapped `like` is reduced to one entry."""
    of_like, of_key, *_ = in_dims
    one = like if of_like is None else like.select(of_like, 0)
    keys = key if of_key is None else key.movedim(of_key, 0)
    return op(one, keys, *where), None if of_key is None else 0


def _vmap_of_seeds(
    info: _torch.VmapInfo, in_dims: Sequence[Any], seeds: torch.Tensor, *where: Any
) -> tuple[torch.Tensor, int]:
    return DRAW(seeds.movedim(in_dims[0], 0), *where), 0


_SHAPED = "Tensor like, Tensor key, int[] shape, str[] axes, int[] splits"
DRAW: Callable[..., torch.Tensor] = define_op(
    "draw(Tensor seeds, int[] shape, int[] sizes, int[] strides, Tensor[] tables, ScalarType dtype, float? p)"
    " -> Tensor",
    drawn,
    lambda seeds, shape, *_: seeds.new_empty([*seeds.shape, *shape], dtype=_[-2] if _[-1] is None else torch.bool),
    lambda *args: DRAW(*args),
)
OP = define_op(
    f"uniform({_SHAPED}) -> Tensor", _draw, lambda like, key, *_: like.new_empty(key.shape + like.shape), _draw
)
KEPT = define_op(
    f"kept({_SHAPED}, float p) -> Tensor",
    _draw,
    lambda like, key, *_: like.new_empty(key.shape + like.shape, dtype=torch.bool),
    _draw,
)
torch.library.register_vmap("fp::uniform", partial(_vmap, OP))
torch.library.register_vmap("fp::kept", partial(_vmap, KEPT))
torch.library.register_vmap("fp::draw", _vmap_of_seeds)


# --- The product of dropout, which is its own transpose ---


class _Context(_torch.FunctionContext):
    scale: float


@_torch.without_zeros
class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:
        product: torch.Tensor = _PRODUCT(x, kept, scale)
        return product

    @staticmethod
    def setup_context(ctx: _Context, inputs: tuple[torch.Tensor, torch.Tensor, float], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.scale = inputs[2]

    @staticmethod
    def backward(ctx: _Context, cotangent: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _scaled(cotangent, ctx.saved_tensors[0], ctx.scale), None, None


_apply_scaled: Callable[..., torch.Tensor] = _Scaled.apply
_PRODUCT = torch.ops.aten.native_dropout_backward.default
register_differentiable(_PRODUCT, _scaled)
