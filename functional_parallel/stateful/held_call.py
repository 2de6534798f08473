"""Call of a compiled function with arguments that stay on the ranks, of which its second result may replace one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch

from sharding_specs import P

from ..errors import OutSpecError, PipelineError
from ..functions import PyTree
from ..ir import info
from ..lowering import Lowered
from ..program import Program
from ..runtime import Runtime
from .held import at_rest, tensors, tensors_of
from .sharded import Sharded
from .signatures import listed, structure_as_text
from .stateful_program import StatefulProgram


def require_same_state(lowered: Lowered, args: tuple[PyTree, ...], state: int) -> None:
    """Check that a function returns a pair, and that its second part can replace the argument `state`."""
    program, pair = lowered.program, lowered.out_tree
    does = f"{program.name}: compiled with state={state}, it"
    if not 0 <= state < len(args):
        raise ValueError(f"{does} has a state at index {state} of its arguments, and takes {len(args)}")
    before = optree.tree_structure(args[state])
    if not isinstance(program, Program):
        raise PipelineError(f"{does} keeps a state, which fp.pipeline does not support: leave one of the two out")
    if pair.type is not tuple or pair.num_children != 2:
        raise TypeError(f"{does} must return (result, new state), and returns {structure_as_text(pair)}")
    if pair.child(1) != before:
        told = f"{structure_as_text(pair.child(1))} for {structure_as_text(before)}"
        raise OutSpecError(f"{does} must return a new state with the structure of the old one, and returns {told}")
    first, count = sum(len(tensors_of(arg)) for arg in args[:state]), len(tensors_of(args[state]))
    old, new = slice(first, first + count), slice(len(program.out_specs) - count, None)
    rows = zip(
        program.in_paths[old],
        map(_text, program.in_specs[old], program.traced.inputs[old]),
        map(_text, program.out_specs[new], program.traced.outputs[new]),
        strict=True,
    )
    wrong = [f"{path}: {before}, in the result {after}" for path, before, after in rows if before != after]
    if wrong:
        raise OutSpecError(
            f"{does} must return a new state that lies like the old one, for the next call:\n  "
            + "\n  ".join(listed(wrong))
            + "\nGive the state the specs of the result, by batch= of a transform or by in_specs; or use fp.constrain"
        )


def _text(spec: P, node: Any) -> str:
    aval = info(node).aval
    return f"{at_rest(spec)!r}, shards of {str(aval.dtype).removeprefix('torch.')}{list(aval.shape)}"


def run_held(
    programs: StatefulProgram,
    lowered: Lowered,
    args: tuple[PyTree, ...],
    state: int | None,
    runtime: Callable[[], Runtime[Any, Any]],
) -> PyTree:
    """Run a program on arguments of which some stay on the ranks. Return the result; a new state is `Sharded`."""
    program, on = lowered.program, runtime()
    handles, kept, old = list[Any](), list[Any](), None
    for number, arg in enumerate(args):
        if number == state and not isinstance(arg, Sharded):
            rest = map(at_rest, program.in_specs[len(handles) :])
            wanted = optree.tree_map(lambda x, rest=rest: next(rest) if isinstance(x, torch.Tensor) else P(), arg)
            arg = Sharded.of(arg, on.mesh, wanted)
        elif number == state and (arg.is_view or sum(arg is each for each in args) > 1):
            arg = arg.copy()  # its memory is not only the state's
        if isinstance(arg, Sharded):
            held = tensors(arg.handles)
            stacks = None if number or lowered.resolved is None else lowered.resolved.stacks
            own = slice(len(handles), len(handles) + len(held))
            arg.require(on, program.name, stacks, program.in_paths[own], list(map(at_rest, program.in_specs[own])))
            old = arg if number == state else old
            kept += [] if number == state else held
            handles += held
            continue
        given = tensors_of(arg if number else lowered.entered((arg,))[0])
        lowered.require_layouts(given, len(handles))
        on.check_same(program.name, program.in_paths[len(handles) :][: len(given)], given)
        pairs = zip(given, program.in_specs[len(handles) :], strict=False)
        handles += [on.entered(x, spec) for x, spec in pairs]
    if old is None:
        return lowered.result(programs.run(on, lowered, handles, kept=kept))
    count = len(tensors(old.handles))
    with old.used(old.give()):
        results = programs.run(on, lowered, handles, staying=slice(len(program.out_specs) - count, None), kept=kept)
    leaves = lowered.leaves(results)
    first = lowered.out_tree.child(0).num_leaves
    return lowered.out_tree.child(0).unflatten(leaves[:first]), old.replaced(leaves[first:])
