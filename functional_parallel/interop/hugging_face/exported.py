"""Parameters on the ranks of a mesh, written as a Hugging Face folder."""

from __future__ import annotations

import copy
import heapq
import json
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from sharding_specs import Box, Mesh, P

from ...checkpoint import Disk, LeafLayout, Piece, header, plan_restore
from ...errors import CheckpointError
from ...functions import functional
from ...ir import memory_of
from ...runtime import device_of, world_size
from ...stateful import Sharded, peers_of
from ...training import TrainState, parameters_of
from .assembled import Assembled
from .meta_model import require_transformers
from .weight_names import first_names, require_same, written_names
from .weights_folder import CONFIG, GENERATION, INDEX, SINGLE

_COPIED = {".json", ".txt", ".model", ".jinja", ".tiktoken"}  # suffixes of a tokenizer's and a processor's files

Group = dict[str, Assembled]  # tensors of the folder that are assembled from the same ones of the model


def save_pretrained(
    params: Sharded | TrainState | Mapping[str, torch.Tensor],
    folder: str | Path,
    fn: Callable[..., Any],
    *,
    max_file: int = 5 << 30,
) -> None:
    """Write parameters as a Hugging Face folder, which transformers' `from_pretrained` reads. Every process calls it.

    Each rank writes files of its own share of the tensors, which it receives one at a time. So no rank holds a full
    model. Conversions and renames of the folder that the model came from are reversed. The folder also gets the configs
    of the model, and the tokenizer's files of the folder that the model came from. It has its name when it is complete.

    Args:
        params: parameters of `fn`: sharded ones, or those of a training state, in their stored dtype,
            or full tensors.
        folder: a new folder, on a disk that all hosts share.
        fn: the function of the model, by `fp.load_pretrained` or `fp.functional`.
        max_file: most bytes of a file, or one tensor.

    Raises:
        CheckpointError: on every process, if the folder exists, parameters are missing or have other shapes than the
            model's, or a process could not write its part.
        TypeError: if `fn` is no function of a model of transformers.
        ValueError: if the parameters are on some of the processes.
    """
    model, folder = getattr(fn, "module", None), Path(folder)
    if not isinstance(model, require_transformers().PreTrainedModel):
        raise TypeError(f"save_pretrained: fn is no function of a model of transformers, but of {type(model).__name__}")
    if not folder.name:
        raise CheckpointError(f"save_pretrained: {str(folder)!r} names no new folder: give one inside of it")
    if isinstance(params, TrainState):
        params = parameters_of(params)
    if not isinstance(params, Sharded):
        params = Sharded.of(dict(params), Mesh(process=world_size()), P())
    if params.mesh.is_partial and not params.runtime().is_simulated:
        raise ValueError(
            f"save_pretrained: the parameters are on {params.mesh!r}, some of the processes: give "
            "params.relayout(specs, mesh), on a mesh of all of them"
        )
    shapes = [{name: tuple(x.shape) for name, x in each.items()} for each in (params.shapes, functional(model)[1])]
    fix = "Give those that fp.load_pretrained or fp.functional returned with fn, or a state that was made of them"
    require_same(shapes[0], shapes[1], "save_pretrained: these are not the parameters of fn", fix)
    peers, made, problem = peers_of(params.runtime()), folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}"), ""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problem = f"{folder} exists: give save_pretrained a new folder, or remove it"
    (made, problem), *_ = peers.exchange((made, problem), "before a folder of a model")
    if problem:
        raise CheckpointError(problem)
    try:
        problem = _failure(partial(made.mkdir, parents=True), made) if peers.rank == 0 else ""
        peers.agree(problem, "before a folder of a model")
        export = _Export(model, params, max_file)
        peers.agree(export.write(made), "after writing a folder of a model")
        problem = _failure(partial(_complete, made, folder, export), made) if peers.rank == 0 else ""
        peers.agree(problem, "at the end of a folder of a model")
    except CheckpointError:
        if peers.rank == 0:
            shutil.rmtree(made, ignore_errors=True)
        raise


def _failure(act: Callable[[], None], folder: Path) -> str:
    """Return the error. The other processes must know it before it is raised."""
    try:
        act()
    except (OSError, ValueError, CheckpointError) as error:  # a ValueError of transformers is about a config
        return f"{error.filename or folder}: {error.strerror}" if isinstance(error, OSError) else str(error)
    return ""


class _Export:
    """The files of a folder. Each is written by one rank, from tensors that are moved there.

    Attributes:
        files: the tensors of each file by name.
    """

    def __init__(self, model: Any, params: Sharded, max_file: int) -> None:
        self.model, self.params, self.runtime, state = model, params, params.runtime(), model.state_dict()
        names = dict.fromkeys(first_names(model).values())
        self.constants = {name: state[name] for name in names if name in state and name not in params.shapes}
        every = {**params.shapes, **self.constants}
        values = {name: Assembled.of_key(name, x.shape, x.dtype) for name, x in every.items()}
        self.groups = _shared_out(written_names(model, values), params.mesh.size)
        parts = [(rank, part) for rank, groups in enumerate(self.groups) for part in _parts(groups, max_file)]
        numbers = (f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts)))
        self.files = dict(zip([SINGLE] if len(parts) == 1 else numbers, (part for _, part in parts), strict=True))
        self.owners = [rank for rank, _ in parts]

    def write(self, folder: Path) -> str:
        """Write the files of this process. After a failure, which is returned, others still receive its shards."""
        places: dict[str, tuple[int, int]] = {}
        disk = Disk()
        with ExitStack() as opened:
            problem = _failure(partial(self._open, folder, disk, opened, places), folder)
            for held, group in self._moved():
                for key, value in group.items() if not problem else ():
                    data = value.full(partial(_copy, held))
                    file, place = places[key]
                    problem = problem or _failure(partial(disk.write, file, memory_of(data), place), folder)
            for file in {file: None for file, _ in places.values()} if not problem else ():
                problem = problem or _failure(partial(disk.sync, file), folder)
        return problem

    def _open(self, folder: Path, disk: Disk, opened: ExitStack, places: dict[str, tuple[int, int]]) -> None:
        """Create the files of this process. Note the file and the first byte of each tensor."""
        for rank, (name, tensors) in zip(self.owners, self.files.items(), strict=True):
            if rank in self.runtime.own_ranks:
                first = header([(key, x.dtype, Box((0,) * x.ndim, tuple(x.shape))) for key, x in tensors.items()])
                file = opened.enter_context(disk.create(folder / name, len(first) + _nbytes(tensors)))
                disk.write(file, memoryview(first), 0)
                place = len(first)
                for key, x in tensors.items():
                    places[key], place = (file, place), place + x.numel() * x.element_size()

    def _moved(self) -> Iterator[tuple[Mapping[str, torch.Tensor], Group]]:
        """Move tensors to their writers, for one group of each rank at a time. Yield the tensors of this process."""
        mesh, source = self.params.mesh, self.params.source(self.runtime)
        leaves = dict(zip(sorted(self.params.shapes), source.plan.leaves, strict=True))
        device = device_of(source.handles) or torch.device("cpu")
        for groups in zip_longest(*self.groups):
            wanted, shards, mine = list[LeafLayout](), dict[tuple[int, int], torch.Tensor](), list[Any]()
            for rank, group in enumerate(groups):
                held = dict[str, torch.Tensor]()
                for name in sorted(set[str]().union(*(x.keys for x in (group or {}).values())) & leaves.keys()):
                    leaf, where = leaves[name], tuple((axis, (at,)) for axis, at in mesh.coordinates(rank).items())
                    pieces = (Piece(P(), (len(wanted),), None, None, where),)
                    if rank in self.runtime.own_ranks:
                        held[name] = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
                        shards[len(wanted), rank] = held[name]
                    wanted.append(LeafLayout(leaf.kind, leaf.key, leaf.shape, leaf.dtype, pieces))
                if group is not None and rank in self.runtime.own_ranks:
                    mine.append(({**self.constants, **held}, group))
            source.fill(plan_restore(source.plan, wanted, mesh), shards)
            yield from mine


def _copy(held: Mapping[str, torch.Tensor], name: str, box: Box, target: torch.Tensor) -> None:
    target.copy_(held[name][box.slices])


def _nbytes(group: Group) -> int:
    return sum(x.numel() * x.element_size() for x in group.values())


def _shared_out(tensors: Mapping[str, Assembled], ranks: int) -> list[list[Group]]:
    """Return the groups that each rank writes: the largest first, each to the rank with the fewest bytes."""
    groups: dict[frozenset[str], Group] = {}
    for key, value in tensors.items():
        groups.setdefault(value.keys, {})[key] = value
    found: list[list[Group]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for group in sorted(groups.values(), key=lambda group: (-_nbytes(group), min(group))):
        load, rank = loads[0]
        found[rank].append(group)
        heapq.heapreplace(loads, (load + _nbytes(group), rank))
    for each in found:  # in a file, elements of larger types come first, so that all are aligned
        each.sort(key=lambda group: -max(x.element_size() for x in group.values()))
    return found


def _parts(groups: Iterable[Group], most: int) -> Iterator[Group]:
    """Yield the tensors of each file of a rank: of consecutive groups, at most this number of bytes, or one group."""
    part: Group = {}
    for group in groups:
        if part and _nbytes(part) + _nbytes(group) > most:
            yield part
            part = {}
        part = part | group
    if part:
        yield part


def _complete(made: Path, folder: Path, export: _Export) -> None:
    """Write all but the tensors, and give the folder its name."""
    model, files, disk = export.model, export.files, Disk()
    config, came_from = copy.deepcopy(model.config), Path(model.config.name_or_path or made)
    first = next(name for name, _ in model.named_parameters())
    config.dtype = str(export.params.shapes.get(first, model.get_parameter(first)).dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(made)
    for each in sorted(came_from.iterdir()) if (came_from / CONFIG).exists() else ():
        is_own = each.name == CONFIG or each.name.endswith(".index.json") or each.parent == made
        if each.is_file() and each.suffix in _COPIED and not is_own:
            shutil.copyfile(each, made / each.name)
    if model.can_generate() and not _is_unchanged(model.generation_config, made):
        model.generation_config.save_pretrained(made)
    if len(files) > 1:
        weight_map = {key: name for name, tensors in files.items() for key in tensors}
        index = {"metadata": {"total_size": sum(map(_nbytes, files.values()))}, "weight_map": weight_map}
        (made / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for each in made.iterdir():
        with each.open("rb") as file:
            disk.sync(file.fileno())
    disk.sync_folder(made)
    disk.rename(made, folder)
    disk.sync_folder(folder.parent)


def _is_unchanged(generation: Any, made: Path) -> bool:
    """Whether a folder has this config of generation. transformers may be able to read it and not to write it."""
    return (made / GENERATION).exists() and type(generation).from_pretrained(made, local_files_only=True) == generation
