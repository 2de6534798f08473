"""`constrain(x, spec)`: a mark in model code that says how a value shall lie; the identity outside a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sharding_specs import Mesh, P, as_spec

from .collectives.axes import hidden_axes, mesh_axis_size
from .emit import differentiable

__all__ = ["OP", "constrain"]

_library = torch.library.Library("fp", "FRAGMENT")
_library.define("constrain(Tensor x, str[] axes, int[] dims, int[] outers) -> Tensor")


def constrain(x: torch.Tensor, spec: P | str) -> torch.Tensor:
    """Ask that a value lie as a spec says, on the axes that the spec names; outside a plan, return it unchanged.

    Sequence parallelism is one constraint per residual edge: `constrain(x, "batch time/tensor embed")` turns the psum
    before it into a psum_scatter, and what needs the whole sequence gathers it.

    >>> import torch, functional_parallel as fp
    >>> fp.constrain(torch.ones(2, 4), "batch time/tensor").shape
    torch.Size([2, 4])

    Args:
        x: any value of the model.
        spec: its placement; axes that no surrounding transform partitions are ignored.

    Raises:
        SpecError: when the spec does not fit the value.
    """
    spec = as_spec(spec)
    pending = {axis: mesh_axis_size(axis) for axis in hidden_axes() if axis in spec.axes}
    if not pending:
        return x
    sizes = {axis: mesh_axis_size(axis) for axis in spec.axes if axis in hidden_axes()}
    placements = spec.only(pending).placements(Mesh(sizes))
    return _Constrain.apply(
        x, [p.axis for p in placements], [p.dim for p in placements], [p.outer for p in placements]
    )


def constrain_rest(x: Any, axes: Sequence[str], dims: Sequence[int], outers: Sequence[int]) -> Any:
    """The same constraint, for the axes that outer transforms have still to partition."""
    rest = [index for index, axis in enumerate(axes) if axis in hidden_axes()]
    done = [index for index in range(len(axes)) if index not in rest]
    if not rest:
        return x

    def outer_of(index: int) -> int:
        outer = outers[index]
        for other in done:
            if dims[other] == dims[index] and outers[other] < outer:
                outer //= mesh_axis_size(axes[other])
        return outer

    return _Constrain.apply(x, [axes[i] for i in rest], [dims[i] for i in rest], [outer_of(i) for i in rest])


class _Constrain(torch.autograd.Function):
    """The identity in every derivative: gradients follow from the collectives that the constraint becomes."""

    @staticmethod
    def forward(x: Any, axes: Any, dims: Any, outers: Any) -> Any:
        return torch.ops.fp.constrain(x, axes, dims, outers)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return tangent.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        return cotangent, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Any, axes: Any, dims: Any, outers: Any) -> Any:
        moved = x.movedim(in_dims[0], -1)
        return _Constrain.apply(moved, axes, dims, outers), moved.ndim - 1


def _kernel(x: torch.Tensor, axes: Sequence[str], dims: Sequence[int], outers: Sequence[int]) -> torch.Tensor:
    return x.clone()


def _fake(x: torch.Tensor, axes: Sequence[str], dims: Sequence[int], outers: Sequence[int]) -> torch.Tensor:
    for dim in dims:
        if dim >= x.ndim:
            raise ValueError(f"constrain: the spec has more dims than the value, which has shape {tuple(x.shape)}")
    return torch.empty_like(x)


_library.impl("constrain", _kernel, "CompositeExplicitAutograd")
torch.library.register_fake("fp::constrain", _fake, lib=_library)
OP = torch.ops.fp.constrain.default
differentiable(OP, constrain_rest)
