"""Checks of a loaded checkpoint: a saved optimizer state must belong to the saved parameters.

Without the check, a kernel could write out of bounds, because it trusts the shapes of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import optree
import torch

from .. import optim
from ..functions import PyTree
from ..ir import is_trained, leaf_signature, refuse_abstract, without_memory
from ..requests import BufferState, LossScaleState, MasterState, ReplicaState, ScaledState
from ..stateful import listed, structure_as_text
from .local_step import Metrics

T = TypeVar("T")

# Tuples of tensors in the result of train.whole, which torch.load(weights_only=True), its default, may construct.
_STATES = [each for each in vars(optim).values() if isinstance(each, type) and issubclass(each, tuple)]
_OWN = (BufferState, LossScaleState, MasterState, ReplicaState, ScaledState, Metrics)
torch.serialization.add_safe_globals([*_STATES, *_OWN])


def expected_state(init: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
    """Return the state that an optimizer keeps for parameters, without memory."""
    return init(optree.tree_map(without_memory, params))


def require_state_of(expected: PyTree, given: PyTree) -> None:
    """Check that a state belongs to these parameters and this optimizer. Its state for them is `expected`."""
    problems = list(_differences(expected, given))
    if not problems:
        return
    lines = "\n  ".join(listed(problems))
    raise ValueError(
        f"train_step.load: this optimizer state ({type(given).__name__}) does not belong to these parameters under "
        f"this step's optimizer (which keeps {type(expected).__name__}):\n  {lines}\n"
        "Load both trees of one `train.whole(state)`, made with the same parameters and optimizer; for other "
        "parameters begin with `train.init(params)`"
    )


def require_parameters(params: PyTree, where: str) -> None:
    """Check that parameters are a pytree of tensors with values. Leaves of other kinds would be constants."""
    refuse_abstract(params, where)
    leaves = optree.tree_leaves(params)
    if leaves and not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
        raise TypeError(
            f"{where} takes parameters, a pytree of tensors, and found {kinds}: of a module, "
            "`fn, params = fp.functional(module)` makes them; torch.as_tensor(array) makes one of an array"
        )


def require_values(params: PyTree, state: PyTree) -> None:
    """Check that no leaf is on the meta device, where steps would compute nothing."""
    found = [*_by_path(params, "params").items(), *_by_path(state).items()]
    missing = [path for path, leaf in found if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta"]
    if missing:
        told = ", ".join(listed(missing))
        raise ValueError(
            f"a train state has values, and {told} are on the meta device, which has none: make parameters, and call "
            "train.init, outside of torch.device('meta'); train.lower(params, batch) takes parameters without values"
        )


def steps_done(step: int | torch.Tensor | None) -> int:
    """Return the number of completed steps as an int. A checkpoint may store it as a tensor."""
    whole = isinstance(step, int) or (isinstance(step, torch.Tensor) and step.ndim == 0 and not is_trained(step))
    if step is None or not whole or isinstance(step, bool) or step < 0:
        raise ValueError(
            f"train_step.load(step={step!r}): give the number of steps done, `state.step` of what was saved"
        )
    return int(step)


def _differences(expected: PyTree, given: PyTree) -> Iterator[str]:
    wanted, found = _by_path(expected), _by_path(given)
    for path, leaf in wanted.items():
        if path not in found:
            yield f"{path}: missing; the optimizer keeps {_kind(leaf)}"
        elif _kind(found[path]) != _kind(leaf):
            yield f"{path}: {_kind(found[path])}; the optimizer keeps {_kind(leaf)}"
    yield from (f"{path}: the optimizer keeps nothing of this name" for path in found if path not in wanted)
    trees = [optree.tree_structure(tree) for tree in (expected, given)]
    if wanted.keys() == found.keys() and trees[0] != trees[1]:
        yield f"the optimizer keeps {structure_as_text(trees[0])}, not {structure_as_text(trees[1])}"


def _by_path(tree: PyTree, name: str = "optimizer_state") -> dict[str, Any]:
    """Return the leaves by the Python expression that accesses them."""
    paths = (accessor.codify(name) for accessor in optree.tree_accessors(tree))
    return dict(zip(paths, optree.tree_leaves(tree), strict=True))


def _kind(leaf: T) -> str:
    """Signature of a tensor, type of any other leaf, because numbers change from step to step."""
    return str(leaf_signature(leaf)) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
