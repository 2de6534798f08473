"""Parameters on the ranks of a mesh, written as a Hugging Face folder."""

from __future__ import annotations

import copy
import heapq
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sharding_specs import Box, Mesh, P

from ...checkpoint import Disk, LeafLayout, Peers, Piece, header, plan_restore
from ...errors import CheckpointError
from ...functions import PyTree, functional
from ...ir import memory_of
from ...runtime import device_of, world_size
from ...stateful import HeldLeaves, Sharded, listed, peers_of
from ...training import TrainState, parameters_of
from .assembled import Assembled
from .weight_names import first_names, written_names
from .weights_folder import CONFIG, INDEX, SINGLE

_AT_ONCE = 64 << 20  # bytes that a rank receives before it writes them, or one tensor
_COPIED = {".json", ".txt", ".model", ".jinja", ".tiktoken"}  # suffixes of a tokenizer's and a processor's files
_GENERATION = "generation_config.json"


def save_pretrained(
    params: Sharded | TrainState | Mapping[str, torch.Tensor],
    folder: str | Path,
    fn: Callable[..., Any],
    *,
    max_file: int = 5 << 30,
) -> None:
    """Write parameters as a Hugging Face folder, which transformers' `from_pretrained` reads. Every process calls it.

    Each rank writes files of its own share of the tensors, which it receives a few at a time. So no rank holds a full
    model. Conversions and renames of the folder that the model came from are reversed. The folder gets config.json and
    the generation config of the model, and the tokenizer's files of the folder that the model came from. It appears
    under its name when it is complete.

    Args:
        params: parameters of `fn`: sharded ones, or those of a training state, in the dtype in which they are stored,
            or full tensors.
        folder: a new folder, on a disk that all hosts share.
        fn: the function of the model, by `fp.load_pretrained` or `fp.functional`.
        max_file: most bytes of a file, or one tensor.

    Raises:
        CheckpointError: on every process, if the folder exists, parameters are missing or have other shapes than the
            model's, or a process could not write its part.
        TypeError: if `fn` is no function of a model of transformers.
    """
    model = getattr(fn, "module", None)
    if not hasattr(model, "save_pretrained") or model is None:
        raise TypeError(f"save_pretrained: fn is no function of a model of transformers, but of {type(model).__name__}")
    if isinstance(params, TrainState):
        params = parameters_of(params)
    if not isinstance(params, Sharded):
        size = world_size()
        params = Sharded.of(dict(params), Mesh(process=size) if size > 1 else Mesh(), P())
    _require_parameters(params.shapes, functional(model)[1])
    peers = peers_of(params.runtime())
    made = _begin(peers, Path(folder))
    export = _Export(model, params, max_file)
    problem = export.write(peers, made)
    peers.agree(problem, "after writing a folder of a model")
    if peers.rank == 0:
        try:
            _complete(made, Path(folder), model, export.files)
        except OSError as error:
            problem = f"{error.filename or made}: {error.strerror}"
    peers.agree(problem, "at the end of a folder of a model")


def _require_parameters(given: PyTree, wanted: Mapping[str, torch.Tensor]) -> None:
    rows = [f"{name}: missing" for name in wanted if name not in given]
    rows += [f"{name}: unexpected, the model has no such parameter" for name in given if name not in wanted]
    for name in sorted(given.keys() & wanted.keys()):
        if given[name].shape != wanted[name].shape:
            rows.append(f"{name}: {tuple(given[name].shape)}, and {tuple(wanted[name].shape)} in the model")
    if rows:
        raise CheckpointError("save_pretrained: these are not the parameters of fn:\n  " + "\n  ".join(listed(rows)))


def _begin(peers: Peers, folder: Path) -> Path:
    made, problem = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}"), ""
    if peers.rank == 0:
        try:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                problem = f"{folder} exists: give save_pretrained a new folder, or remove it"
            else:
                made.mkdir(parents=True)
        except OSError as error:
            problem = f"{error.filename or made}: {error.strerror}"
    (made, problem), *_ = peers.exchange((made, problem), "before a folder of a model")
    if problem:
        raise CheckpointError(problem)
    peers.agree("" if made.is_dir() else f"{made} is not there: all hosts must share it", "before a folder of a model")
    return made


@dataclass(frozen=True)
class _Group:
    """Tensors of the folder that are assembled from the same tensors of the model."""

    names: tuple[str, ...]  # of the model
    tensors: dict[str, Assembled]  # of the folder

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors.values())


class _Export:
    """The files of a folder. Each is written by one rank, from tensors that are moved there.

    Attributes:
        files: the tensors of each file by name.
    """

    def __init__(self, model: Any, params: Sharded, max_file: int) -> None:
        self.params, self.runtime = params, params.runtime()
        self.constants = _constants(model, params.shapes)
        every = {**params.shapes, **self.constants}
        values = {name: Assembled.of_key(name, x.shape, x.dtype) for name, x in every.items()}
        groups = list(_groups(written_names(model, values)))
        ranks = list(map(_in_order, _shared_out(groups, params.mesh.size)))
        self.rounds = [list(_parts(of_rank, _AT_ONCE)) for of_rank in ranks]
        parts = [(rank, part) for rank, of_rank in enumerate(ranks) for part in _parts(of_rank, max_file)]
        names = [SINGLE] if len(parts) == 1 else [_name(i, len(parts)) for i in range(len(parts))]
        self.files = {name: _tensors(part) for name, (_, part) in zip(names, parts, strict=True)}
        self.owner = {name: rank for name, (rank, _) in zip(names, parts, strict=True)}

    def write(self, peers: Peers, folder: Path) -> str:
        """Write the files of the ranks of this process. Return what went wrong: the others still need its shards."""
        problem, disk = "", Disk()
        with ExitStack() as opened:
            try:
                places = self._open(peers, folder, disk, opened)
            except (OSError, CheckpointError) as error:
                problem, places = _told(error, folder), {}
            source = self.params.source(self.runtime)
            for number in range(max(map(len, self.rounds), default=0)):
                for tensors, group in self._moved(source, number):
                    try:
                        for key, value in group.tensors.items() if not problem else ():
                            file, place = places[key]
                            data = value.full(lambda name, box, into: into.copy_(tensors[name][box.slices]))  # noqa: B023
                            disk.write(file, memory_of(data), place)
                    except OSError as error:
                        problem = _told(error, folder)
            for file in {file: None for file, _ in places.values()} if not problem else ():
                disk.sync(file)
        return problem

    def _open(self, peers: Peers, folder: Path, disk: Disk, opened: ExitStack) -> dict[str, tuple[int, int]]:
        """Create the files of this process. Return the file and the first byte of each tensor."""
        places: dict[str, tuple[int, int]] = {}
        for name, tensors in self.files.items():
            if self.owner[name] in peers.ranks:
                entries = [(key, x.dtype, Box((0,) * x.ndim, tuple(x.shape))) for key, x in tensors.items()]
                first, sizes = header(entries), [x.numel() * x.element_size() for x in tensors.values()]
                file = opened.enter_context(disk.create(folder / name, len(first) + sum(sizes)))
                disk.write(file, memoryview(first), 0)
                place = len(first)
                for key, size in zip(tensors, sizes, strict=True):
                    places[key], place = (file, place), place + size
        return places

    def _moved(self, source: HeldLeaves, number: int) -> Iterator[tuple[dict[str, torch.Tensor], _Group]]:
        """Move the tensors of a round to their ranks. Yield the groups of this process with the full tensors."""
        mesh, leaves = self.params.mesh, {leaf.key: leaf for leaf in source.plan.leaves}
        keys = dict(zip(sorted(self.params.shapes), leaves, strict=True))
        wanted, shards, mine = list[LeafLayout](), dict[tuple[int, int], torch.Tensor](), list[tuple[int, _Group]]()
        place, held = device_of(source.handles) or torch.device("cpu"), dict[str, int]()
        for rank, of_rank in enumerate(self.rounds):
            where = tuple((axis, (index,)) for axis, index in mesh.coordinates(rank).items())
            for group in of_rank[number] if number < len(of_rank) else ():
                for name in (name for name in group.names if name not in self.constants):
                    leaf, held[name] = leaves[keys[name]], len(held)
                    piece = Piece(P(), (held[name],), None, None, where)
                    wanted.append(LeafLayout(leaf.kind, leaf.key, leaf.shape, leaf.dtype, (piece,)))
                    if rank in self.runtime.own_ranks:
                        shards[held[name], rank] = torch.empty(leaf.shape, dtype=leaf.dtype, device=place)
                if rank in self.runtime.own_ranks:
                    mine.append((rank, group))
        source.fill(plan_restore(source.plan, wanted, mesh), shards)
        for rank, group in mine:
            moved = {name: shards.pop((held[name], rank)) for name in group.names if name in held}
            yield {**moved, **{name: self.constants[name] for name in group.names if name in self.constants}}, group


def _constants(model: Any, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state that are no parameters, by their first names."""
    state, first = model.state_dict(), first_names(model)
    return {name: state[name] for name in dict.fromkeys(first.values()) if name in state and name not in params}


def _groups(tensors: Mapping[str, Assembled]) -> Iterator[_Group]:
    of_name: dict[str, list[str]] = {}  # keys of the folder that are in one group, by name in the model
    for key, value in tensors.items():
        joined = [key]
        names = value.keys()
        for keys in {id(of_name[name]): of_name[name] for name in names if name in of_name}.values():
            joined += keys
        for each in {name for one in joined for name in tensors[one].keys()}:
            of_name[each] = joined
    for keys in {id(keys): keys for keys in of_name.values()}.values():
        names = sorted({name for key in keys for name in tensors[key].keys()})
        yield _Group(tuple(names), {key: tensors[key] for key in sorted(keys)})


def _shared_out(groups: Sequence[_Group], ranks: int) -> list[list[_Group]]:
    """Return the groups of each rank: the largest first, each to the rank with the fewest bytes."""
    found: list[list[_Group]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for group in sorted(groups, key=lambda group: (-group.nbytes, group.names)):
        load, rank = heapq.heappop(loads)
        found[rank].append(group)
        heapq.heappush(loads, (load + group.nbytes, rank))
    return found


def _in_order(groups: Sequence[_Group]) -> list[_Group]:
    """Return groups in the order of their file, where elements of larger types come first."""
    return sorted(groups, key=lambda group: (-max(x.element_size() for x in group.tensors.values()), group.names))


def _parts(groups: Sequence[_Group], most: int) -> Iterator[list[_Group]]:
    """Yield consecutive groups with at most this number of bytes, or one group."""
    found, size = list[_Group](), 0
    for group in groups:
        if found and size + group.nbytes > most:
            yield found
            found, size = [], 0
        found.append(group)
        size += group.nbytes
    if found:
        yield found


def _tensors(groups: Sequence[_Group]) -> dict[str, Assembled]:
    return {key: value for group in groups for key, value in group.tensors.items()}


def _name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _told(error: Exception, folder: Path) -> str:
    return f"{error.filename or folder}: {error.strerror}" if isinstance(error, OSError) else str(error)


def _complete(made: Path, folder: Path, model: Any, files: Mapping[str, Mapping[str, Assembled]]) -> None:
    """Write what is not a tensor, and give the folder its name."""
    config, disk, came_from = copy.deepcopy(model.config), Disk(), Path(model.config.name_or_path or made)
    config.dtype = str(next(iter(model.parameters())).dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(made)
    for each in sorted(came_from.iterdir()) if came_from.is_dir() else ():
        is_own = each.name == CONFIG or each.name.endswith(".index.json")
        if each.is_file() and each.suffix in _COPIED and not is_own and each.parent != made:
            shutil.copyfile(each, made / each.name)
    if model.can_generate() and not (made / _GENERATION).exists():
        model.generation_config.save_pretrained(made)
    if len(files) > 1:
        sizes = [x.numel() * x.element_size() for tensors in files.values() for x in tensors.values()]
        weight_map = {key: name for name, tensors in files.items() for key in tensors}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(weight_map.items()))}
        (made / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for each in made.iterdir():
        with each.open("rb") as file:
            disk.sync(file.fileno())
    disk.sync_folder(made)
    disk.rename(made, folder)
    disk.sync_folder(folder.parent)
