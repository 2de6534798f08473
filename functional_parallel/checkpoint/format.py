"""Headers of safetensors files, as torch's `HuggingFaceStorageWriter` writes them, and `checkpoint.json`."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sharding_specs import Box, Mesh, P

from ..errors import CheckpointError
from .layouts import LeafLayout, Piece, Vector, Writers
from .plan import SavePlan
from .sums import hasher

NAME, VERSION = "checkpoint.json", 1
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, of_torch)
    for name, of_torch in {
        **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32"},
        **{"U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32"},
        **{"F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
        **{"F8_E8M0": "float8_e8m0fnu"},
    }.items()
    if hasattr(torch, of_torch)
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST = 100 << 20  # bytes of a header, as in safetensors


class Entry(NamedTuple):
    dtype: torch.dtype
    box: Box
    begin: int
    end: int

    def range(self, part: Box) -> tuple[int, int]:
        first, last = part.within(self.box).ends(self.box.size)
        return self.begin + first * self.dtype.itemsize, self.begin + (last + 1) * self.dtype.itemsize

    def runs(self, part: Box) -> Iterator[tuple[int, int]]:
        """Yield the first and the last byte, exclusive, of each contiguous range of a box, in order."""
        size, found = self.box.size, part.within(self.box)
        dim = max(len(size) - 1, 0)
        while dim and found.size[dim] == size[dim]:
            dim -= 1
        stride = math.prod(size[dim + 1 :]) * self.dtype.itemsize
        outer = (range(first, first + count) for first, count in zip(found.start[:dim], found.size[:dim], strict=True))
        (first, count) = (found.start[dim], found.size[dim]) if size else (0, 1)
        for indices in itertools.product(*outer) if part.numel else ():
            row = 0
            for index, length in zip(indices, size, strict=False):
                row = row * length + index
            begin = self.begin + (row * (size[dim] if size else 1) + first) * stride
            yield begin, begin + count * stride


def dtype_name(leaf: str, dtype: torch.dtype) -> str:

    if dtype not in _NAMES:
        raise CheckpointError(f"{leaf}: safetensors has no type for {dtype}; it has {', '.join(_NAMES.values())}")
    return _NAMES[dtype]


def file_name(rank: int, number: int, count: int) -> str:
    return f"shard-{rank + 1:05d}-model-{number + 1:05d}-of-{count:05d}.safetensors"


# --- headers ---


def header(entries: Sequence[tuple[str, torch.dtype, Box]]) -> bytes:
    table: dict[str, Any] = {}
    offsets = {key: {"saved_offsets": list(box.start)} for key, _, box in entries}
    table["__metadata__"] = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    begin = 0
    for key, dtype, box in entries:
        end = begin + box.numel * dtype.itemsize
        table[key] = {"dtype": dtype_name(key, dtype), "shape": list(box.size), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parse_header(data: bytes, size: int) -> dict[str, Entry]:
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= min(size - 8, _MOST) or len(data) < 8 + length:
        raise ValueError(f"its header claims {length} bytes")
    table = json.loads(data[8 : 8 + length], object_pairs_hook=without_repeats)
    metadata = table.pop("__metadata__", {})
    offsets = json.loads(metadata["DCP_SHARDING_INFO"]) if "DCP_SHARDING_INFO" in metadata else {}
    found = {}
    for key, each in table.items():
        if each["dtype"] not in DTYPES:
            raise ValueError(f"its entry of {key!r} has the dtype {each['dtype']!r}; known are {', '.join(DTYPES)}")
        shape, (begin, end) = tuple(map(int, each["shape"])), map(int, each["data_offsets"])
        start = tuple(map(int, offsets[key]["saved_offsets"])) if key in offsets else (0,) * len(shape)
        entry = Entry(DTYPES[each["dtype"]], Box(start, shape), 8 + length + begin, 8 + length + end)
        wrong = len(start) != len(shape) or min((*shape, *start), default=0) < 0
        if wrong or end - begin != entry.box.numel * entry.dtype.itemsize or not 0 <= begin <= entry.end - 8 - length:
            raise ValueError(f"its entry of {key!r} is inconsistent")
        if entry.end > size:
            raise ValueError(f"its entry of {key!r} ends at byte {entry.end}, and the file has {size}")
        found[key] = entry
    _require_contiguous(found, 8 + length, size)
    return found


def _require_contiguous(entries: Mapping[str, Entry], place: int, size: int) -> None:
    """Check that each byte belongs to one tensor, as the format says: none is hidden, and none is shared."""
    for key, entry in sorted(entries.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
        if entry.begin != place:
            kind = (
                "overlaps the entry before it, which ends" if entry.begin < place else "leaves a gap: the last one ends"
            )
            raise ValueError(f"its entry of {key!r} begins at byte {entry.begin}, and {kind} at byte {place}")
        place = entry.end
    if place != size:
        raise ValueError(f"its last entry ends at byte {place}, and the file has {size}")


def without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of JSON with these names, for `json.loads(object_pairs_hook=…)`. It must not name one twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names {twice!r} twice")
    return found


# --- checkpoint.json ---


def encode(body: Mapping[str, Any], algorithm: str) -> bytes:
    text = json.dumps(body, ensure_ascii=False, allow_nan=False)
    return f'{{"checkpoint": {text},\n"sum": "{_sum(text, algorithm)}"}}\n'.encode()


def decode(data: bytes) -> dict[str, Any]:
    try:
        whole = json.loads(data)
        body, given = whole["checkpoint"], whole["sum"]
        text = json.dumps(body, ensure_ascii=False)
        version, algorithm = int(body["version"]), str(body["sums"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"it is not the text of a checkpoint ({type(error).__name__}: {error})") from None
    if version > VERSION:
        raise CheckpointError(f"it has version {version} of the format, and this library reads up to {VERSION}")
    if _sum(text, algorithm) != given:
        raise CheckpointError("its checksum is wrong: the text was changed or damaged")
    return dict(body)


def _sum(text: str, algorithm: str) -> str:
    made = hasher(algorithm)()
    made.update(text.encode())
    return made.hexdigest()


def plan_to_json(plan: SavePlan) -> dict[str, Any]:
    leaves: dict[str, dict[str, Any]] = {"params": {}, "optimizer": {}}
    for leaf in plan.leaves:
        pieces = [_piece_to_json(piece) for piece in leaf.pieces]
        shown = {"dtype": dtype_name(str(leaf), leaf.dtype), "shape": list(leaf.shape), "pieces": pieces}
        leaves[leaf.kind][leaf.key] = shown
    return {"mesh": plan.mesh.shape, "leaves": leaves}


def plan_from_json(body: Mapping[str, Any]) -> SavePlan:
    found = []
    for kind, leaves in body["leaves"].items():
        for key, leaf in leaves.items():
            pieces = tuple(map(_piece_from_json, leaf["pieces"]))
            found.append(LeafLayout(kind, key, tuple(leaf["shape"]), DTYPES[leaf["dtype"]], pieces))
    return SavePlan(Mesh(body["mesh"]), tuple(found))


def _piece_to_json(piece: Piece) -> dict[str, Any]:
    made: dict[str, Any] = {"spec": [list(dim) for dim in piece.spec.dims]}
    if piece.rows is not None:
        made["rows"] = list(piece.rows)
    if piece.vector is not None:
        made["vector"] = [list(piece.vector.over), piece.vector.begin, piece.vector.length]
    if piece.where:
        made["where"] = {axis: list(indices) for axis, indices in piece.where}
    made["writers"] = [list(piece.writers.axes), list(piece.writers.index)]
    return made


def _piece_from_json(made: Mapping[str, Any]) -> Piece:
    rows, vector, (axes, index) = made.get("rows"), made.get("vector"), made["writers"]
    return Piece(
        P(*(tuple(dim) for dim in made["spec"])),
        tuple(range(1 if rows is None else len(rows))),
        None if rows is None else tuple(rows),
        None if vector is None else Vector(tuple(vector[0]), int(vector[1]), int(vector[2])),
        tuple((axis, tuple(indices)) for axis, indices in made.get("where", {}).items()),
        Writers(tuple(axes), tuple(index)),
    )
