"""Types of pytrees and of spec trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import torch

from .annotated import Annotated
from .spec import P


class DataclassNode(Protocol):
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


class RegisteredNode(Protocol):
    def tree_flatten(self) -> tuple[Any, ...]: ...


_Number: TypeAlias = bool | int | float | complex
_Leaf: TypeAlias = (
    "torch.Tensor | P | Annotated | _Number | str | bytes | torch.dtype | torch.device | Callable[..., Any] | None"
)
Tree: TypeAlias = "_Leaf | Mapping[Any, Tree] | Sequence[Tree] | DataclassNode | RegisteredNode"
SpecTree: TypeAlias = "P | str | Mapping[Any, SpecTree] | Sequence[SpecTree] | DataclassNode | RegisteredNode | None"
