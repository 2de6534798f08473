"""Split residuals that all ranks of an axis hold, so that each rank stores its part of them.

Between the blocks of a tensor-parallel model all ranks have the same activations. ZeRO-R (arXiv 1910.02054 §6.1) stores
one n-th of each on a rank and gathers it for the backward. With recomputation by layers these are the inputs of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, fx
from torch.nn.functional import pad

from sharding_specs import Mesh, MeshError

from ..collectives import State, all_gather, axis_size, pscatter
from ..ir import Aval, info
from ..quantities import readable_bytes
from .moved_residuals import move
from .program_pass import Settings
from .stored_residuals import StoredResiduals, counted, made_of_batch


@dataclass(frozen=True)
class SplitResiduals(StoredResiduals):
    """Store a part of each activation that all ranks of an axis hold, and gather it for the backward."""

    axis: str
    at_least: int  # bytes of the values to split
    memory: str = "device"  # of the parts
    name: ClassVar[str] = "split residuals"

    def check(self, settings: Settings) -> None:
        mesh = settings.mesh
        if self.axis not in mesh.axis_names:
            known = ", ".join(mesh.axis_names)
            raise MeshError(f"{mesh!r} has no axis {self.axis!r}, over which {self} splits; its axes are: {known}")
        if self.axis == settings.stage_axis:
            raise MeshError(
                f"{self}: the ranks of {self.axis!r} hold different layers of the pipeline, so no activation is equal "
                "on them; take the axis of fp.tensor_parallel"
            )

    def chosen(self, values: Sequence[fx.Node], mesh: Mesh) -> Sequence[fx.Node]:
        if not values or mesh.axis_size(self.axis) == 1:
            return []
        activations = made_of_batch(values[0].graph)
        return [value for value in values if value in activations and self._is_split(value)]

    def _is_split(self, value: fx.Node) -> bool:
        known = info(value)
        return known.typed[self.axis] is State.INVARIANT and known.nbytes >= self.at_least

    def note(self, stored: Sequence[fx.Node]) -> str:
        if not stored:
            least = readable_bytes(self.at_least)
            return f"{self}: no saved activation of {least} or more is equal on all ranks of {self.axis!r}"
        return f"{self}: {counted(stored)} split, and gathered for the backward"

    def pack(self, value: Tensor) -> Sequence[Tensor]:
        flat = value.reshape(-1)
        missing = -flat.numel() % axis_size(self.axis)
        part = pscatter(pad(flat, (0, missing)) if missing else flat, self.axis)
        return [part if self.memory == "device" else move(part, self.memory, part.device)]

    def unpack(self, parts: Sequence[Tensor], like: Aval) -> Tensor:
        part = parts[0] if self.memory == "device" else move(parts[0], "device", like.device)
        flat = all_gather(part, self.axis, to="invariant")
        return (flat[: like.numel] if flat.numel() > like.numel else flat).view(like.shape)

    def __str__(self) -> str:
        return f"partition_activations({self.axis!r})"
