"""What is loaded: whether an optimizer's state that was saved belongs to the parameters beside it.

Kernels write wherever its shapes say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import optree
import torch

from .. import optim
from ..functions import PyTree
from ..ir import is_trained, without_memory
from ..transforms import LossScaleState
from .local_step import Metrics
from .signatures import leaf_signature, listed, signature_text, structure_as_text
from .update import ScaledState

__all__ = ["expected_state", "require_parameters", "require_state_of", "require_values", "steps_done"]

# Tuples of tensors: torch.load(weights_only=True), its default, may make them of what train.whole returned.
torch.serialization.add_safe_globals(
    [
        *(optim.AdafactorState, optim.AdamWState, optim.Factored, optim.LionState, optim.SGDState),
        *(LossScaleState, ScaledState, Metrics),
    ]
)


def expected_state(init: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
    """What an optimizer keeps for parameters, without memory for it.

    >>> from functional_parallel.optim import sgd
    >>> expected_state(sgd(0.1, momentum=0.9).init, {"w": torch.ones(2)}).velocity["w"].shape
    torch.Size([2])
    """
    return init(optree.tree_map(without_memory, params))


def require_state_of(expected: PyTree, given: PyTree) -> None:
    """Refuse a state of other parameters, or of another optimizer.

    Args:
        expected: a state like the one that the optimizer keeps for the parameters.
        given: the state to load.

    Raises:
        ValueError: listing what differs, by path.
    """
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
    """Refuse what holds parameters but is no pytree of tensors, which would be trained as a constant.

    Args:
        params: what was given as parameters.
        where: to whom.

    Raises:
        TypeError: for a module, an iterator, arrays.
    """
    leaves = optree.tree_leaves(params)
    if leaves and not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
        raise TypeError(
            f"{where} takes parameters, a pytree of tensors, and found {kinds}: of a module, "
            "`fn, params = fp.functional(module)` makes them; torch.as_tensor(array) makes one of an array"
        )


def require_values(params: PyTree, state: PyTree) -> None:
    """Refuse what lies on the meta device, where steps would compute nothing.

    Raises:
        ValueError: listing what does, by path.
    """
    found = [*_by_path(params, "params").items(), *_by_path(state).items()]
    missing = [path for path, leaf in found if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta"]
    if missing:
        told = ", ".join(listed(missing))
        raise ValueError(
            f"a train state has values, and {told} are on the meta device, which has none: make parameters, and call "
            "train.init, outside of torch.device('meta'); train.lower(params, batch) takes parameters without values"
        )


def steps_done(step: Any) -> int:
    """The number of steps done, which a file may have as a tensor.

    >>> steps_done(torch.tensor(3))
    3

    Raises:
        ValueError: when it is no such number.
    """
    whole = isinstance(step, int) or (isinstance(step, torch.Tensor) and step.ndim == 0 and not is_trained(step))
    if not whole or isinstance(step, bool) or step < 0:
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
    """Leaves by the expression that reaches them."""
    paths = (accessor.codify(name) for accessor in optree.tree_accessors(tree))
    return dict(zip(paths, optree.tree_leaves(tree), strict=True))


def _kind(leaf: Any) -> str:
    """What an optimizer keeps of a kind: numbers change from step to step."""
    return signature_text(leaf_signature(leaf)) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
