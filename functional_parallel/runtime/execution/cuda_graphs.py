"""Run a program as a CUDA graph: its kernels are recorded once, and launched by one call from then on.

A donated input is a buffer of the graph, and the result that replaces it is written there, so a step that is given its
own results copies nothing. The first call runs op by op on a side stream, and the second one records.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import optree
import torch

from ...errors import BackendError
from ...ir import info, recording
from ...program import Program
from .codegen import failing_op

Tensors = list[torch.Tensor]
Function = Callable[[list[Any]], list[Any]]


class GraphRecorder:
    """CUDA devices. All graphs of a device share one pool of memory, as they run one after another."""

    def __init__(self) -> None:
        self._pools: dict[torch.device, Any] = {}
        self._last: dict[torch.device, torch.cuda.Event] = {}

    def wait(self, device: torch.device) -> None:
        """Let the current stream wait for the last launch, for a caller that changes the stream."""
        if device in self._last:
            torch.cuda.current_stream(device).wait_event(self._last[device])

    def run_aside(self, device: torch.device, run: Callable[[], Tensors]) -> Tensors:
        with torch.cuda.device(device):
            stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                results = run()
            current.wait_stream(stream)
            for x in results:
                x.record_stream(current)
            return results

    def record(self, device: torch.device, run: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
        """Record the kernels of a function, without running them. Return its results, and a function that runs them."""
        with torch.cuda.device(device):
            pool = self._pools.setdefault(device, torch.cuda.graph_pool_handle())
            graph = torch.cuda.CUDAGraph()
            # Other threads may call CUDA meanwhile, such as nccl's.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                results = run()

        def launch() -> None:
            with torch.cuda.device(device):
                graph.replay()
                self._last.setdefault(device, torch.cuda.Event()).record()

        return results, launch


RECORDER = GraphRecorder()

_LOCK = threading.RLock()  # buffers and the pool belong to one launch at a time
_handed_out: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()  # state in use, by its address


class _Replaced(NamedTuple):
    result: int
    input: int


class CapturedFunction:
    def __init__(self, program: Program, function: Function) -> None:
        self.name, self.function = program.name, function
        self.known = [info(node) for node in program.traced.inputs]
        self._graphs: list[_Graph] = []

    def __call__(self, handles: list[Any]) -> list[Any]:
        with _LOCK:
            leaves, tree = optree.tree_flatten(handles)
            graph = next((each for each in self._graphs if each.holds(leaves)), None)
            graph = graph or next((each for each in self._graphs if each.is_free()), None)
            if graph is None:
                owners = [number for number, handle in enumerate(handles) for _ in optree.tree_leaves(handle)]
                graph = _Graph(self, leaves, tree, owners)
                self._graphs.append(graph)
            handles.clear()
            RECORDER.wait(graph.device)
            graph.take(leaves)
            leaves.clear()
            return graph.run()


class _Graph:
    def __init__(self, of: CapturedFunction, leaves: Tensors, tree: Any, owners: list[int]) -> None:
        self.of, self._tree, self._owners = of, tree, owners
        self._donated = [index for index, owner in enumerate(owners) if of.known[owner].donated]
        self.buffers: Tensors = []
        taken: set[int] = set()
        for index, (x, owner) in enumerate(zip(leaves, owners, strict=True)):
            device, address = of.known[owner].aval.device, x.untyped_storage().data_ptr()
            stays = index in self._donated and x.device.type == device.type and address not in taken
            self.buffers.append(x if stays else torch.empty_like(x, device=device).copy_(x))
            taken.add(address)
        self.device = self.buffers[0].device if self.buffers else torch.device("cuda")
        self._fills: list[Callable[[], bool]] = []
        self._launch: Callable[[], None] | None = None
        self._results: Tensors = []  # in the memory of the graph
        self._out_tree: Any = None
        self._replaced: list[_Replaced] = []
        self._has_run = False

    def holds(self, leaves: Sequence[torch.Tensor]) -> bool:
        return all(_is_at(leaves[index], self.buffers[index]) for index in self._donated)

    def is_free(self) -> bool:
        return not self._replaced or self.buffers[self._replaced[0].input].data_ptr() not in _handed_out

    def take(self, leaves: Sequence[torch.Tensor]) -> None:
        for buffer, x in zip(self.buffers, leaves, strict=True):
            if not _is_at(x, buffer):
                buffer.copy_(x)

    def run(self) -> list[Any]:
        if self._has_run and self._launch is None:
            self._record()
        if self._launch is None or not all([fill() for fill in self._fills]):
            results = RECORDER.run_aside(self.device, self._call)
            self._has_run = True
        else:
            self._launch()
            results = self._results
        return self._left(results)

    def _record(self) -> None:
        self._fills = []
        try:
            with recording(self._fills):
                self._results, self._launch = RECORDER.record(self.device, self._call)
        except Exception as error:
            raise BackendError(
                f"backend='cudagraphs' cannot capture {self.of.name}: {failing_op(error)} failed while its kernels "
                "were recorded. They must not read values on the host. backend='eager' and backend='inductor' record "
                f"nothing. torch says: {type(error).__name__}: {error}"
            ) from error

    def _call(self) -> Tensors:
        handles = self.of.function(optree.tree_unflatten(self._tree, self.buffers))
        results: Tensors
        results, self._out_tree = optree.tree_flatten(handles)
        self._replaced = self._replacements(handles)
        homes = {result: self.buffers[number] for result, number in self._replaced}
        held = {buffer.untyped_storage().data_ptr() for buffer in homes.values()}
        for index, x in enumerate(results):  # before anything is written over
            home = homes.get(index)
            if home is not None and _is_same(x, home):
                results[index] = home
            elif x.untyped_storage().data_ptr() in held:
                results[index] = x.clone()
        for index, home in homes.items():
            if results[index] is not home:
                results[index] = home.copy_(results[index])
        return results

    def _replacements(self, handles: Sequence[Any]) -> list[_Replaced]:
        ends = [0, *itertools.accumulate(len(optree.tree_leaves(handle)) for handle in handles)]
        inputs: dict[int, list[int]] = {}
        for index in self._donated:
            inputs.setdefault(self._owners[index], []).append(index)
        found = []
        for owner, indices in inputs.items():
            number = self.of.known[owner].updated_output
            if number is not None and ends[number + 1] - ends[number] == len(indices):
                found += [_Replaced(ends[number] + place, index) for place, index in enumerate(indices)]
        return found

    def _left(self, results: Tensors) -> list[Any]:
        homes = {result for result, _ in self._replaced}
        leaves = [x if index in homes else x.clone() for index, x in enumerate(results)]
        if self._replaced:  # the tensors of a state live equally long, so one of them tells
            first = self._replaced[0].result
            leaves[first] = leaves[first].detach()
            _handed_out[leaves[first].data_ptr()] = leaves[first]
        handles: list[Any] = optree.tree_unflatten(self._out_tree, leaves)
        return handles


def _is_at(x: torch.Tensor, buffer: torch.Tensor) -> bool:
    return x is buffer or x.data_ptr() == buffer.data_ptr()


def _is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()
