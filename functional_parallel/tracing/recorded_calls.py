"""Copies of the ops of a recorded call, for an equal call on other tensors.

Equal calls have equal keys: shapes, dtypes, strides and shared memory of their tensors, and the modes around them. A
call is not copied if it had effects besides its results, or read what no key contains: writes into its tensors, values,
strides, or numbers of Python's generator. Its draws are copied with their own sites.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from typing import Any, NamedTuple

import optree
import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from sharding_specs import register_dataclasses

from .. import _torch
from ..collectives import snapshot
from ..ir import Rename, Source, Template, frozen, info, operands_of, repeats_are_shared, source, walk_args
from .constant_folding import content
from .interception import Interception
from .memory_layout import LayoutsOfCall, storage_key
from .record import Recorder, recorder
from .sites import ambient_keys
from .switches import autocast_dtypes

_VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_ATTENTIONS = ("flash", "mem_efficient", "math", "cudnn")
_TENSORS = (torch.Tensor, torch.nn.Parameter, _torch.FakeTensor)


class CopyableMode(TorchFunctionMode):
    """Mode under which calls can be copied: what it does depends only on `state`, and on a fact about each tensor."""

    @property
    def state(self) -> Hashable:
        raise NotImplementedError

    def fact(self, x: torch.Tensor) -> Hashable:
        raise NotImplementedError

    def set_fact(self, x: torch.Tensor, fact: Any) -> None:
        raise NotImplementedError


def recording_of_calls() -> Recorder | None:
    """Return the running recording, if calls can be copied in it now."""
    active = recorder()
    if active is None or active.on_node is not None or not repeats_are_shared() or _torch.is_inside_transform():
        return None
    own = (CopyableMode, Interception, Recorder, _torch.FakeTensorMode)
    is_other = any(not isinstance(each, own) for each in (*_torch.function_modes(), *_torch.dispatch_modes()))
    return None if active.zeros or is_other else active


def _facts(x: torch.Tensor) -> tuple[Hashable, ...]:
    return tuple(mode.fact(x) for mode in _modes())


def _modes() -> list[CopyableMode]:
    return [mode for mode in _torch.function_modes() if isinstance(mode, CopyableMode)]


class Call:
    """A call that begins, on tensors. `reached` has the names of the tensors that its function closes over."""

    def __init__(self, recording: Recorder, tensors: Sequence[torch.Tensor], reached: Collection[Hashable]) -> None:
        self.recording, self.reached = recording, reached
        self.keys = [*ambient_keys()]
        self.tensors = [*tensors, *(each.key for each in self.keys)]
        self.place = source.place_of_call()

    @property
    def is_possible(self) -> bool:
        is_plain = all(type(each) in _TENSORS and each.layout is torch.strided for each in self.tensors)
        return is_plain and not (torch.is_grad_enabled() and any(each.requires_grad for each in self.tensors))

    def key(self) -> Hashable:
        with _torch.disable_torch_function():
            return (*_state(), *(each.in_program for each in self.keys), *self._of_tensors())

    def _of_tensors(self) -> Iterator[Hashable]:
        names, memory = dict[Hashable, int](), dict[int, tuple[int, int]]()
        for index, x in enumerate(self.tensors):
            name, offset = name_of(self.recording, x), int(x.storage_offset())
            first, start = memory.setdefault(storage_key(x), (index, offset))
            yield tuple(x.shape), x.dtype, x.device, x.stride(), x.is_conj(), x.is_neg(), type(x), x.requires_grad
            yield (
                names.setdefault(name, index),
                first,
                offset - start,
                name if name in self.reached else None,
                _facts(x),
            )

    def run(self, f: Callable[[], Any]) -> tuple[Any, RecordedCall | None]:
        """Run the call, and return its result and its recording. None if the call cannot be copied."""
        begin = _Begin(self)
        result = f()
        return result, begin.recorded(result)


def name_of(recording: Recorder, x: torch.Tensor) -> Hashable:
    """Return a name of the value of a tensor: equal names are equal values, while the tensors live."""
    node = recording.value(x)
    return id(x) if node is None or node in recording.closed_over else node


def _state() -> tuple[Hashable, ...]:
    ours = [each for name in ("batch norms", "explicit casts") for each in _torch.of_thread(name, list[Any])]
    grad = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), source.is_in_region(), autocast_dtypes())
    modes = [(type(mode), mode.state) for mode in _modes()]
    defaults = torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled()
    kernels = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _ATTENTIONS]
    return (*grad, *modes, *defaults, *kernels, *ours, *snapshot().items())


class _Passed(NamedTuple):
    """A result that is an argument."""

    number: int


class _Made(NamedTuple):
    """A result of an op, as a view of the memory of an argument or of new memory."""

    node: fx.Node
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # from the start of new memory, or from the offset of the argument
    memory: int  # key of its storage in the recorded call
    argument: int | None  # that has the same memory
    elements: int  # of the memory
    facts: tuple[Hashable, ...]  # of each mode


_UNKNOWN = object()


class _Begin:
    def __init__(self, call: Call) -> None:
        self.call, self.recording = call, call.recording
        nodes = self.recording.traced.graph.nodes
        self.first, self.last = next(iter(nodes), None), next(iter(reversed(nodes)), None)
        self.drawn = [each.drawn for each in call.keys]
        self.stage, self.paired = source.stages_passed(), len(self.recording.layouts.paired)
        self.bindings, self.before = self.recording.bindings(), self._counts()

    def _counts(self) -> tuple[Any, ...]:
        """Return the facts that a copyable call does not change."""
        recording = self.recording
        reads = (recording.values_read, recording.layouts.strides_read, len(recording.zeros))
        return *reads, len(ambient_keys()), random.getstate(), self.call.key()

    def recorded(self, result: Any) -> RecordedCall | None:
        recording, call, nodes = self.recording, self.call, self.recording.traced.graph.nodes
        if self._counts() != self.before or recording.has_written(self.bindings):
            return None
        register_dataclasses(result)
        leaves, tree = optree.tree_flatten(result)
        created = [*takewhile(lambda node: node is not self.first and node.op != "call_function", nodes)][::-1]
        ops = [*takewhile(lambda node: node is not self.last and node.op == "call_function", reversed(nodes))][::-1]
        numbers = {recording.value(x): index for index, x in enumerate(call.tensors)}
        operands = dict.fromkeys(each for node in ops for each in operands_of(node))
        allowed = {*ops, *numbers, *created, *recording.closed_over, *call.reached}
        with _torch.disable_torch_function():
            results = [self._result(leaf, set(ops)) for leaf in leaves]
        constants = recording.traced.constants
        literals = {node: constants[str(node.target)] for node in created if node not in recording.closed_over}
        sites = {node: site for node in literals if (site := self._site(node)) is not None}
        draws = [each.drawn - before for each, before in zip(call.keys, self.drawn, strict=True)]
        types = {(each.memory, each.dtype) for each in results if isinstance(each, _Made)}
        is_plain = _UNKNOWN not in results and len(types) == len({memory for memory, _ in types})
        if not is_plain or not allowed.issuperset(operands) or len(sites) != sum(draws):  # draws in a trace inside
            return None
        return RecordedCall(
            place=call.place,
            template=Template(ops),
            created=created,
            literals=literals,
            operands={node: numbers[node] for node in (*created, *operands) if node in numbers},
            memory=[storage_key(x) for x in call.tensors],
            results=results,
            tree=tree,
            sites=sites,
            draws=draws,
            stages=source.stages_passed() - self.stage,
            layouts=recording.layouts.of(ops, self.paired),
            views=recording.aliases.of(ops),
        )

    def _site(self, node: fx.Node) -> tuple[int, int] | None:
        key, number = self.recording.sites.get(node, (None, 0))
        found = (index for index, each in enumerate(self.call.keys) if each is key)
        return next(((index, number - self.drawn[index]) for index in found), None)

    def _result(self, leaf: Any, ops: set[fx.Node]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf if type(leaf) in _VALUES else _UNKNOWN
        same = [index for index, x in enumerate(self.call.tensors) if x is leaf]
        if same:
            return _Passed(same[0])
        node = self.recording.value(leaf)
        is_plain = (
            type(leaf) is _torch.FakeTensor and leaf.layout is torch.strided and not _torch.added_attributes(leaf)
        )
        if node not in ops or not is_plain or leaf.requires_grad or leaf.is_conj() or leaf.is_neg():
            return _UNKNOWN
        memory, offset = storage_key(leaf), int(leaf.storage_offset())
        argument = next((index for index, x in enumerate(self.call.tensors) if storage_key(x) == memory), None)
        if argument is not None:
            given = self.call.tensors[argument]
            offset -= int(given.storage_offset())
            if given.dtype is not leaf.dtype or not isinstance(given, _torch.FakeTensor):
                return _UNKNOWN
        elif self.recording.layouts.made_by(memory) not in ops:
            return _UNKNOWN
        count, shape = leaf.untyped_storage().nbytes() // leaf.itemsize, tuple(map(int, leaf.shape))
        facts = _facts(leaf)
        return _Made(node, leaf.dtype, leaf.device, shape, leaf.stride(), offset, memory, argument, count, facts)


@dataclass(frozen=True)
class RecordedCall:
    """A recorded call, as operands, ops and results of its copies."""

    place: Source
    template: Template
    created: list[fx.Node]  # constants and captured tensors that the call used first
    literals: dict[fx.Node, torch.Tensor]  # constants that each call has separately
    operands: dict[fx.Node, int]  # the argument that a node holds
    memory: list[int]  # keys of the storages of the arguments
    results: list[Any]
    tree: optree.PyTreeSpec
    sites: dict[fx.Node, tuple[int, int]]  # constants with the number of an ambient key, and of a draw since the call
    draws: list[int]  # draws from each ambient key
    stages: int  # boundaries that the call passes
    layouts: LayoutsOfCall
    views: tuple[dict[fx.Node, fx.Node], set[fx.Node]]

    def copied(self, call: Call) -> Any:
        """Record the ops of an equal call, and return its results."""
        recording, rename = call.recording, self._rename(call.place)
        substitution = {node: self._created(node, call, rename) for node in self.created}
        substitution.update((node, recording.node_of(call.tensors[index])) for node, index in self.operands.items())
        copies = self.template.stamp(recording.traced, substitution, rename)
        with _torch.disable_torch_function(), _torch.disable_modes(), recording.fake_mode:
            memory = dict(zip(self.memory, call.tensors, strict=True))
            made = [self._made(result, call, memory) for result in self.results]
        recording.aliases.copy(self.views, copies)
        recording.layouts.copy(self.layouts, copies, memory)
        for result, x in zip(self.results, made, strict=True):
            if isinstance(result, _Made):
                recording.bind(x, copies[result.node])
                for mode, fact in zip(_modes(), result.facts, strict=True):
                    mode.set_fact(x, fact)
        for key, count in zip(call.keys, self.draws, strict=True):
            key.drawn += count
        for _ in range(self.stages):
            source.pass_stage_boundary()
        return self.tree.unflatten(made)

    def _rename(self, place: Source) -> Rename | None:
        regions = {known.region for node in self.template.nodes if (known := info(node).source) is not None}
        same = (place, place.stage) == (self.place, self.place.stage)
        return None if same and regions <= {None, place.region} else source.moved(self.place, place)

    def _created(self, node: fx.Node, call: Call, rename: Rename | None) -> fx.Node:
        recording = call.recording
        if node in self.operands:
            return recording.node_of(call.tensors[self.operands[node]])
        if node not in self.literals:
            return node
        key, number = self.sites.get(node, (None, 0))
        value = self.literals[node]
        if key is not None:
            number += call.keys[key].drawn
            with _torch.disable_modes(), _torch.disable_torch_function():
                value = torch.full_like(value, number)
        known = info(node)
        copy = recording.literal(value, known.source if rename is None or not known.source else rename(known.source))
        if key is not None:
            recording.sites[copy] = call.keys[key], number
        return copy

    def _made(self, result: Any, call: Call, memory: dict[int, torch.Tensor]) -> Any:
        if isinstance(result, _Passed):
            return call.tensors[result.number]
        if not isinstance(result, _Made):
            return result
        start = 0 if result.argument is None else int(call.tensors[result.argument].storage_offset())
        if result.memory not in memory:
            memory[result.memory] = torch.empty(result.elements, dtype=result.dtype, device=result.device)
        return memory[result.memory].as_strided(result.shape, result.strides, start + result.offset)

    def difference(self, other: RecordedCall) -> tuple[bool, Source | None]:
        """Whether another recording of an equal call differs, and the line of the first op that does."""
        for mine, theirs in zip_longest(self._form(), other._form(), fillvalue=(None, None)):
            if mine[0] != theirs[0]:
                return True, theirs[1] or mine[1]
        return False, None

    def _form(self) -> Iterator[tuple[Hashable, Source | None]]:
        """Yield the ops and results without the identity of nodes, which equal calls have in common."""
        labels: dict[Any, Hashable] = {node: ("op", index) for index, node in enumerate(self.template.nodes)}
        labels.update((node, ("literal", self.sites.get(node) or content(x))) for node, x in self.literals.items())
        labels.update((node, ("argument", index)) for node, index in self.operands.items())

        def label(value: Any) -> Any:
            return labels.get(value, value) if isinstance(value, fx.Node) else value

        regions: dict[str | None, int] = {None: -2, self.place.region: -1}
        for node in self.template.nodes:
            known = info(node)
            line, parts = known.source, list[Hashable]([known._replace(source=None, forward_node=None)])
            if line is not None:
                where = None if line.is_line_of(self.place) else (line.file, line.line, line.function)
                region = regions.setdefault(line.region, len(regions))
                parts += [where, region, line.stage - self.place.stage, line.implied]
            args = walk_args((node.args, node.kwargs), label)
            yield (node.target, frozen(args), labels.get(known.forward_node), *parts), line
        memory = list(dict.fromkeys(each.memory for each in self.results if isinstance(each, _Made)))
        for each in self.results:
            is_made = isinstance(each, _Made)
            yield (
                each._replace(node=labels[each.node], memory=memory.index(each.memory)) if is_made else frozen(each),
                None,
            )
        yield (self.tree, *self.draws, self.stages), None
