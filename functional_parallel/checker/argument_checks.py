"""Check the arguments of a call of a local function against its layout, which torch.func's transforms drop.

In a typed trace, a value has a type, and an argument of the traced function its spec. Under `fp.vmap(axis_name=…)`, a
value is mapped or not. In a trace that is typed only when it is rerun, the value gets a mark, which is checked then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import optree
import torch
from torch import fx
from torch.fx.node import Argument

from sharding_specs import P, tree_paths

from .. import _torch
from ..collectives import HOLDING, Lane, State, Type, current_axes, is_mapped, snapshot
from ..errors import ArgumentSpecError
from ..ir import current_source, info, operands_of, primitive_name, update_info
from ..ops import define_marker
from ..tracing import recorder

_V, _I, _U, _R, _O = State.VARYING, State.INVARIANT, State.UNREDUCED, State.REDUCED, State.OWNED


def type_of_spec(spec: P) -> Type:
    """Return the type of a value with this spec, such as {V:data, U:tensor} of P("data", unreduced={"tensor"})."""
    states = dict.fromkeys(sorted(spec.axes), _V)
    states.update(dict.fromkeys(sorted(spec.unreduced), _U))
    states.update(dict.fromkeys(sorted(spec.reduced), _R))
    states.update(dict.fromkeys(spec.owner, _O))
    return Type(states)


def record_input_specs(specs: Iterable[P | None]) -> None:
    active = recorder()
    assert active is not None
    for node, spec in zip(active.traced.inputs, specs, strict=True):
        update_info(node, spec=spec)


def check_arguments(
    function: object, axes: tuple[str, ...], specs: Iterable[P], args: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Check arguments against a function's layout. If types are inferred later, return them marked for a check."""
    bound = snapshot()
    if not axes or not args or any(axis not in bound or bound[axis].hidden for axis in axes):
        return args  # the collectives of the function raise the error
    leaves, tree = optree.tree_flatten(args)
    calls = [
        _Argument(leaf, spec.only(axes), path) for leaf, spec, path in zip(leaves, specs, tree_paths(args), strict=True)
    ]
    active = recorder()
    if active is not None and active.on_node is None:
        return tree.unflatten([each.marked(axes, str(function)) for each in calls])  # type: ignore[no-any-return]
    _refuse(function, [each.difference(axes) for each in calls])
    return args


class _Argument:
    def __init__(self, value: Argument, spec: P, path: str) -> None:
        self.value, self.spec, self.path = value, spec, path

    def marked(self, axes: Iterable[str], function: str) -> Argument:
        if not isinstance(self.value, torch.Tensor):
            return self.value
        wanted = type_of_spec(self.spec)
        states = [wanted[axis].value for axis in axes]
        return _Declared.apply(self.value, list(axes), states, self.path, repr(self.spec), function)

    def difference(self, axes: Sequence[str]) -> str | None:
        if not isinstance(self.value, torch.Tensor):
            return None
        wrong = _type_difference(self.value, axes, type_of_spec(self.spec), repr(self.spec))
        wrong = wrong or self._spec_difference(axes)
        return None if wrong is None else f"  {self.path}: {wrong}"

    def _spec_difference(self, axes: Sequence[str]) -> str | None:
        node = _node_of(self.value)
        held, mapped = (None, []) if node is None else _without_mapped(self.value, node)
        split = [axis for axis in mapped if axis in axes]
        if split:
            return (
                f"the dim that vmap maps is split over {split[0]!r}, so that each rank maps over samples of its "
                f"own, but {self.spec!r} is declared of one sample; leave the mapped dim whole"
            )
        if held is None or held.only(axes) == self.spec:
            return None
        return f"{self.spec!r} is declared, but it came in as {held.only(axes)!r}"


def known_spec(value: Any) -> P | None:
    node = _node_of(value) if isinstance(value, torch.Tensor) else None
    while node is not None and node.op == "call_function":
        shape = _shape(node)
        node = next((each for each in operands_of(node) if _shape(each) == shape), None) if _keeps(node) else None
    return None if node is None else _without_mapped(value, node)[0]


def _keeps(node: fx.Node) -> bool:
    return node.target in _SAME or primitive_name(node) == "pcast" or torch.Tag.pointwise in node.target.tags


_SAME = {torch.ops.aten.alias.default, torch.ops.aten.detach.default, torch.ops.aten._to_copy.default}


def _shape(node: fx.Node) -> Any:
    return getattr(info(node).val, "shape", None)


def _without_mapped(value: torch.Tensor, node: fx.Node) -> tuple[P | None, list[str]]:
    held = info(node).spec if node.op == "placeholder" else None
    if held is None:
        return None, []
    dims, padded, split = list(held.dims), held.padded, list[str]()
    for dim in _torch.mapped_dims(value):
        split += [each for each in (dims.pop(dim) if dim < len(dims) else ()) if isinstance(each, str)]
        padded = {each - (each > dim): count for each, count in padded.items() if each != dim}
    return held.replace(dims, padded=padded), split


def _node_of(value: torch.Tensor) -> fx.Node | None:
    active, plain = recorder(), _torch.unwrap(value)
    return active.node_of(plain) if active is not None and isinstance(plain, _torch.FakeTensor) else None


# --- Types ---


def _type_difference(value: torch.Tensor, axes: Iterable[str], wanted: Type, spec: str) -> str | None:
    for axis in axes:
        held = _state_of(value, axis, wanted[axis])
        if held is not wanted[axis]:
            found = f"along {axis!r} it is {held} ({HOLDING[held]})"
            return f"{spec} is declared, but {found}; {_fix(held, wanted[axis], axis)}"
    return None


def _state_of(value: torch.Tensor, axis: str, wanted: State) -> State:
    # A vmap level may map a value that is equal for all entries, and cannot detect Reduced values. Under vmap, only a
    # missing Varying is therefore reported.
    if recorder() is not None:
        node = _node_of(value)
        return _I if node is None else (info(node).type or Type())[axis]
    communicator = snapshot()[axis].communicator
    return wanted if not isinstance(communicator, Lane) or wanted is not _V or is_mapped(value, communicator) else _I


def _fix(held: State, wanted: State, axis: str) -> str:
    fixes = {
        (_I, _V): "the whole would be taken for a shard. Pass a shard: in_specs that match, "
        f"or fp.pscatter(x, {axis!r})",
        (_V, _I): "a shard would be taken for the whole. Pass the whole: in_specs that match, "
        f"or fp.all_gather(x, {axis!r}, to='invariant')",
        (_I, _R): f"write fp.pcast(x, {axis!r}, to='reduced'), or say so in in_specs: P(…, reduced={{{axis!r}}})",
        (_U, _I): f"write fp.psum(x, {axis!r}) first",
    }
    return fixes.get((held, wanted), f"pass a value that is {wanted} along {axis!r}")


def _refuse(function: object, found: Iterable[str | None]) -> None:
    wrong = [each for each in found if each is not None]
    if wrong:
        raise ArgumentSpecError(
            f"{current_source() or 'a call'}: {function} is called on what does not lie as its layout declares:\n"
            + "\n".join(wrong)
            + "\n  Where torch.func's grad, vmap or jacrev stands around it: fp.grad, fp.grad_and_value, fp.vmap and "
            "fp.hessian keep the layout, and need no in_specs. Where a plan stands inside another: fp.chain them"
        )


# --- Marks, which are checked when the trace is rerun ---


def _check_mark(
    x: torch.Tensor, axes: list[str], states: list[str], path: str, spec: str, function: str
) -> torch.Tensor:
    axes = [axis for axis in axes if axis in current_axes()]
    active = recorder()
    if active is not None and active.on_node is None:
        return _Declared.apply(x, axes, states, path, spec, function)
    wanted = Type(dict(zip(axes, states, strict=True)))
    wrong = _type_difference(x, axes, wanted, spec)
    _refuse(function, [None if wrong is None else f"  {path}: {wrong}"])
    return x


_Declared = define_marker(
    "declared(Tensor x, str[] axes, str[] states, str path, str spec, str function)", _check_mark, names_dims=False
)
OP = _Declared.op
