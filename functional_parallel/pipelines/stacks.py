"""Stacked layer parameters, `P("pipe", …)`: one tensor in the user's tree, one parameter per layer in a pipeline.

A pipeline stores each layer on the rank of its stage, so its layers are separate parameters. In the user's tree they
are one tensor, and its first dim is the layer. The trees are converted at entry and exit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import optree
import torch

from sharding_specs import P, SpecError, broadcast_specs, tree_paths

from ..functions import STACK_DIM, Layout, LocalFunction, PyTree, Request, SpecTree
from ..ir import without_memory


class Stacks:
    """Converts between a tree with stacked layers and a tree with lists of layers.

    >>> stacks = Stacks("pipe", lambda tree: broadcast_specs(P("pipe"), tree))
    >>> tree = stacks.unstack({"w": torch.ones(3, 2)})
    >>> [tuple(layer.shape) for layer in tree["w"]], tuple(stacks.restack(tree)["w"].shape)
    ([(2,), (2,), (2,)], (3, 2))

    `find` maps parameters to their specs. A parameter is stacked if its spec names the pipeline's axis in dim 0.
    """

    def __init__(self, axis: str, find: Callable[[PyTree], SpecTree]) -> None:
        self.axis, self.find = axis, find
        self._known: dict[Any, tuple[Any, dict[int, int]]] = {}
        self.paths: dict[str, int] = {}  # path of each unstacked parameter → number of layers in its stack

    def unstack(self, params: PyTree) -> PyTree:
        """Return the tree with a list of layers for every stack."""
        leaves, tree = optree.tree_flatten(params)
        if tree in self._known:
            return params
        specs = optree.tree_leaves(self.find(params))
        lengths, new = {}, list(leaves)
        for index, (path, leaf, spec) in enumerate(zip(tree_paths(params), leaves, specs, strict=True)):
            if self._is_stacked(path, leaf, spec):
                lengths[index], new[index] = leaf.shape[0], list(leaf.unbind(0))
                self.paths.update({f"{path}/{layer}": leaf.shape[0] for layer in range(leaf.shape[0])})
        made = tree.unflatten(new)
        self._known[optree.tree_structure(made)] = (tree, lengths)
        return made

    def _is_stacked(self, path: str, leaf: PyTree, spec: P) -> bool:
        if self.axis not in spec.axes or not isinstance(leaf, torch.Tensor):
            return False
        if spec.dims[0] != (self.axis,):
            raise SpecError(
                f"{path}: {spec!r} does not cut dim 0, and nothing else of it, along {self.axis!r}; a "
                "pipeline's axis cuts the first dim of a stack of layers"
            )
        return True

    def restack(self, params: PyTree, join: Callable[[list[Any]], Any] | None = None) -> PyTree:
        """Return the tree with its stacks as tensors. `join` returns a stack of layers; by default a tensor."""
        known = self._known.get(optree.tree_structure(params))
        if known is None:
            return params
        tree, lengths = known
        rest = iter(optree.tree_leaves(params))
        leaves = []
        for index in range(tree.num_leaves):
            leaves.append(
                (join or _stack)([next(rest) for _ in range(lengths[index])]) if index in lengths else next(rest)
            )
        return tree.unflatten(leaves)

    def stacked_shapes(self, args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """Return arguments with the parameters, of either form, as stacks without memory."""
        like = optree.tree_map(without_memory, self.unstack(args[0]))
        return (self.restack(like), *args[1:])

    def restack_all(self, value: PyTree, join: Callable[[list[Any]], Any] | None = None) -> PyTree:
        """Restack every subtree of `value` with the structure of unstacked parameters."""
        restack = partial(self.restack, join=join)
        return optree.tree_map(restack, value, is_leaf=lambda x: optree.tree_structure(x) in self._known)

    def unstack_like(self, value: PyTree, params: PyTree) -> PyTree:
        """Unstack every subtree of `value` with the structure and shapes of the stacked parameters `params`.

        Leaves that are no tensors have any shape; a layer gets that of its stack.
        """
        _, lengths = self._known[optree.tree_structure(self.unstack(params))]
        leaves, structure = optree.tree_flatten(params)

        def is_like_them(x: PyTree) -> bool:
            return optree.tree_structure(x) == structure and all(
                not isinstance(mine, torch.Tensor) or mine.shape == getattr(leaf, "shape", None)
                for mine, leaf in zip(optree.tree_leaves(x), leaves, strict=True)
            )

        def split(x: PyTree) -> PyTree:
            if not is_like_them(x):
                return x
            parts = [
                _layers(leaf, lengths[i]) if i in lengths else leaf for i, leaf in enumerate(optree.tree_leaves(x))
            ]
            return structure.unflatten(parts)

        return optree.tree_map(split, value, is_leaf=is_like_them)

    def specs(self, specs: Callable[[tuple[PyTree, ...]], SpecTree]) -> Callable[[tuple[PyTree, ...]], SpecTree]:
        """Convert a function of the arguments, with stacked parameters, that returns specs of the parameters."""
        return lambda args: self.layer_specs(specs(self.stacked_shapes(args)), self.unstack(args[0]))

    def decision(self, decide: Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
        """Convert a function of the stacked parameters that returns a value for each of them."""
        return lambda params: self.per_layer(decide, self.unstack(params))

    def layer_specs(self, specs: SpecTree, params: PyTree) -> SpecTree:
        """Return specs of the unstacked tree from specs of the stacked tree. Layers are laid out like their stack."""
        tree, lengths = self._known[optree.tree_structure(params)]
        found = optree.tree_leaves(broadcast_specs(specs, tree.unflatten([0] * tree.num_leaves)))
        new = [[_of_layer(s)] * lengths[i] if i in lengths else s for i, s in enumerate(found)]
        return tree.unflatten(new)

    def per_layer(self, decide: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
        """Return the decision of `decide` for each unstacked parameter. A layer gets the decision for its stack."""
        tree, lengths = self._known[optree.tree_structure(params)]
        stacked = self.restack(optree.tree_map(without_memory, params))
        found = tree.flatten_up_to(optree.tree_broadcast_prefix(decide(stacked), stacked))
        return tree.unflatten([[one] * lengths[i] if i in lengths else one for i, one in enumerate(found)])

    def require_elementwise(
        self, optimizer: Any, params: PyTree, beyond: Callable[[PyTree, Callable[[Any], bool]], str | None]
    ) -> None:
        """Check that the optimizer does not need the full stack, if these unstacked parameters have one.

        `beyond` maps stacked parameters and a predicate for stacks to the reason that the update of a layer differs
        from its update in a stack, or None.
        """
        if not self._known[optree.tree_structure(params)][1]:
            return
        why = "it has `specs`, as that of adafactor, whose means go over a whole parameter"
        if getattr(optimizer, "specs", None) is None:
            stacked = self.restack(optree.tree_map(without_memory, params))
            found = beyond(stacked, lambda leaf: getattr(leaf, STACK_DIM, None) == 0)
            if found is None:
                return
            why = found
        raise ValueError(
            f"{next(iter(self.paths)).rpartition('/')[0] or 'the parameter'} is a stack of layers, each updated on the "
            f"rank of its stage, but this optimizer is not elementwise ({why}). Make every layer a parameter of its "
            "own, a list of them in place of the stack, and leave the stacks out of fp.pipeline's specs; or take an "
            "elementwise one such as fp.optim.adamw"
        )

    def first_state(self, init: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
        """Return the initial state of an optimizer for stacked parameters, with unstacked layers in separate memory."""
        state = self.unstack_like(init(params), params)
        return optree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state)


def unstacked(f: LocalFunction, stacks: Stacks) -> LocalFunction:
    """Convert a function of stacked parameters to a function of unstacked or stacked parameters."""
    inner = f.layout

    def arguments(args: tuple[PyTree, ...]) -> tuple[SpecTree, ...]:
        first, *rest = inner.arguments(stacks.stacked_shapes(args))
        return (stacks.layer_specs(first, stacks.unstack(args[0])), *rest)

    def call(params: PyTree, *rest: PyTree) -> tuple[PyTree, SpecTree]:
        value = f.run(stacks.restack(stacks.unstack(params)), *rest)
        return value, f.results

    requests = (*(each.for_layers(stacks) for each in inner.requests), StackedLayers(stacks))
    return LocalFunction(call, replace(inner, arguments=arguments, requests=requests), f.name)


@dataclass(frozen=True)
class StackedLayers(Request):
    """Request to hold the layers of stacked parameters separately."""

    stacks: Stacks

    def __str__(self) -> str:
        return f"stacks of layers held as layers, for {self.stacks.axis!r}"


def stacks_of(layout: Layout) -> Stacks | None:
    """Return the stacks of layers of a function; None if it has none."""
    request = layout.last(StackedLayers)
    return None if request is None else request.stacks


def _of_layer(spec: P) -> P:
    if spec.dims and spec.dims[0]:
        raise SpecError(
            f"{spec!r} cuts the first dim of a stack of layers, which a pipeline takes apart; give that transform the "
            "spec tree, so that it takes another dim"
        )
    padded = {dim - 1: size for dim, size in spec.padded.items()}
    return spec.replace(spec.dims[1:], padded=padded)


def _layers(leaf: PyTree, count: int) -> list[PyTree]:
    return list(leaf.unbind(0)) if isinstance(leaf, torch.Tensor) else [leaf] * count


def _stack(layers: list[PyTree]) -> PyTree:
    if layers and not isinstance(layers[0], torch.Tensor):
        return layers[0]
    if layers and all(isinstance(layer, torch.Tensor) and layer.device.type == "meta" for layer in layers):
        stack = layers[0].new_empty((len(layers), *layers[0].shape))
        setattr(stack, STACK_DIM, 0)
        return stack
    return torch.stack(layers)
