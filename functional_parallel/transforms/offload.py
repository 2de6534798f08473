"""Training state and activations in another memory than the device's (ZeRO-Offload, arXiv 2101.06840)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import optree

from sharding_specs import P, SpecError, tree_paths
from sharding_specs.rules import matches_within, nearest

from ..collectives import MICROBATCH
from ..functions import LocalFunction, PyTree, Request, Resolved, SpecTree, explain_keywords
from ..ops import disk, require_memory, to_device
from ..passes import HostMoves, MovedResiduals, ParameterMoves, SumsOnHost, UpdateGroups
from ..quantities import is_number, is_positive_int, parse_bytes
from ..requests import OffloadedState, Order, RunPass
from .transform import Transform


@explain_keywords
@dataclass(frozen=True)
class offload(Transform):
    """Keep training state, sums of gradients, parameters or saved activations on the host or a disk (ZeRO-Offload).

    With `state="host"` a step moves the gradients to the host, after their sum over ranks. It updates there, and moves
    the new parameters back, in their stored type. With `update="device"` the state moves to the device
    for the update and back, group by group. With `activations="host"` what the forward saves for the backward waits on
    the host; in a pipeline, on the host of its stage. The results have the bits of the step without it.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> def loss(w, x):
    ...     return (x @ w).square().mean()
    >>> plan = fp.chain(fp.mixed_precision("bf16"), fp.zero(2, "data"), fp.offload(state="host"))
    >>> train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=2), plan)
    >>> state, _ = train(train.init(torch.ones(64)), torch.ones(4, 64))
    >>> train.program.bytes_moved()          # per rank, 32 gradients in float32 and 32 new parameters in bfloat16
    {('device', 'host'): 128, ('host', 'device'): 64}

    Args:
        state: memory of the optimizer's state and masters: "device", "host" or "disk".
        update: memory of the update of such state: "host", the default, or "device". The update reads state on disk,
            and with "device" state on the host, and writes it, group by group.
        gradients: memory of the sums of gradients, "device" or "host": each microbatch's gradient moves there, after
            its sum over ranks if it has one, and is added there. An update on the device gets them group by group.
        parameters: memory of the parameters at rest. From the host or "disk", a layer's parameters move to the device
            just before their use, or their gather, and again for the backward. Or memories by patterns of paths, as
            `{"layers/4-7": "host"}`, or an `fp.device_map`; other parameters stay on the device.
        activations: memory of saved activations. With `fp.remat(budget=…)`, of the activations that the budget moves.
        fraction: share, by bytes, of the parameters that `state` and `gradients` apply to, and of the activations:
            the first ones.
        at_least: the size of the smallest activation that moves: a number of bytes, or a text such as "1MiB".
        path: a folder on the disk.
        group: most bytes of state, and gradients, of other memories that are updated together, or a parameter's.
        ahead: number of layers between the move of a layer's parameters to the device and their use, or their gather,
            and between their read from a disk and this move. By default 1, and 0 for memories by patterns, such as
            in a device map, which counts one layer.

    Raises:
        ValueError: for an unknown memory, if nothing moves, for an `update` of state on the device, a fraction that is
            not above 0 and at most 1, a size that is none, or a missing path.
        DiskError: if the folder does not exist, or when a state is made, if the disk has no room for it.
    """

    _: KW_ONLY
    state: str = "device"
    update: str | None = None
    gradients: str = "device"
    parameters: str | Mapping[str, str | int] = "device"
    activations: str = "device"
    fraction: float = 1.0
    at_least: int | str = "64KiB"
    path: str | None = None
    group: int | str = "256MiB"
    ahead: int | None = None
    order: ClassVar[Order] = Order.MEMORY

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "parameters", getattr(self.parameters, "of_parameters", self.parameters))
        for kind in ("state", "gradients", "parameters", "activations"):
            given = getattr(self, kind)
            for memory in given.values() if isinstance(given, Mapping) else [given]:
                if given is memory or not isinstance(memory, int):
                    require_memory(self._word(memory), f"offload({kind}={memory!r})")
        if self.state == self.gradients == self.parameters == self.activations == "device":
            raise ValueError(f"{self.name} moves nothing: pass state=, gradients=, parameters= or activations='host'")
        if self.gradients == "disk":
            raise ValueError(f"{self.name}: each microbatch is added to the sums of gradients: gradients='host'")
        if self.update not in (None, *(("device", "host") if self.state != "device" else ())):
            raise ValueError(f"{self.name}: update='device' or 'host' is where state='host' or state='disk' is updated")
        parse_bytes(self.group)
        if self.ahead not in (None, 0) and not is_positive_int(self.ahead):
            raise ValueError(f"{self.name}: ahead={self.ahead!r} is no number of layers, an integer of at least 0")
        if not (is_number(self.fraction) and 0 < self.fraction <= 1):
            raise ValueError(f"{self.name}: fraction is the share of the bytes, above 0 and at most 1")
        parse_bytes(self.at_least)  # raises for another text

    def apply(self, f: LocalFunction) -> LocalFunction:
        is_asked = any(each != "device" for each in (self.state, self.gradients, self.parameters))
        asked = self._of_update(f.applied.last(OffloadedState)) if is_asked else []
        if self.activations != "device":
            size = parse_bytes(self.at_least)
            asked.append(RunPass(MovedResiduals(self._word(self.activations), size, self.fraction)))
        local = f.requesting(*asked)
        if self.parameters == "device":
            return local

        def call(resolved: Resolved, params: PyTree, *batch: PyTree) -> tuple[PyTree, SpecTree]:
            return f.run(resolved, optree.tree_map(to_device, params), *batch)

        ahead = 0 if isinstance(self.parameters, Mapping) else 1
        moves = ParameterMoves(ahead if self.ahead is None else self.ahead)
        return local.then(call, resolver=self._at_rest).requesting(RunPass(moves))

    def _of_update(self, before: OffloadedState | None) -> list[Request]:
        """Return the requests about the state and the sums of gradients, with the requests of an earlier transform."""
        if before is not None and "device" not in (self.state, before.memory):
            raise ValueError(f"{self.name}: the plan has {before}; name the memory of the state once")
        found, asked = before or OffloadedState(), list[Request]()
        if self.state != "device" or self.gradients != "device":
            if found != OffloadedState() and found.fraction != self.fraction:
                raise ValueError(f"{self.name}: the plan has {before}; its fraction is that of the gradients too")
            found = replace(found, fraction=self.fraction)
        if self.state != "device":
            found = replace(found, memory=self._word(self.state), on_device=self.update == "device")
        if self.gradients != "device":
            found = replace(found, gradients=self.gradients)
            asked.append(RunPass(SumsOnHost(MICROBATCH)))
        if self.state != "device" or (self.gradients != "device" and found.memory == "device"):
            asked.append(RunPass(UpdateGroups(parse_bytes(self.group))))
        return asked if found == before else [found, RunPass(HostMoves()), *asked]

    def _at_rest(self, resolved: Resolved) -> Resolved:
        count, paths = len(resolved.update), tree_paths(resolved.args[0])
        patterns = () if isinstance(self.parameters, str) else {*self.parameters} - {*map(self._pattern_of, paths)}
        for pattern in sorted(patterns):
            known = ", ".join(nearest(pattern, paths))
            raise SpecError(f"{self.name}: {pattern!r} is the first match of no parameter; the nearest are {known}")
        pairs = zip(resolved.specs[:count], paths, strict=True)
        moved = [self._placed(spec, path) for spec, path in pairs]
        return replace(resolved, specs=(*moved, *resolved.specs[count:]))

    def _placed(self, spec: P, path: str) -> P:
        """Return the spec in the memory that the transform gives to a path. Without one, it does not change."""
        memory = self._memory_of(path)
        moved = memory in ("host", "disk")
        return spec.replace(storage={**spec.storage, "memory": self._word(memory)}) if moved else spec

    def _memory_of(self, path: str) -> str:
        if isinstance(self.parameters, str):
            return self.parameters
        return str(self.parameters.get(self._pattern_of(path), "device"))  # a number is a device's

    def _pattern_of(self, path: str) -> str:
        return next((pattern for pattern in self.parameters if matches_within(pattern, path)), "")

    def _word(self, memory: str) -> str:
        if memory != "disk":
            return memory
        if self.path is None:
            raise ValueError(f"{self.name}: give a folder on the disk, path='/nvme/run'")
        return disk(self.path)
