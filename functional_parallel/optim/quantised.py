"""Optimizer state in 8 bits (Dettmers et al., arXiv 2110.02861), for any optimizer.

A block is a run of consecutive elements along the last dim of the full parameter, so it does not depend on the mesh. If
that dim is sharded, ranks that share a block agree on its scale by a pmax. A state therefore has the same bits on every
mesh, and is saved and restored like any other.

Signed square roots are quantised, not the values: second moments in a block differ by many orders of magnitude. A value
that is not zero does not become zero. Otherwise an update would be divided by ε alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.nn.functional import pad

from sharding_specs import P, broadcast_specs, whole_shape

from ..collectives import current_axes, pmax
from ..functions import PyTree, SpecTree, axis_mesh, explain_keywords, relayout_leaf
from ..ops import BlockFormat
from ..quantities import is_positive_int
from .by_path import ByPathState
from .optimizer import DelayedState, EMAState, Optimizer, is_declared_elementwise
from .sharded_sums import whole_along
from .state_trees import like_params, tree_map_params


class QuantisedMoment(NamedTuple):
    """A moment of a parameter, as integers and scales."""

    integers: Any  # int8, like the parameter
    scale: Any  # float32, one number per block of the last dim
    block: Any  # elements of a block; a number, to refuse a state with other blocks


@dataclass(frozen=True)
class _Held:
    """A quantised moment as a leaf of a tree."""

    moment: QuantisedMoment


@explain_keywords
def quantised(optimizer: Optimizer, form: str = "int8", *, block: int = 256, whole_below: int = 4096) -> Optimizer:
    """Return an optimizer that holds its moments in 8 bits between updates.

    A moment has one byte per element, and a float32 scale per block. The update itself is the update of `optimizer`,
    on dequantised moments. With s the root of the largest value of a block, divided by 127, an element x differs by at
    most s √x / 2 + s² after each update, for any sign and magnitude.

    >>> import torch, functional_parallel as fp
    >>> optimizer = fp.optim.quantised(fp.optim.adamw(0.1))
    >>> params = {"w": torch.ones(64, 256), "b": torch.ones(64)}
    >>> state = optimizer.init(params)
    >>> state.square["w"].integers.dtype, state.square["w"].scale.shape, state.square["b"].dtype
    (torch.int8, torch.Size([64, 1]), torch.float32)

    The state is sharded by every ZeRO stage with `layout="dims"`, saved and restored on other meshes, with the same
    bits. An axis that shards the last dim of a parameter has one pmax of the scales of its blocks per update.

    Args:
        optimizer: the optimizer: its moments are the tensors of its state with the shape of their parameter. With
            parameter groups it is `fp.optim.by_path(…)`, or one of its groups.
        form: the format, "int8".
        block: the number of elements per block.
        whole_below: parameters with fewer elements keep their moments as they are.

    Returns:
        An optimizer with the state of `optimizer`, where a moment is a `QuantisedMoment`.

    Raises:
        TypeError: if `optimizer` is not an optimizer.
        ValueError: if the format or a number is not supported, or `optimizer` neither is elementwise nor has `specs`.
            `init` raises it for `ema` and `delayed`: quantise the optimizer inside of them.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"quantised takes an fp.optim.Optimizer, not {optimizer!r}")
    if form != "int8":
        raise ValueError(f"quantised({form!r}): the format is 'int8'")
    if not is_positive_int(block) or (whole_below != 0 and not is_positive_int(whole_below)):
        raise ValueError(f"quantised(block={block!r}, whole_below={whole_below!r}): both are numbers of elements")
    if not (optimizer.specs or is_declared_elementwise(optimizer)):
        raise ValueError(
            f"quantised({optimizer!r}): an optimizer that is given shards declares elementwise=True, or has `specs`"
        )
    made = _Quantised(optimizer, BlockFormat(form, block), whole_below)
    update = made.update
    return optimizer._replace(
        init=made.init, update=lambda *args: update(*args), specs=made.specs, constants=None, elementwise=False
    )


@dataclass(frozen=True)
class _Quantised:
    inner: Optimizer
    form: BlockFormat
    whole_below: int

    def init(self, params: PyTree) -> PyTree:
        state = self.inner.init(params)
        nested = optree.tree_leaves(state, is_leaf=lambda x: isinstance(x, (EMAState, DelayedState)))
        if wrong := next((each for each in nested if isinstance(each, (EMAState, DelayedState))), None):
            name = "ema" if isinstance(wrong, EMAState) else "delayed"
            raise ValueError(f"quantised({name}(…)) would quantise more than moments: write {name}(quantised(…))")

        def one(leaf: PyTree, param: PyTree) -> PyTree:
            is_moment = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape == param.shape
            if not is_moment or not leaf.ndim or leaf.numel() < max(self.whole_below, 1):
                return leaf
            shape = (*leaf.shape[:-1], self.form.blocks(leaf.shape[-1]))
            empty = QuantisedMoment(
                torch.zeros_like(leaf, dtype=torch.int8), leaf.new_zeros(shape, dtype=torch.float32), self.form.block
            )
            return self._closed(leaf, _Held(empty), P())

        return tree_map_params(
            lambda moments: optree.tree_map(one, moments, params), state, optree.tree_structure(params)
        )

    def specs(self, params: PyTree, specs: SpecTree) -> SpecTree:
        state = self.init(params)
        plain = self.inner.init(params)
        placed = self.inner.specs(params, specs) if self.inner.specs else like_params(plain, params, specs)
        held, tree = optree.tree_flatten(state, is_leaf=_is_quantised)
        full = tree.flatten_up_to(broadcast_specs(placed, plain))
        rows = zip(held, full, strict=True)
        return tree.unflatten(
            [QuantisedMoment(p, whole_along(p, x.integers.ndim - 1), P()) if _is_quantised(x) else p for x, p in rows]
        )

    def update(self, grads: PyTree, state: PyTree, params: PyTree, specs: SpecTree = None) -> tuple[PyTree, PyTree]:
        if specs is None and current_axes():
            raise ValueError(
                f"quantised was given shards over {', '.join(current_axes())} without specs; blocks need to know which "
                "axes split which dim. Write optimizer.update(grads, state, params, specs)"
            )
        specs = broadcast_specs(P() if specs is None else specs, params)
        boxed = optree.tree_map(lambda x: _Held(x) if _is_quantised(x) else x, state, is_leaf=_is_quantised)
        by_leaf = is_declared_elementwise(self.inner) and not self.inner.specs
        change = self._by_leaf if by_leaf and not isinstance(state, ByPathState) else self._at_once
        return change(grads, boxed, params, specs)

    def _at_once(self, grads: PyTree, boxed: PyTree, params: PyTree, specs: SpecTree) -> tuple[PyTree, PyTree]:
        structure, further = optree.tree_structure(params), (specs,) if self.inner.specs else ()
        opened = tree_map_params(lambda x: optree.tree_map(self._opened, x, params, specs), boxed, structure)
        new, state = self.inner.update(grads, opened, params, *further)
        old = iter(_moments(boxed, structure))
        return new, tree_map_params(lambda x: optree.tree_map(self._closed, x, next(old), specs), state, structure)

    def _by_leaf(self, grads: PyTree, boxed: PyTree, params: PyTree, specs: SpecTree) -> tuple[PyTree, PyTree]:
        """Update each parameter apart, so that only its moments are dequantised at the same time."""
        structure, decide = optree.tree_structure(params), self.inner.constants
        columns = [structure.flatten_up_to(tree) for tree in (params, grads, specs)]
        constants = decide and structure.flatten_up_to(optree.tree_broadcast_prefix(decide(params), params))
        before = [structure.flatten_up_to(moment) for moment in _moments(boxed, structure)]
        leaves, moments, state = [], [], boxed
        for number, (param, grad, spec) in enumerate(zip(*columns, strict=True)):
            held = [moment[number] for moment in before]
            opened = iter([self._opened(x, param, spec) for x in held])
            own = tree_map_params(lambda _, opened=opened: [next(opened)], boxed, structure)  # type: ignore[misc]
            named = {} if constants is None else {"constants": [constants[number]]}
            (leaf,), state = self.inner.update([grad], own, [param], **named)
            leaves.append(leaf)
            new = [x for (x,) in _moments(state, _ONE)]
            moments.append([self._closed(x, old, spec) for x, old in zip(new, held, strict=True)])
        rows = iter([structure.unflatten(row) for row in zip(*moments, strict=True)])
        return structure.unflatten(leaves), tree_map_params(lambda _: next(rows), state, _ONE) if leaves else boxed

    def _opened(self, held: PyTree, param: Tensor, spec: P) -> PyTree:
        if not isinstance(held, _Held):
            return held
        if held.moment.block != self.form.block:
            raise ValueError(
                f"quantised(block={self.form.block}) was given a state with blocks of {held.moment.block} elements: "
                f"pass block={held.moment.block}"
            )
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        root = held.moment.integers.to(wide) * self._of_elements(held.moment.scale, param, spec)
        return (root * root.abs()).to(param.dtype)

    def _closed(self, new: PyTree, held: PyTree, spec: P) -> PyTree:
        """Quantise a moment if its old value is quantised."""
        if not isinstance(held, _Held):
            return new
        wide = new if new.dtype == torch.float64 else new.float()
        root, old = wide.abs().sqrt(), held.moment.scale
        axes = _axes_of_last(new, spec)
        if axes:
            ids = self._blocks_of_shard(new, spec).expand(new.shape)
            found = torch.zeros_like(old, dtype=root.dtype).scatter_reduce(-1, ids, root, "amax")
            scale = self.form.scale(pmax(found, axes))
        else:
            blocks = pad(root, (0, -root.shape[-1] % self.form.block)).unflatten(-1, (-1, self.form.block))
            scale = self.form.scale(blocks.amax(-1))
        integers = self.form.integers_of(root, self._of_elements(scale, new, spec))
        integers = torch.where(root > 0, integers.clamp(min=1), integers)
        return QuantisedMoment(integers * new.sign().to(torch.int8), scale, self.form.block)

    def _of_elements(self, scale: Tensor, x: Tensor, spec: P) -> Tensor:
        """Return the scale of each element of a tensor like `x`."""
        if _axes_of_last(x, spec):
            return scale.index_select(-1, self._blocks_of_shard(x, spec))
        each = scale.unsqueeze(-1).expand(*scale.shape, self.form.block)
        return each.flatten(-2)[..., : x.shape[-1]]

    def _blocks_of_shard(self, x: Tensor, spec: P) -> Tensor:
        """Return the number of the block of each element of a rank's shard of the last dim."""
        last = x.ndim - 1
        length = whole_shape(x.shape, spec, axis_mesh())[last]
        padded = {0: spec.padded[last]} if last in spec.padded else {}
        ids = torch.arange(length, device=x.device).div(self.form.block, rounding_mode="floor")
        found: Tensor = relayout_leaf(ids, P(), P(spec.dims[last], padded=padded))
        return found


_ONE = optree.tree_structure([0])


def _axes_of_last(x: Tensor, spec: P) -> tuple[str, ...]:
    return spec.dim_axes()[-1] if len(spec.dims) == x.ndim else ()


def _moments(state: PyTree, structure: optree.PyTreeSpec) -> list[PyTree]:
    """Return the subtrees of a state that are like the parameters."""
    found: list[PyTree] = []
    tree_map_params(lambda x: found.append(x) or x, state, structure)  # type: ignore[func-returns-value]
    return found


def _is_quantised(x: PyTree) -> bool:
    return isinstance(x, QuantisedMoment)
