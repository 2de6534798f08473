"""Parameters without a path to the loss. They are not updated, with a warning. If there are no others, raise.

torch.optim skips a parameter if its gradient is None: no weight decay, no change of its state. A training step does the
same. The trace decides it, so it holds under every plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import optree
import torch

from sharding_specs import tree_paths

from ..errors import NothingToTrainError, NotTrainedWarning
from ..functions import PyTree, unused
from ..ir import current_source, is_trained, warn_at
from ..optim import tree_map_of_params
from ..tracing import ClosedOver, recorder

_LISTED = 8


def untrained(params: PyTree, gradients: PyTree) -> list[bool]:
    """For every leaf of the parameters, whether it should be trained and has no path to the loss."""
    leaves, tree = optree.tree_flatten(params)
    pairs = zip(leaves, tree.flatten_up_to(gradients), strict=True)
    return [is_trained(leaf) and gradient is not None and unused(leaf, gradient) for leaf, gradient in pairs]


def report_untrained(
    loss: str, params: PyTree, flags: Sequence[bool], frozen: Sequence[bool], warned: set[str]
) -> None:
    """Warn once of each parameter and closed-over tensor that a step does not train. Raise if it trains nothing."""
    paths = [f"`{path}`" if path else "the parameter" for path in tree_paths(params)]
    trained = [is_trained(leaf) and not fixed for leaf, fixed in zip(optree.tree_leaves(params), frozen, strict=True)]
    active = recorder()
    outside = [] if active is None else active.trainable_constants
    if any(trained) and list(flags) == trained:
        unused_paths = [path for path, flag in zip(paths, flags, strict=True) if flag]
        raise NothingToTrainError(_nothing(loss, unused_paths, outside))
    missing = [path for path, flag in zip(paths, flags, strict=True) if flag and path not in warned]
    if missing:
        warned.update(missing)
        warn_at(
            current_source(),
            f"train_step: no gradient reaches {_listed(missing)}: the loss `{loss}` does not use these parameters, or "
            "only where it has no derivative. They stay as they are, without weight decay, as in torch.optim. Remove "
            "them from the parameters, or use them in the loss",
            NotTrainedWarning,
        )
    found = [each for each in outside if str(each) not in warned]
    if found:
        warned.update(map(str, found))
        warn_at(found[0].source, f"train_step: the loss `{loss}` {_closes_over(found)}", NotTrainedWarning)


def _nothing(loss: str, paths: list[str], outside: list[ClosedOver]) -> str:
    what = f"train_step: no gradient reaches any of the parameters ({_listed(paths)}), so training would change nothing"
    if outside:
        return f"{what}. The loss `{loss}` {_closes_over(outside)}"
    return (
        f"{what}: the loss `{loss}` does not use them, or only detached or where they have no derivative; compute the "
        "loss from its first argument"
    )


def _closes_over(found: Sequence[ClosedOver]) -> str:
    listed = [f"  {each}" for each in found[:_LISTED]]
    listed += [f"  and {len(found) - _LISTED} more"] if len(found) > _LISTED else []
    return "\n".join(["closes over tensors that require gradients, and does not train them:", *listed, _WAY_OUT])


_WAY_OUT = (
    "Pass them with the parameters (fn, params = fp.functional(module) makes an argument of a module's parameters), or "
    "use .detach() or requires_grad_(False) on tensors that are to stay fixed"
)


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
    return ", ".join(paths[:_LISTED]) + more


# --- No update ---


def without(gradients: PyTree, flags: Sequence[bool]) -> PyTree:
    """Replace the gradients of untrained parameters by None, the gradient of leaves that are not floating-point."""
    if not any(flags):
        return gradients
    leaves, tree = optree.tree_flatten(gradients, none_is_leaf=True)
    return tree.unflatten([None if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)])


def zeros_for(gradients: PyTree, params: PyTree, frozen: Sequence[bool]) -> PyTree:
    """Return the gradients, with zeros for untrained parameters, which an update may read. Frozen ones have None."""
    leaves, tree = optree.tree_flatten(params)
    rows = zip(leaves, tree.flatten_up_to(gradients), frozen, strict=True)
    return tree.unflatten(
        [
            torch.zeros_like(leaf) if gradient is None and is_trained(leaf) and not fixed else gradient
            for leaf, gradient, fixed in rows
        ]
    )


def old_params(new: PyTree, old: PyTree, flags: Sequence[bool]) -> PyTree:
    """Return the new parameters, with the old values of untrained ones."""
    if not any(flags):
        return new
    leaves, tree = optree.tree_flatten(old)
    rows = zip(flags, leaves, tree.flatten_up_to(new), strict=True)
    return tree.unflatten([before if flag else after for flag, before, after in rows])


def old_weights(new: PyTree, old: PyTree, masks: PyTree) -> PyTree:
    """Return the new parameters of an update, with the old values of untrained ones; see `old_state` for the masks."""
    return optree.tree_map(_chosen, new, old, masks, old)


def old_state(new: PyTree, old: PyTree, params: PyTree, masks: PyTree) -> PyTree:
    """Return the new optimizer state, with the old values for untrained parameters.

    A mask is True for an untrained parameter, False for a trained one, or marks the untrained elements.
    """
    if not any(mask is not False for mask in optree.tree_leaves(masks)):
        return new
    return tree_map_of_params(_chosen, optree.tree_structure(params), new, old, masks, params)


def _chosen(new: PyTree, old: PyTree, mask: torch.Tensor | bool, param: torch.Tensor) -> PyTree:
    shape = getattr(new, "shape", None)
    if mask is False or (shape is not None and shape != getattr(param, "shape", None)):
        return new
    return old if mask is True else torch.where(mask, old, new)
