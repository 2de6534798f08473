"""Rows that a stage writes into a donated state, such as the keys and values of a token in a cache.

The state of a microbatch is a view of the state of the batch. If a stage writes into it in place, the new state is the
old one, and microbatches are not concatenated.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ..ir import first_operand, info
from ..passes import WRITES_IN_PLACE
from .roles import OpRole, OpRoles


def write_in_place(roles: OpRoles, stage: Mapping[fx.Node, int]) -> dict[fx.Node, fx.Node]:
    """Replace ops that write rows into a state by in-place ops. Return for each the input that it writes into.

    Each must be the only op that reads its input, so that no microbatch and no stage reads the old values.
    """
    found = {}
    for node, role in roles.of.items():
        state = first_operand(node) if node.target in WRITES_IN_PLACE and role is OpRole.STAGED else None
        if state is None or state.op != "placeholder" or state not in roles.varying or not info(state).donated:
            continue
        index, users = info(state).updated_output, [user for user in node.users if user.op == "call_function"]
        is_result = index is not None and roles.traced.outputs[index] is node and info(node).type == info(state).type
        is_here = bool(users) and all(stage.get(user) == stage[node] for user in users)
        if is_result and is_here and list(state.users) == [node] and roles.traced.outputs.count(node) == 1:
            node.target, found[node] = WRITES_IN_PLACE[node.target], state
    return found
