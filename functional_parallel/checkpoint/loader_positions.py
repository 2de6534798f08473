"""Positions of data loaders as JSON."""

from __future__ import annotations

import base64
from typing import Any

import torch

from ..data import Position
from ..errors import CheckpointError
from .format import DTYPES, dtype_name
from .peers import Peers


def position_to_json(data: Any, peers: Peers) -> Any:
    if data is None:
        return None
    if isinstance(data, Position):
        return {"epoch": data.epoch, "batch": data.batch}
    if callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None)):
        workers = getattr(data, "num_workers", 0)
        mine = {"workers": workers, "state": _to_json(data.state_dict())}
        return {"loaders": peers.exchange(mine, "to save the positions of loaders")}
    raise TypeError(
        f"data={data!r}: give the fp.Position that sampler.run returned with the last batch, or a loader with "
        "state_dict and load_state_dict"
    )


def position_of(saved: Any) -> Any:
    return Position(**saved) if isinstance(saved, dict) and "epoch" in saved else saved


def load_position(saved: Any, data: Any, peers: Peers) -> None:

    states = saved.get("loaders") if isinstance(saved, dict) else None
    if states is None:
        raise CheckpointError("data=…: the checkpoint has no state of a loader; it was saved without data=loader")
    if len(states) != peers.size:
        raise CheckpointError(
            f"the checkpoint has the states of {len(states)} loaders, and there are {peers.size} processes: samples "
            f"would be repeated or left out. Resume on {len(states)}, or use fp.Sampler, which resumes on any number"
        )
    mine, workers = states[peers.rank], getattr(data, "num_workers", 0)
    if mine["workers"] != workers:
        raise CheckpointError(
            f"the loader was saved with {mine['workers']} workers and has {workers} now: each worker has its own "
            "position, so it would repeat samples. Use the same number"
        )
    data.load_state_dict(_from_json(mine["state"]))


def _to_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        data = base64.b64encode(bytes(value.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist())).decode()
        return {"~tensor": [dtype_name("a state of a loader", value.dtype), list(value.shape), data]}
    if isinstance(value, bytes):
        return {"~bytes": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {"~tuple": [_to_json(each) for each in value]}
    if isinstance(value, list):
        return [_to_json(each) for each in value]
    if isinstance(value, dict):
        return {"~dict": [[_to_json(key), _to_json(each)] for key, each in value.items()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(f"the state of the loader has a {type(value).__name__}, which JSON cannot hold: {value!r}")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "~tensor":
        name, shape, data = held
        raw = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8)
        return raw.view(DTYPES[name]).view(shape)
    if kind == "~bytes":
        return base64.b64decode(held)
    if kind == "~tuple":
        return tuple(_from_json(each) for each in held)
    return {_from_json(key): _from_json(each) for key, each in held}
