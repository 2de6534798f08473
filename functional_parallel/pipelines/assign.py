"""Assignment of ops to stages: forward ops by the cut, backward ops by their forward op."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ..ir import Aval, Traced, first_operand, info, operands_of
from ..program import view_base
from .roles import OpRole, OpRoles


def assign_stages(traced: Traced, roles: OpRoles, cut: Mapping[fx.Node, int], last: int) -> dict[fx.Node, int]:
    """Assign a stage to every staged op, in a forward at least the stage in `cut`, and after its operands."""
    stage: dict[fx.Node, int] = {}
    for node in traced.nodes:
        if roles.of[node] is not OpRole.STAGED:
            continue
        if node not in roles.backward:
            stage[node] = max([cut[node], *(stage[each] for each in operands_of(node) if each in stage)])
        elif info(node).recomputed and _forward(node) in stage:
            stage[node] = stage[_forward(node)]
            _keep_what_crosses(node, stage)
        else:
            stage[node] = _of_backward(node, roles, stage, last)
            _keep_what_crosses(node, stage)
    _view_where_used(traced, roles, stage)
    return stage


def _of_backward(node: fx.Node, roles: OpRoles, stage: dict[fx.Node, int], last: int) -> int:
    operands = [each for each in operands_of(node) if each in stage]
    found = [stage[each] for each in operands if each in roles.backward and not info(each).recomputed]
    forward = _forward(node)
    if forward in stage:
        found.append(stage[forward])
    if found:
        return min(found)
    return max((stage[each] for each in operands), default=last)


def _view_where_used(traced: Traced, roles: OpRoles, stage: dict[fx.Node, int]) -> None:
    """Move views to the stages that use them. The base is sent once, instead of every view of it."""
    kept = {*traced.outputs, *map(first_operand, roles.totals)}
    for node in reversed(list(traced.nodes)):
        if node not in stage or node in kept or info(node).recomputed or not _is_whole_view(node):
            continue
        users = [stage[user] for user in node.users if user in stage]
        nearest = (max if node in roles.backward else min)(users, default=stage[node])
        if len(users) == len(node.users) and nearest != stage[node]:
            stage[node] = nearest


def _is_whole_view(node: fx.Node) -> bool:
    base = view_base(node)
    if base is None or not isinstance(info(base).val, Aval) or not isinstance(info(node).val, Aval):
        return False
    return info(base).aval.nbytes <= info(node).aval.nbytes


def _forward(node: fx.Node) -> fx.Node | None:
    forward = info(node).forward_node
    while forward is not None and info(forward).replaced_by is not None:
        forward = info(forward).replaced_by
    return forward


def _keep_what_crosses(node: fx.Node, stage: dict[fx.Node, int]) -> None:
    """Replace recomputed operands of other stages by the forward value. A stage recomputes only its own values."""
    for operand in operands_of(node):
        forward = _forward(operand)
        if info(operand).recomputed and operand in stage and stage[operand] != stage[node] and forward in stage:
            node.replace_input_with(operand, forward)
