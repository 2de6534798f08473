"""Run the collectives of values of the host on the device, such as an optimizer's sums over ranks."""

from __future__ import annotations

from dataclasses import replace

from ..collectives import COMMUNICATING
from ..ir import Traced, change_call, collective_call, info, update_info
from ..ops import TO_MEMORY
from ..program import memories_of


def run_on_device(traced: Traced) -> None:
    """Move the operand of each collective of the host to the device, and the result back."""
    memories = memories_of(traced)
    devices = (info(node).aval.device for node in traced.inputs)
    device = next((each for each in devices if each.type != "cpu"), None)
    for node in list(traced.nodes):
        call = collective_call(node, *COMMUNICATING)
        if call is None or call.operand is None or memories[call.operand] == "device":
            continue
        operand, host = call.operand, info(node).aval.device
        there = host if device is None else device
        with traced.graph.inserting_before(node):
            known = info(operand)._replace(val=replace(info(operand).aval, device=there), source=info(node).source)
            moved = traced.call(TO_MEMORY, (operand, "device"), known, {"device": there})
        with traced.graph.inserting_after(node):
            back = traced.call(TO_MEMORY, (node, "host"), info(node), {"device": host})
        traced.redirect(node, back)
        memories[back] = "host"  # and may be the operand of the next collective
        change_call(node, operand=moved)
        update_info(node, val=replace(info(node).aval, device=there))
