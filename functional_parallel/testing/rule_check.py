"""Check a sharding rule against its op: on shards and on partial sums, in values and in gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch

from sharding_specs import Mesh

from .. import _torch
from ..collectives import MICROBATCH, DimSplit
from ..compile import compile
from ..errors import FalseRuleError, NotEquivalentError, UncheckedRuleError
from ..functions import PyTree, grad_and_value
from ..ir import as_real, aval_of, differentiable_form, is_trained
from ..partitioner import partition
from ..program import Program
from ..runtime import SimulatedRuntime
from ..transforms import accumulate
from .compare import compare
from .rule_claims import SUMS, Case, cases_of, factors_of, name_of, spec_of
from .rule_samples import Sample, for_all, require_overload, sample_of

_AXIS = "axis"
_Named = dict[str, torch.Tensor]


def check_rule(
    op: Callable[..., PyTree],
    samples: Any,
    *,
    ranks: Sequence[int] = (2, 3),
    exact: bool = False,
    rtol: float | None = None,
) -> tuple[str, ...]:
    """Check every claim of an op's sharding rule against the op itself.

    >>> import torch, functional_parallel as fp
    >>> x = torch.arange(6.0)
    >>> claims = fp.testing.check_rule(torch.ops.aten.dot.default, [(x, x)])
    >>> claims[1], claims[2]
    ('factor k+ over 2 ranks', 'mark ~ of operand 0 over 2 ranks')

    For each sample, the partitioned op must equal the op in values and gradients. This is checked with every factor
    split, every operand sharded along each dim, and every operand given as partial sums. Factors are also split into
    unequal slices, as microbatches do. The ranks are simulated.

    Args:
        op: an overload with a rule, such as `torch.ops.mylib.scale_rows.default`.
        samples: tuples of arguments; pairs of such a tuple and a dict of keyword arguments; or a hypothesis strategy
            of either. Dims need sizes that are multiples of the ranks, 6 by default.
        ranks: sizes of the axis to try.
        exact: whether every bit counts; use it for integers in float64 and ops closed on them.
        rtol: the largest difference allowed, relative to the largest value; by default it depends on the dtype.

    Returns:
        The claims that were checked, as text.

    Raises:
        FalseRuleError: for a false claim. It names the rule, the factor or mark, the sample, and the first element
            that differs.
        UncheckedRuleError: if a factor that the rule allows to be split has no sample with a size that the ranks
            divide.
        TypeError, ValueError: if the op has no rule, or a sample does not call it.
    """
    require_overload(op)
    coverage = _Coverage(op, tuple(ranks))

    def check(number: int, sample: tuple[PyTree, ...]) -> None:
        _RuleCheck(sample_of(op, number, sample), coverage, exact, rtol).run()

    for_all(samples, check)
    coverage.require()
    return tuple(coverage.claims)


# --- The claims that have been checked ---


class _Coverage:
    def __init__(self, op: Callable[..., PyTree], ranks: tuple[int, ...]) -> None:
        self.op, self.ranks = op, ranks
        self.claims: dict[str, None] = {}
        self._samples = 0
        self._seen: dict[str, set[int]] = {}  # sizes of each factor, by its name in messages
        self._split: set[str] = set()

    def add_sample(self, sample: Sample) -> None:
        self._samples += 1
        if sample.rule is not None:
            for factor, size in factors_of(sample.rule, sample.avals).items():
                self._seen.setdefault(name_of(sample.rule, factor), set()).add(size)

    def add(self, case: Case, way: str, unequal: bool) -> None:
        self.claims[f"{case.claim} {way}"] = None
        if case.factor and not unequal:
            self._split.add(case.claim)

    def require(self) -> None:
        if not self._samples:
            raise ValueError(f"check_rule({self.op}): give at least one sample, a tuple of the op's arguments")
        for name, sizes in self._seen.items():
            if name not in self._split:
                raise UncheckedRuleError(
                    f"check_rule({self.op}): no sample can split {name}, with sizes {', '.join(map(str, sizes))}; "
                    f"give it a multiple of {' or '.join(map(str, self.ranks))}"
                )


# --- Running one sample ---


class _RuleCheck:
    def __init__(self, sample: Sample, coverage: _Coverage, exact: bool, rtol: float | None) -> None:
        self.sample, self.coverage, self.exact, self.rtol = sample, coverage, exact, rtol
        self.generator = torch.Generator().manual_seed(sample.number)
        results = sample.call(sample.values)
        self.weights = [self._drawn(result, 4) for result in results]
        self.has_gradient = _is_differentiable(sample, results)

    def run(self) -> None:
        self.coverage.add_sample(self.sample)
        for count in self.coverage.ranks:
            cases = cases_of(self.sample.rule, self.sample.avals, DimSplit.of(count))
            self._compare(cases, count, f"over {count} ranks")
        for case, count in self._unequal():
            self._compare([case], count, f"in {count} unequal slices", unequal=True)

    def _unequal(self) -> Iterator[tuple[Case, int]]:
        """Yield cases that split a factor into slices that differ by one sample, as microbatches may."""
        rule, avals = self.sample.rule, self.sample.avals
        for factor, size in ({} if rule is None else factors_of(rule, avals)).items():
            count = next((count for count in range(2, size) if size % count), None)
            if count is not None:
                cases = cases_of(rule, avals, DimSplit.of(count, size))
                yield from ((case, count) for case in cases if case.factor == factor)

    def _compare(self, cases: list[Case], count: int, way: str, unequal: bool = False) -> None:
        arguments = [self._arguments(case, count) for case in cases]
        wanted = self._gradient(self._function(cases))(arguments)
        try:
            found = self._partitioned(cases, arguments, count, unequal, wanted)
        except Exception as error:
            if len(cases) == 1:
                problem = f"{type(error).__name__}: {error}"
                raise self._false(cases[0], way, problem) from error
            for case in cases:
                self._compare([case], count, way, unequal)
            raise
        for case, mine, right in zip(cases, self._outcomes(found), self._outcomes(wanted), strict=True):
            self._compare_case(case, way, mine, right)
            self.coverage.add(case, way, unequal)
        for case, values in zip(cases, arguments, strict=True):
            if case.is_mark:
                self._compare_sums(case, way, values, count)

    def _compare_case(self, case: Case, way: str, found: _Named, wanted: _Named) -> None:
        for name, right in wanted.items():
            try:
                compare(found[name], right, name, exact=self.exact, rtol=self.rtol)
            except NotEquivalentError as error:
                raise self._false(case, way, str(error)) from None

    def _compare_sums(self, case: Case, way: str, values: list[torch.Tensor], count: int) -> None:
        """Compare the sum over ranks of the op itself, which a body on shards calls, with the op of the sums."""
        sums = [how == SUMS for how in case.layouts]
        each = [
            self.sample.call([x[rank] if is_sum else x for x, is_sum in zip(values, sums, strict=True)])
            for rank in range(count)
        ]
        wanted = self.sample.call([x.sum(0) if is_sum else x for x, is_sum in zip(values, sums, strict=True)])
        found = [torch.stack(parts).sum(0) for parts in zip(*each, strict=True)]
        self._compare_case(case, way, *({f"result {i}": x for i, x in enumerate(them)} for them in (found, wanted)))

    def _false(self, case: Case, way: str, problem: str) -> FalseRuleError:
        rule, op = self.sample.rule, self.sample.op
        text = "the rule" if rule is None else f"the rule {rule.text!r}"
        promise = f" promises that {case.promise}" if case.promise else ""
        layouts = str(case)
        where = f"With {layouts} {way}" if layouts else f"With replicated operands {way}"
        return FalseRuleError(
            f"{text} of {op} is false: {case.claim}{promise}. {where}, {self.sample}: {problem}. {case.fix}"
        )

    # --- arguments ---

    def _arguments(self, case: Case, count: int) -> list[torch.Tensor]:
        values = zip(self.sample.values, case.layouts, strict=True)
        return [self._summands(x, count) if layout == SUMS else x.detach().clone() for x, layout in values]

    def _summands(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """Return summands of `x` that are not multiples of each other: on those, abs would pass for linear."""
        size = max(1, round(as_real(x).abs().max().item())) if x.numel() and as_real(x).isfinite().all() else 1
        drawn = [_on_grid(self._drawn(x, size), size) for _ in range(count - 1)]
        return torch.stack([*drawn, _on_grid(x.detach(), size) - sum(drawn)])

    def _drawn(self, like: torch.Tensor, largest: int) -> torch.Tensor:
        """Draw integers if a tensor holds integers, so that sums are exact; else normal numbers."""
        real = as_real(like.detach())
        if not is_trained(like) or torch.equal(real, real.round()):
            return torch.randint(-largest, largest + 1, like.shape, generator=self.generator).to(like.dtype)
        return torch.randn(like.shape, generator=self.generator, dtype=like.dtype) * largest

    # --- the op on all layouts, and its gradients ---

    def _function(self, cases: list[Case]) -> Callable[..., PyTree]:
        def call(groups: list[list[torch.Tensor]]) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
            found = [
                self.sample.call([x.sum(0) if how == SUMS else x for x, how in zip(group, case.layouts, strict=True)])
                for case, group in zip(cases, groups, strict=True)
            ]
            return _weighted(found, self.weights), found

        return call

    def _gradient(self, f: Callable[..., PyTree], argument: int = 0) -> Callable[..., PyTree]:
        return grad_and_value(f, argument, has_aux=True) if self.has_gradient else f

    def _partitioned(
        self, cases: list[Case], arguments: list[list[torch.Tensor]], count: int, unequal: bool, like: PyTree
    ) -> PyTree:
        f = self._function(cases)
        axis = MICROBATCH if unequal else _AXIS
        specs = [[spec_of(layout, axis) for layout in case.layouts] for case in cases]
        if unequal:
            local = accumulate(count, batch=(specs,))(lambda unused, groups: f(groups))
            return _run(self._gradient(local, 1), Mesh(), (torch.zeros(()), arguments), like)
        local = partition(f, axis, (specs,), parameters=None)
        return _run(self._gradient(local), Mesh({axis: count}), (arguments,), like)

    def _outcomes(self, returned: PyTree) -> list[_Named]:
        gradients, (_, results) = returned if self.has_gradient else ([()] * len(returned[1]), returned)
        return [
            {f"result {i}": x for i, x in enumerate(found)}
            | {f"gradient of operand {i}": x for i, x in enumerate(group) if x is not None}
            for found, group in zip(results, gradients, strict=True)
        ]


def _on_grid(x: torch.Tensor, size: int) -> torch.Tensor:
    """Round to multiples of a power of two, so that a few summands of similar size have exact sums in any order."""
    if not is_trained(x):
        return x
    grid = 2.0 ** math.ceil(math.log2(size)) * max(torch.finfo(x.dtype).eps * 2**8, 2.0**-30)
    rounded = (as_real(x) / grid).round() * grid
    return torch.view_as_complex(rounded) if x.dtype.is_complex else rounded


def _weighted(found: list[list[torch.Tensor]], weights: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for results in found:
        for result, weight in zip(results, weights, strict=True):
            if is_trained(result):
                total = total + (as_real(result) * as_real(weight)).sum()
    return total


def _run(local: Callable[..., PyTree], mesh: Mesh, args: tuple[PyTree, ...], like: PyTree) -> PyTree:
    program = compile(local, mesh).lower(*args)
    assert isinstance(program, Program)
    tensors = [leaf for leaf in optree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    return optree.tree_structure(like).unflatten(SimulatedRuntime(mesh).run_whole(program, tensors))


def _is_differentiable(sample: Sample, results: Sequence[torch.Tensor]) -> bool:
    if not (any(x.is_differentiable for x in sample.avals) and any(aval_of(x).is_differentiable for x in results)):
        return False
    op = sample.op
    if differentiable_form(op) is None and isinstance(op, torch._ops.OpOverload) and not _torch.has_derivative(op):
        return False
    weights = [torch.ones_like(result) for result in results]
    try:
        grad_and_value(lambda values: _weighted([sample.call(values)], weights))(sample.values)
    except (RuntimeError, NotImplementedError):  # torch's errors for a sample without a gradient
        return False
    return True
