"""Files of torch.distributed.checkpoint and torch.save, and one safetensors file of full tensors."""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import optree
import torch

from sharding_specs import Box

from ..errors import CheckpointError, DamagedCheckpointError, RemovedCheckpointError
from ..functions import PyTree
from .disk import Disk
from .files import ShardFile, write_file
from .folder import committed, newest
from .format import NAME, Entry
from .leaf_names import tree_from_json, tree_keys
from .opened import Checkpoint
from .sums import default_algorithm

Made = dict[str, tuple[tuple[int, ...], torch.dtype, Callable[[], torch.Tensor]]]


def load(path: str | Path) -> PyTree:
    """Load full parameters, for `train.init` or for another program.

    >>> import tempfile, torch, functional_parallel as fp
    >>> folder = tempfile.mkdtemp()
    >>> torch.save({"w": torch.ones(2)}, f"{folder}/model.pt")
    >>> fp.checkpoint.load(f"{folder}/model.pt")
    {'w': tensor([1., 1.])}

    Args:
        path: a checkpoint, or the folder of a run. Or a folder of safetensors files, as torch's
            `HuggingFaceStorageWriter` writes with `save_distributed=True`. Or one safetensors file. Or a file of
            `torch.save` with tensors in dicts, lists and tuples, which is read with `weights_only=True`.

    Returns:
        The tree of the parameters. Of safetensors files it is a dict by key. Frozen parameters that `only="trained"`
        left out are missing in dicts, and None elsewhere.

    Raises:
        CheckpointError: if the path has none of these.
        DamagedCheckpointError: if a file is damaged, or boxes are missing.
        RemovedCheckpointError: if the path is one checkpoint, and a run removed it meanwhile.
    """
    path = Path(path)
    if path.is_file() and path.suffix != ".safetensors":
        return _load_pickle(path)
    if _is_foreign(path):
        with ExitStack() as files:
            return {key: make() for key, (_, _, make) in _shards(path, files).items()}
    return newest(path, None, _params_of)


def consolidate(path: str | Path, target: str | Path) -> list[Path]:
    """Write the full tensors of a checkpoint, or of any file that `load` reads, into one safetensors file.

    One full tensor is in memory at a time.

    Args:
        path: as for `load`.
        target: a folder. `model.safetensors` has the parameters. Of a checkpoint, `optimizer.safetensors` has the
            tensors of the optimizer's state.

    Returns:
        The files.

    Raises:
        CheckpointError: as for `load`, or if a file exists.
    """
    path, target = Path(path), Path(target)
    target.mkdir(parents=True, exist_ok=True)
    is_pickle = path.is_file() and path.suffix != ".safetensors"
    if is_pickle or _is_foreign(path):
        with ExitStack() as files:
            tensors = _tensors_of_tree(_load_pickle(path)) if is_pickle else _shards(path, files)
            return [_write(target / "model.safetensors", tensors)]
    names = {"params": "model.safetensors", "optimizer": "optimizer.safetensors"}

    def write(checkpoint: Checkpoint) -> list[Path]:
        done: list[Path] = []
        made = {name: _tensors_of(checkpoint, kind) for kind, name in names.items()}
        try:
            done.extend(_write(target / name, tensors) for name, tensors in made.items() if tensors)
        except RemovedCheckpointError:
            for each in done:
                each.unlink()
            raise
        return done

    return newest(path, None, write)


def _is_foreign(path: Path) -> bool:
    is_own = (path / NAME).exists() or bool(committed(path))
    return path.is_file() or (not is_own and any(path.glob("*.safetensors")))


def _params_of(checkpoint: Checkpoint) -> PyTree:
    tensors, numbers = _tensors_of(checkpoint, "params"), checkpoint.numbers
    if checkpoint.body["tree"] is None:
        return {key: make() for key, (_, _, make) in tensors.items()}
    left_out = {name.removeprefix("params/") for name in checkpoint.left_out}

    def leaf(key: str) -> torch.Tensor | bool | int | float:
        return tensors[key][2]() if key in tensors else numbers[f"params/{key}"]

    return tree_from_json(checkpoint.body["tree"], leaf, left_out)


def _load_pickle(path: Path) -> PyTree:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: it has more than tensors in containers, and loading that would run code: {error}"
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        raise DamagedCheckpointError(f"{path}: it is not a file of torch.save: {error}") from None


def _tensors_of_tree(tree: PyTree) -> Made:
    leaves = zip(tree_keys(tree), optree.tree_leaves(tree), strict=True)
    return {
        key: (tuple(leaf.shape), leaf.dtype, lambda leaf=leaf: leaf)  # type: ignore[misc]
        for key, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    }


def _tensors_of(checkpoint: Checkpoint, kind: str) -> Made:
    return {
        leaf.key: (leaf.shape, leaf.dtype, lambda leaf=leaf: checkpoint.tensor(f"{kind}/{leaf.key}"))  # type: ignore[misc]
        for leaf in checkpoint.plan.leaves
        if leaf.kind == kind
    }


def _shards(path: Path, files: ExitStack) -> Made:
    boxes: dict[str, list[tuple[ShardFile, Entry]]] = defaultdict(list)
    for each in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        file = files.enter_context(ShardFile(each))
        for key, entry in file.entries.items():
            boxes[key].append((file, entry))
    found: Made = {}
    for key, parts in boxes.items():
        ends = [[s + n for s, n in zip(e.box.start, e.box.size, strict=True)] for _, e in parts]
        if len({(len(end), entry.dtype) for end, (_, entry) in zip(ends, parts, strict=True)}) > 1:
            raise DamagedCheckpointError(f"{path}: {key!r} has other dims or dtypes in other files")
        shape = tuple(map(max, zip(*ends, strict=True)))
        all_boxes = [entry.box for _, entry in parts]
        overlap = any(a.intersection(b) is not None for i, a in enumerate(all_boxes) for b in all_boxes[:i])
        if sum(box.numel for box in all_boxes) != math.prod(shape) or overlap:
            raise DamagedCheckpointError(f"{path}: the boxes of {key!r} have gaps or overlap: a file is missing")
        found[key] = shape, parts[0][1].dtype, lambda shape=shape, parts=parts: _joined(shape, parts)  # type: ignore[misc]
    return found


def _joined(shape: tuple[int, ...], parts: list[tuple[ShardFile, Entry]]) -> torch.Tensor:
    full = torch.empty(shape, dtype=parts[0][1].dtype, device="cpu")
    for file, entry in parts:
        file.read(entry, entry.box, full[entry.box.slices])
    return full


def _write(path: Path, tensors: Made) -> Path:
    disk = Disk()
    if path.exists():
        raise CheckpointError(f"{path}: the file exists")
    order = sorted(tensors.items(), key=lambda item: (-item[1][1].itemsize, item[0]))
    entries = [(key, dtype, Box((0,) * len(shape), shape)) for key, (shape, dtype, _) in order]
    made = path.with_name(f"{path.name}.tmp")
    disk.unlink(made)
    write_file(disk, made, entries, (make() for _, (_, _, make) in order), default_algorithm())
    disk.rename(made, path)
    disk.sync_folder(path.parent)
    return path
