"""Constants without values: tensors on the meta device that a traced function closes over, such as buffers of a module.

Values are needed only to run a program, so such a constant has shape, dtype and the device of the arguments in a trace.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .. import _torch
from ..ir import Traced, aval_of, update_info
from .record import recorder

_NAME, _LISTED = "_functional_parallel_name", 8


def stand_ins(constants: dict[str, torch.Tensor], device: torch.device, owner: str) -> dict[str, torch.Tensor]:
    """Return the tensors of the current trace for the constants on the meta device. Without a trace, refuse them."""
    found = {name: constant for name, constant in constants.items() if constant.is_meta}
    for name, constant in found.items():
        setattr(constant, _NAME, f"{owner}.{name}")
    if found and recorder() is None:
        raise ValueError(_refusal(found.values()))
    return {name: stand_in(constant, device) for name, constant in found.items()}


def stand_in(constant: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor of the current trace for a constant on the meta device; any other constant itself."""
    if not constant.is_meta:
        return constant
    recording = recorder()
    if recording is None:
        raise ValueError(_refusal([constant]))
    node = recording.node_of(constant)
    recording.traced.constants[str(node.target)] = constant  # itself, with its name
    with _torch.disable_functorch(), _torch.disable_modes(), recording.fake_mode:
        made = torch.empty(constant.shape, dtype=constant.dtype, device=device)
    recording.bind(made, node)
    update_info(node, val=aval_of(made))
    return made


def valueless(traced: Traced) -> str:
    """Return the refusal to run a function that uses constants without values; "" if it uses none."""
    used = [traced.constants[str(node.target)] for node in traced.graph.nodes if node.op == "get_attr"]
    found = [constant for constant in used if constant.is_meta]
    return _refusal(found) if found else ""


def _refusal(constants: Iterable[torch.Tensor]) -> str:
    names = list(dict.fromkeys(getattr(each, _NAME, f"a constant of shape {tuple(each.shape)}") for each in constants))
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (
        f"{', '.join(names[:_LISTED])}{more} (buffers, or parameters that are not trained) are on the meta device, and "
        "have no values. Create the module on another device, create these where they are used, or pass buffers as "
        "arguments: fp.functional(module, buffers=True). Only lowering, as train.lower(params, batch), needs no values"
    )
