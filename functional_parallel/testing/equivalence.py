"""Check that a plan does not change the values and gradients that a function computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass
from functools import partial

import optree
import torch
from torch import fx

from sharding_specs import Mesh, tree_paths

from .. import _torch
from ..compile import Compiled, compile
from ..errors import NotEquivalentError
from ..functions import PyTree, grad_and_value
from ..ir import Aval, as_real, info, is_trained, operands_of, reached
from ..program import Program
from .compare import compare, tolerance_of
from .drawn import drawn_arguments
from .intermediate import first_differing_op, traced_leaves


def assert_equivalent(
    loss: Callable[..., PyTree],
    plan: Callable[..., PyTree],
    mesh: Mesh,
    params: PyTree,
    *batch: PyTree,
    exact: bool = False,
    rtol: float | None = None,
    draw: bool = True,
) -> Compiled:
    """Check that a function has the same values and gradients under a plan as without it.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh, tree_paths
    >>> step = fp.testing.assert_equivalent(
    ...     lambda w, x: (x @ w).relu().sum(), fp.data_parallel("data"), Mesh(data=2), torch.ones(3), torch.ones(4, 3),
    ...     exact=True)
    >>> step.program.counts()
    {('psum', ('data',)): 2}

    The results may be any pytree. Gradients are of the result itself if it is a scalar, else of the sum of all
    floating results with drawn weights.

    The check runs at the given arguments, and again at drawn ones of the same structure and shapes, in float64. A
    model's initial parameters hide errors: its norm scales are all ones. Floating leaves keep their signs and, if they
    are in it, the interval [0, 1]; with `exact` they keep their elements, in another order. Integers of the batch cover
    the vocabulary, and ignored labels, if all ops that use them are lookups or losses of classes. Other integers keep
    their elements, in another order. A draw is not used if the function itself fails there or is not finite.

    Args:
        loss: a function of parameters and batch.
        plan: a transform or a chain.
        mesh: the mesh.
        params, batch: full arguments.
        exact: whether every bit counts. Use it for functions closed on the integers, given integers in float64.
        rtol: largest difference allowed, relative to a leaf's largest value; by default it depends on the least precise
            dtype that the function computes the leaf in. A gradient of rounding errors alone may differ by the rounding
            of the largest gradient.
        draw: whether to check at drawn arguments as well. Turn it off if only the given ones are legal.

    Returns:
        The compiled gradient, with its program; the compiled function if it has no gradient.

    Raises:
        NotEquivalentError: for a difference. It names the first leaf that differs, and the first op with another value
            and its source line. Or it reports that two calls of `loss` return different values.
    """
    args = (params, *batch)
    check = _Check(loss, plan, mesh, args, exact, rtol)
    check.compare_with(check.plain(args), args)
    if draw:
        _check_drawn(check, args)
        check.step.lower(*args)  # `step.program` is then the program of the given arguments
    return check.step


def _check_drawn(check: _Check, args: tuple[PyTree, ...]) -> None:
    failed = "the function is not finite there"
    for drawn in drawn_arguments(check.loss, args, exact=check.exact):
        try:
            wanted = check.plain(drawn)
        except Exception as error:
            failed = f"the function raises {type(error).__name__} there: {error}"
            continue
        if _is_finite(wanted):
            check.compare_with(wanted, drawn, is_drawn=True)
            return
    warnings.warn(
        f"assert_equivalent checked the given arguments alone, no drawn arguments: {failed}. Write draw=False if only "
        "the given arguments are legal",
        stacklevel=3,
    )


@dataclass
class _Check:
    loss: Callable[..., PyTree]
    plan: Callable[..., PyTree]
    mesh: Mesh
    args: InitVar[tuple[PyTree, ...]]
    exact: bool
    rtol: float | None

    def __post_init__(self, args: tuple[PyTree, ...]) -> None:
        self._plain: Callable[..., PyTree] = self.loss
        self._named: Callable[[PyTree], dict[str, PyTree]]
        self.step = self._compiled(args)

    def plain(self, args: tuple[PyTree, ...]) -> dict[str, PyTree]:
        with _without_checkpoints():  # torch's do not work under torch.func
            return self._named(optree.tree_map(_dense, self._plain(*args)))

    def compare_with(self, wanted: dict[str, PyTree], args: tuple[PyTree, ...], is_drawn: bool = False) -> None:
        found = self._named(self.step(*args))
        where = f"{self.plan!r} on {self.mesh!r}{' at drawn arguments (not with draw=False)' if is_drawn else ''}"
        for name, right in wanted.items():
            try:
                self._compare(name, found[name], right, args, where, is_drawn)
            except NotEquivalentError as error:
                why = self._unlike_before(wanted["value"], args)
                why = why or first_differing_op(
                    self.loss, self.plan, self.mesh, args, name, exact=self.exact, rtol=self.rtol
                )
                raise NotEquivalentError(f"{error}{why}") from None

    # --- the kind of function ---

    def _compiled(self, args: tuple[PyTree, ...]) -> Compiled:
        with _without_checkpoints():
            results = self.loss(*args)
        has_gradient = _has_inexact(results) and _has_inexact(args[0])
        if isinstance(results, torch.Tensor) and not results.ndim and has_gradient:
            self._named = lambda returned: {"value": returned[1], "gradient": returned[0]}
            self._plain, planned = grad_and_value(self.loss), grad_and_value(self.plan(self.loss))
        elif has_gradient:
            self._named = lambda returned: {"value": returned[1][1], "gradient": returned[0]}
            weighted = _weighted(self.loss, results)
            self._plain = grad_and_value(weighted, has_aux=True)
            planned = grad_and_value(self.plan(weighted), has_aux=True)
        else:
            self._named = lambda returned: {"value": returned}
            planned = self.plan(self.loss)
        return compile(planned, self.mesh)

    def _unlike_before(self, first: PyTree, args: tuple[PyTree, ...]) -> str:
        paths = tree_paths(first)
        with _without_checkpoints():
            again = self.loss(*args)
        for path, a, b in zip(paths, optree.tree_leaves(first), optree.tree_leaves(again), strict=True):
            if isinstance(a, torch.Tensor) and not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
                at = tuple(int(i) for i in (a != b).nonzero()[0])
                return (
                    f"\nWithout a plan it returned {a[at].item()!r} first and {b[at].item()!r} in a second call with "
                    f"the same arguments{f', at {at} of leaf {path!r}' if at else ''}: it draws numbers, counts its "
                    "calls or writes into a tensor. A plan needs a pure function"
                )
        return ""

    def _compare(
        self, name: str, found: PyTree, wanted: PyTree, args: tuple[PyTree, ...], where: str, is_drawn: bool
    ) -> None:
        what = f"{name} under {where}"
        try:
            compare(found, wanted, what, exact=self.exact, rtol=self.rtol)
        except NotEquivalentError:
            if self.exact or self.rtol is not None:
                raise
            compare(found, wanted, what, rtol=self._tolerances(name, wanted, args, is_drawn))

    def _tolerances(self, name: str, wanted: PyTree, args: tuple[PyTree, ...], is_drawn: bool) -> list[float]:
        traced, leaves = traced_leaves(self.loss, args), optree.tree_leaves(wanted)
        program = self.step.program if is_drawn else None  # drawn arguments are more precise than a plan may want
        planned = program.traced.nodes if isinstance(program, Program) else []
        ways = [[output] if isinstance(output, fx.Node) else [] for output in traced.outputs]
        if name == "gradient":  # which depends on every result
            ways = [[output for each in ways for output in each]] * len(leaves)
        reaching = ([*reached(way, operands_of), *planned] for way in ways)
        return [tolerance_of(_narrowest(nodes, leaf)) for nodes, leaf in zip(reaching, leaves, strict=True)]


def _weighted(loss: Callable[..., PyTree], results: PyTree) -> Callable[..., PyTree]:
    draw = partial(torch.randint, -4, 5, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    weights = [
        draw(as_real(leaf).shape).to(as_real(leaf)) if is_trained(leaf) else None
        for leaf in optree.tree_leaves(results)
    ]

    def weighted(*args: PyTree) -> tuple[torch.Tensor, PyTree]:
        found = loss(*args)
        terms = [
            (as_real(leaf) * weight).sum()
            for leaf, weight in zip(optree.tree_leaves(found), weights, strict=True)
            if weight is not None
        ]
        total: torch.Tensor = sum(terms[1:], start=terms[0])
        return total, found

    return weighted


def _narrowest(nodes: Iterable[fx.Node], leaf: PyTree) -> torch.dtype:
    avals = [aval for node in nodes for aval in optree.tree_leaves(info(node).val)]
    types = {each.dtype for each in (*avals, leaf) if isinstance(each, (Aval, torch.Tensor))}
    floating = (dtype for dtype in types if dtype.is_floating_point)
    return max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def _dense(leaf: PyTree) -> PyTree:
    """Return a gradient without the sparse layout that torch gives gradients of a sparse embedding."""
    return leaf.to_dense() if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided else leaf


def _without_checkpoints() -> AbstractContextManager[None]:
    return _torch.checkpointing(lambda name: nullcontext())


def _has_inexact(tree: PyTree) -> bool:
    return any(map(is_trained, optree.tree_leaves(tree)))


def _is_finite(tree: PyTree) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in optree.tree_leaves(tree) if is_trained(leaf))
