"""Check that two local programs agree on every rank, in types, values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import optree
import torch

from sharding_specs import Mesh, register_dataclasses

from ..checker import type_of
from ..collectives import State, Type
from ..errors import NotEquivalentError
from ..functions import PyTree, SpecTree, grad
from ..lowering import UNCHECKED, lower
from ..program import Program
from ..runtime import SimulatedRuntime
from .compare import compare


def assert_same(
    f: Callable[..., PyTree],
    g: Callable[..., PyTree],
    mesh: Mesh,
    in_specs: tuple[SpecTree, ...],
    args: tuple[PyTree, ...],
    *,
    exact: bool = True,
) -> None:
    """Check that two local functions agree: in the types of their results, the values on every rank, and gradients.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh, P
    >>> fp.testing.assert_same(
    ...     lambda x: fp.all_gather(fp.psum_scatter(x, "i"), "i", to="invariant"),
    ...     lambda x: fp.psum(x, "i"),
    ...     Mesh(i=2), (P("i"),), (torch.arange(8.0),))

    Args:
        f, g: functions on shards that write their collectives by hand.
        mesh: the mesh.
        in_specs: a spec, or pytree prefix of specs, per argument.
        args: full arguments; gradients of the floating results are taken with respect to their floating leaves.
        exact: whether every bit counts.

    Raises:
        NotEquivalentError: for a difference, with a description and its rank.
    """
    register_dataclasses(args)
    values = [_on_every_rank(h, mesh, in_specs, args) for h in (f, g)]
    if values[0][1] != values[1][1]:
        raise NotEquivalentError(f"types of the results differ: {values[0][1]} and {values[1][1]}")
    for rank in mesh.ranks:
        compare(values[0][0][rank], values[1][0][rank], f"results on rank {rank}", exact=exact)
    if not (_is_floating(args) and _is_floating(values[0][0])):
        return  # integers have no gradients
    gradients = [_on_every_rank(_gradient(h, len(args)), mesh, in_specs, args) for h in (f, g)]
    for rank in mesh.ranks:
        compare(gradients[0][0][rank], gradients[1][0][rank], f"gradients on rank {rank}", exact=exact)


def _on_every_rank(
    f: Callable[..., PyTree], mesh: Mesh, in_specs: tuple[SpecTree, ...], args: tuple[PyTree, ...]
) -> tuple[list[list[torch.Tensor]], list[Type]]:
    lowered = lower(f, mesh, args, (in_specs, UNCHECKED), name=getattr(f, "__name__", "f"))
    runtime = SimulatedRuntime(mesh, deduplicate=False)
    tensors = [leaf for leaf in optree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    program = lowered.program
    assert isinstance(program, Program)
    handles = [runtime.shard(x, spec) for x, spec in zip(tensors, program.in_specs, strict=True)]
    results = runtime.run(program, handles)
    by_rank = [[handle[rank] for handle in results] for rank in mesh.ranks]
    alone = [axis for axis in mesh.axis_names if mesh.axis_size(axis) == 1]  # there all states are equivalent
    return by_rank, [type_of(output).having(alone, State.INVARIANT) for output in program.traced.outputs]


def _is_floating(tree: PyTree) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in optree.tree_leaves(tree))


def _gradient(f: Callable[..., PyTree], count: int) -> Callable[..., PyTree]:
    def weighted(*args: PyTree) -> torch.Tensor:
        leaves = [leaf for leaf in optree.tree_leaves(f(*args)) if isinstance(leaf, torch.Tensor)]
        total = None
        for number, leaf in enumerate(leaf for leaf in leaves if leaf.is_floating_point()):
            positions = torch.arange(leaf.numel(), dtype=leaf.dtype, device=leaf.device)
            term = (leaf * (positions % 5 + number + 1).reshape(leaf.shape)).sum()
            total = term if total is None else total + term
        assert total is not None, "a gradient needs a floating result"
        return total

    return grad(weighted, argnums=tuple(range(count)))
