"""Every op of torch, on the samples that torch tests it with: however its operands lie, its numbers are torch's.

Or an error says why not. Of each operand that a sample has a dim is split, or it lies as partial sums, or it is whole.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.errors import RandomKeyError, TracingError
from sharding_specs import Mesh, P

with pytest.MonkeyPatch.context() as patch:  # the import forbids all later tests to set torch's flags
    patch.setattr(torch.backends, "disable_global_flags", lambda: None)
    from torch.testing._internal.common_methods_invocations import op_db

MESH = Mesh(axis=2)
MOST_ELEMENTS = 20_000  # of an operand
DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128)
FEW, MANY = (1, 2), (4, 4)  # samples of an op, and ways in which each lies

OPS = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db if not op.name.startswith("torch.ops.aten.")}

#: what torch does not define: contents of new memory, the shape of no statistics
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

#: what torch does not differentiate in complex numbers: writes into a slice
NOT_COMPLEX = {"nn.functional.pad.circular", "zero_"}

#: what torch differentiates wrongly: no gradient reaches the elements that stay
WRONG_GRADIENTS = {"as_strided_scatter"}

#: what a trace refuses, of some samples at least
REFUSED = {
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial"),  # draw from torch's generators
    *("normal", "normal.in_place", "normal.number_mean", "pca_lowrank", "rand_like", "randint", "randint_like"),
    *("randn", "randn_like", "svd_lowrank", "uniform", "nn.functional.rrelu"),
    *("nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d"),
    *("nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d"),
    *("nn.functional.feature_alpha_dropout.with_train", "nn.functional.scaled_dot_product_attention"),
    *("allclose", "argwhere", "bincount", "combinations", "cov", "equal", "item", "masked_select"),  # read values
    *("__getitem__", "index_put", "istft", "index_reduce.prod", "linalg.lstsq", "linalg.lstsq.grad_oriented", "narrow"),
    *("nn.functional.ctc_loss", "nn.functional.one_hot", "nonzero", "repeat_interleave", "scatter_reduce.prod"),
    *("tensor_split", "unique", "unique_consecutive"),
    *("_batch_norm_with_update", "_native_batch_norm_legit", "nn.functional.embedding"),  # write where others look
    *("as_strided", "as_strided.partial_views", "as_strided_copy", "as_strided_scatter"),  # beside their operand
    *("resize_", "resize_as_"),  # change memory
    "nn.functional.embedding_bag",
    *("svd", "linalg.svd"),  # whose derivative in complex numbers asks whether a phase matters to what follows
}
if torch.__version__ < "2.12":  # of some samples they compare values there
    REFUSED |= {"nanquantile", "quantile"}


@pytest.mark.parametrize("name", sorted(OPS.keys() - UNDEFINED))
@pytest.mark.every(7)
def test_an_op_has_torchs_numbers_however_its_operands_lie(name: str) -> None:
    supported = [dtype for dtype in DTYPES if dtype in OPS[name].supported_dtypes("cpu")]
    for dtype in supported[:1]:
        check(name, dtype, *FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OPS.keys() - UNDEFINED))
def test_an_op_has_torchs_numbers_for_many_samples(name: str) -> None:
    for dtype in DTYPES[:-1] if name in NOT_COMPLEX else DTYPES:
        if dtype in OPS[name].supported_dtypes("cpu"):
            check(name, dtype, *MANY)


def check(name: str, dtype: torch.dtype, samples: int, ways: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's of its ops; and ops without a rule are computed whole, and say so
        for sample in chosen(OPS[name], dtype, samples):
            for lies in chosen_ways(operands(sample), ways):
                values, specs, f = laid(OPS[name], sample, lies)
                wanted = outcome(f, values)
                if wanted is None or not is_equal(wanted, outcome(f, values)):
                    break  # torch refuses its own sample, or draws
                compare(name, f, values, specs, wanted)


def compare(name: str, f: Callable[..., Any], values: list[torch.Tensor], specs: tuple[P, ...], wanted: Any) -> None:
    what = f"{name} of {[tuple(x.shape) for x in values]} as {specs}"
    found = traced(fp.partition(f, "axis", specs, parameters=None), values, name)
    if found is None:
        return
    assert is_equal(found, wanted), what
    moving = tuple(index for index, x in enumerate(values) if is_inexact(x))
    if not (moving and OPS[name].supports_autograd and has_derivative(wanted)) or name in WRONG_GRADIENTS:
        return

    def loss(*operands: torch.Tensor) -> torch.Tensor:
        return scalar(f(*operands))

    gradients = outcome(torch.func.grad(loss, argnums=moving), values)
    if gradients is None:
        return
    found = traced(fp.grad(fp.partition(loss, "axis", specs, parameters=None), argnums=moving), values, name)
    assert found is None or is_equal(found, gradients), f"gradient of {what}"


def traced(f: Callable[..., Any], values: Sequence[torch.Tensor], name: str) -> Any:
    """What a compiled function gives; None where its trace refuses it."""
    try:
        return fp.compile(f, MESH)(*values)
    except (TracingError, RandomKeyError):
        if name not in REFUSED:
            raise
        return None


# -----------------------------------------------------------------------------
# Samples, and how they lie
# -----------------------------------------------------------------------------


def chosen(op: Any, dtype: torch.dtype, count: int) -> list[Any]:
    torch.manual_seed(0)
    fitting = [sample for sample in op.sample_inputs("cpu", dtype) if all(map(is_small, operands(sample)))]
    if "batch_norm" in op.name:  # of one dim there are no channels
        fitting = [sample for sample in fitting if sample.input.ndim > 1]
    return fitting[:: max(1, len(fitting) // count)][:count]


def is_small(x: torch.Tensor) -> bool:
    return x.numel() <= MOST_ELEMENTS and x.layout is torch.strided


def operands(sample: Any) -> list[torch.Tensor]:
    leaves = optree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def chosen_ways(values: Sequence[torch.Tensor], count: int) -> list[tuple[int | str | None, ...]]:
    """For each operand the dim that is split, "sums", or None."""
    drawn = random.Random(0)
    ways = [list(ways_of(x)) for x in values]
    if sum(map(len, ways)) <= 16:
        every = list(itertools.product(*ways))
        return drawn.sample(every, min(count, len(every)))
    return [tuple(drawn.choice(each) for each in ways) for _ in range(count)]


def ways_of(x: torch.Tensor) -> Iterator[int | str | None]:
    yield None
    yield from (dim for dim, size in enumerate(x.shape) if size and size % 2 == 0)
    if is_inexact(x):
        yield "sums"


def laid(
    op: Any, sample: Any, lies: Sequence[int | str | None]
) -> tuple[list[torch.Tensor], tuple[P, ...], Callable[..., Any]]:
    """An op's operands, how they lie, and a function of them."""
    leaves, tree = optree.tree_flatten((sample.input, sample.args, sample.kwargs))
    where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[index].detach().clone() for index in where]
    values = [
        torch.stack([summand(x), x - summand(x)]) if way == "sums" else x for x, way in zip(tensors, lies, strict=True)
    ]
    specs = (P() if way is None else P("axis") if way == "sums" else P(*[None] * int(way), "axis") for way in lies)

    def f(*operands: torch.Tensor) -> Any:
        filled = list(leaves)
        for index, x, way in zip(where, operands, lies, strict=True):
            filled[index] = x.sum(0) if way == "sums" else x
        input, args, kwargs = optree.tree_unflatten(tree, filled)
        return op(input, *args, **kwargs)

    return values, tuple(specs), f


def summand(x: torch.Tensor) -> torch.Tensor:
    """A tensor that is not in proportion to `x`: the summands x / 4 and 3 x / 4 would make an abs pass for linear."""
    return (torch.arange(x.numel(), dtype=torch.float64) * 3 + 1).cos().reshape(x.shape).to(x.dtype)


# -----------------------------------------------------------------------------
# Results
# -----------------------------------------------------------------------------


def outcome(f: Callable[..., Any], values: Sequence[torch.Tensor]) -> Any:
    try:
        return f(*values)
    except Exception:
        return None


def is_equal(found: Any, wanted: Any) -> bool:
    found, wanted = (list(map(dense, optree.tree_leaves(each))) for each in (found, wanted))
    return len(found) == len(wanted) and all(
        is_close(a, b) if is_inexact(b) else torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b
        for a, b in zip(found, wanted, strict=True)
    )


def dense(x: Any) -> Any:
    return x.to_dense() if isinstance(x, torch.Tensor) and x.layout is not torch.strided else x


def is_inexact(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def is_close(found: Any, wanted: Any) -> bool:
    try:
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7, equal_nan=True, check_stride=False)
    except AssertionError:
        return False
    return True


def has_derivative(results: Any) -> bool:
    return any(map(is_inexact, optree.tree_leaves(results)))


def scalar(results: Any) -> torch.Tensor:
    """A sum of all elements, each with a weight of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for x in optree.tree_leaves(results):
        if is_inexact(x):
            x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
            total = total + (x * torch.arange(x.numel(), dtype=torch.float64).cos().reshape(x.shape)).sum()
    return total
