"""The safetensors files of a Hugging Face folder, opened and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from sharding_specs import Box

from ...checkpoint import Entry, ShardFile, without_repeats
from ...errors import CheckpointError, DamagedCheckpointError
from ...stateful import listed
from .assembled import Assembled

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
CONFIG, GENERATION = "config.json", "generation_config.json"


class WeightsFolder(AbstractContextManager["WeightsFolder"]):
    """The tensors of a folder, by key.

    Attributes:
        nbytes: bytes of the tensors that were read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.nbytes, self._files = path, 0, ExitStack()
        self._entries: dict[str, tuple[ShardFile, Entry]] = {}
        with self._files as opened:
            self._open(_weight_map(path), opened)
            self._files = opened.pop_all()

    def _open(self, weight_map: Mapping[str, str], opened: ExitStack) -> None:
        for name in dict.fromkeys(weight_map.values()):
            file = opened.enter_context(ShardFile(self.path / name))
            for key, entry in file.entries.items():
                if weight_map.get(key, name) == name:
                    if key in self._entries:
                        both = f"{self._entries[key][0].path.name} and in {name}"
                        raise DamagedCheckpointError(
                            f"{self.path}: {key!r} is in {both}, and the index does not name it"
                        )
                    self._entries[key] = file, entry
                if any(entry.box.start):
                    raise CheckpointError(
                        f"{file.path}: {key!r} is a shard of a tensor: give fp.checkpoint.consolidate the folder first"
                    )
        lost = [f"{key} in {name}" for key, name in weight_map.items() if key and key not in self._entries]
        if lost:
            raise DamagedCheckpointError(
                f"{self.path / INDEX} names tensors that the files do not have:\n  " + "\n  ".join(listed(lost))
            )

    def __exit__(self, *_: Any) -> None:
        self._files.close()

    def tensors(self) -> dict[str, Assembled]:
        rows = self._entries.items()
        return {key: Assembled.of_key(key, entry.box.size, entry.dtype) for key, (_, entry) in rows}

    def read(self, key: str, box: Box, target: torch.Tensor) -> None:
        file, entry = self._entries[key]
        file.read(entry, box, target)
        self.nbytes += box.numel * entry.dtype.itemsize


def read_json(path: Path, hook: Callable[[Any], Any] = dict) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=hook)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: it cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: it is JSON of a {type(found).__name__}, not of an object")
    return found


def _weight_map(path: Path) -> Mapping[str, str]:
    """Return the file of each key that an index names; of a single file "" and its name."""
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder; huggingface_hub.snapshot_download(name) fetches a model of the Hub into one"
        )
    if (path / SINGLE).exists():  # as transformers, which leaves an old index beside it
        return {"": SINGLE}
    if (path / INDEX).exists():
        found = read_json(path / INDEX, without_repeats).get("weight_map")
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
            raise CheckpointError(f'{path / INDEX}: its "weight_map" is not an object of file names')
        for key, name in found.items():
            if not _is_inside(path, name):
                raise CheckpointError(
                    f"{path / INDEX}: {key!r} is in {name!r}, outside of the folder: files are named relative to it"
                )
            if not name.endswith(".safetensors"):
                raise CheckpointError(f"{path / INDEX}: {key!r} is in {name!r}, which is no safetensors file")
        return found
    others = [each.name for each in sorted(path.iterdir()) if each.suffix not in (".json", ".txt", ".md")]
    pickles = [name for name in others if Path(name).suffix in _PICKLES]
    if pickles:
        raise CheckpointError(
            f"{path} has its weights as pickles ({', '.join(listed(pickles))}), and loading one can run any code. If "
            "you trust it, let transformers convert it: model_class.from_pretrained(folder).save_pretrained(new_folder)"
        )
    told = f"{path} has no weights: neither {SINGLE} nor {INDEX}"
    if (path / "adapter_config.json").exists():
        told += ". It is of an adapter of peft: give the folder of its base model, and adapt= to add the adapter"
    elif others:
        told += f"; it has {', '.join(listed(others))}"
    raise CheckpointError(told)


def _is_inside(path: Path, name: str) -> bool:
    """Whether a name of a file is in a folder. The file may be a link, as in a cache of the Hub, its folder may not."""
    if ".." in PureWindowsPath(name).parts or PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive:
        return False
    return "\0" not in name and (path / name).parent.resolve().is_relative_to(path.resolve())
