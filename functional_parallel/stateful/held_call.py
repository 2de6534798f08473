"""Call of a compiled function with arguments that stay on the ranks. Its second result may replace one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import optree
import torch

from sharding_specs import P, whole_shape

from ..errors import OutSpecError
from ..functions import PyTree
from ..ir import hollow, info, without_memory
from ..lowering import Lowered
from ..pipelines import PipelineProgram
from ..program import Program
from ..runtime import Runtime, Where, copy_if_aliased, storages
from ..tracing import disable_ambient_modes
from .held import StaticLeaf, at_rest, tensors, tensors_of
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
    if pair.type is not tuple or pair.num_children != 2:
        raise TypeError(f"{does} must return (result, new state), and returns {structure_as_text(pair)}")
    if args[state] is None:  # the function makes it
        return
    if pair.child(1) != before:
        told = f"{structure_as_text(pair.child(1))} for {structure_as_text(before)}"
        raise OutSpecError(f"{does} must return a new state with the structure of the old one, and returns {told}")
    first, count = sum(len(tensors_of(arg)) for arg in args[:state]), len(tensors_of(args[state]))
    old, new = slice(first, first + count), slice(len(program.out_specs) - count, None)
    inputs, outputs = _full_values(program)
    rows = zip(
        program.in_paths[old],
        map(_text, program.in_specs[old], inputs[old]),
        map(_text, program.out_specs[new], outputs[new]),
        strict=True,
    )
    wrong = [f"{path}: {before}, in the result {after}" for path, before, after in rows if before != after]
    if wrong:
        raise OutSpecError(
            f"{does} must return a new state that lies like the old one, for the next call:\n  "
            + "\n  ".join(listed(wrong))
            + "\nGive the state the specs of the result, by batch= of a transform or by in_specs; or use fp.constrain"
        )


def _full_values(program: Program | PipelineProgram) -> tuple[list[Any], list[Any]]:
    """Return the inputs and the results of all microbatches."""
    if isinstance(program, Program):
        return list(program.traced.inputs), list(program.traced.outputs)
    full = {given.node: node for node, given in program.epilogue.given.items() if given.kind == "input"}
    return [full[node] for node in program.inputs], list(program.epilogue.outputs)


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
    """Run a program on arguments. Some of them stay on the ranks. Return the result; a new state is `Sharded`."""
    program, on = lowered.program, runtime()
    handles, kept, old = list[Any](), list[Any](), None
    for number, arg in enumerate(args):
        if number == state and arg is not None and not isinstance(arg, Sharded):
            arg = _sharded(lowered, arg, len(handles), runtime, [program])
        elif number == state and arg is not None and (arg.is_view or sum(arg is each for each in args) > 1):
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
        entered = [on.entered(x, spec) for x, spec in pairs]
        kept += [] if state is None else entered  # a new state is written into by the next call
        handles += entered
    if state is None:
        return lowered.result(programs.run(on, lowered, handles, kept=storages(*kept)))
    return _replacing(programs, lowered, runtime)(handles, storages(*kept), old)


def steps_of(
    programs: StatefulProgram, lowered: Lowered, weights: Sharded, runtime: Callable[[], Runtime[Any, Any]]
) -> Callable[[Sharded], tuple[PyTree, Sharded]]:
    """Return the function of the state alone of a program of weights and state, which checks nothing in a call."""
    held, run = tensors(weights.handles), _replacing(programs, lowered, runtime)
    kept = storages(*held)
    return lambda state: run([*held, *tensors(state.handles)], kept, state)


def _replacing(
    programs: StatefulProgram, lowered: Lowered, runtime: Callable[[], Runtime[Any, Any]]
) -> Callable[[list[Any], set[int], Sharded | None], tuple[PyTree, Sharded]]:
    """Return a function that runs a program. Its second result replaces a state, or makes it."""
    on, (result, state) = runtime(), lowered.out_tree.children()
    first = result.num_leaves
    staying = slice(lowered.tensors_before(first), None)

    def run(handles: list[Any], kept: set[int], old: Sharded | None) -> tuple[PyTree, Sharded]:
        with nullcontext() if old is None else old.used(old.give()):
            results = programs.run(on, lowered, handles, staying=staying, kept=kept)
        leaves = lowered.leaves(results)
        if old is None:
            new = Sharded.made(state, leaves[first:], lowered.program.out_specs[staying], runtime)
        else:
            new = old.replaced(leaves[first:])
        return result.unflatten(leaves[:first]), new

    return run


def new_state_of(lowered: Lowered) -> tuple[PyTree, PyTree]:
    """Return the tree of the state that a program makes, as tensors without memory, and the tree of its specs."""
    program, state = lowered.program, lowered.out_tree.child(1)
    first = lowered.out_tree.child(0).num_leaves
    start = lowered.tensors_before(first)
    avals = (info(node).aval for node in _full_values(program)[1][start:])
    rows = iter(zip(avals, program.out_specs[start:], strict=True))

    def leaf(output: Any) -> tuple[Any, P]:
        if not lowered.is_tensor(output):
            return output, P()
        aval, spec = next(rows)
        return hollow(aval, whole_shape(aval.shape, spec, program.mesh)), spec

    shapes, specs = zip(*map(leaf, lowered.outputs[first:]), strict=True)
    return state.unflatten(shapes), state.unflatten(specs)


def held_argument(
    lowered: Lowered,
    tree: PyTree,
    runtime: Callable[[], Runtime[Any, Any]],
    others: Sequence[Program | PipelineProgram],
) -> Sharded:
    """Return the first argument of programs as their ranks hold it: full tensors, or a tree in any layout."""
    program, programs = lowered.program, [lowered.program, *others]
    if not isinstance(tree, Sharded):
        return _sharded(lowered, tree, 0, runtime, programs)
    count, stacks = len(tensors(tree.handles)), None if lowered.resolved is None else lowered.resolved.stacks
    specs, where = list(map(at_rest, program.in_specs[:count])), partial(_where, programs)
    return tree.placed(runtime, program.name, stacks, program.in_paths[:count], specs, where)


def _where(programs: Sequence[Program | PipelineProgram], number: int) -> Where:
    """Return the ranks that need an input of some programs."""
    stages = [each for each in programs if isinstance(each, PipelineProgram)]
    holders = frozenset[int]().union(*(each.holders(each.inputs[number]) for each in stages))
    return ((stages[0].axis, tuple(sorted(holders))),) if stages else ()


def _sharded(
    lowered: Lowered,
    tree: PyTree,
    first: int,
    runtime: Callable[[], Runtime[Any, Any]],
    programs: Sequence[Program | PipelineProgram],
) -> Sharded:
    """Shard an argument of full tensors, which begins at the input `first`."""
    program, on = lowered.program, runtime()
    entered = tree if first else lowered.entered((tree,))[0]
    stacks = None if first or lowered.resolved is None else lowered.resolved.stacks
    given = tensors_of(entered)
    lowered.require_layouts(given, first)
    on.check_same(program.name, program.in_paths[first : first + len(given)], given)
    taken, numbers = storages(*given), iter(range(first, first + len(given)))

    def handle(x: Any) -> tuple[Any, P]:
        if not isinstance(x, torch.Tensor):
            return StaticLeaf(x), P()
        number = next(numbers)
        spec = at_rest(program.in_specs[number])
        return copy_if_aliased(on.shard_on(_where(programs, number), x, spec), taken), spec

    with disable_ambient_modes():
        held = list(map(handle, optree.tree_leaves(entered)))
    shapes = optree.tree_map(without_memory, tree)
    return Sharded(tuple(x for x, _ in held), shapes, [spec for _, spec in held], runtime, stacks)
