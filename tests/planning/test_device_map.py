"""Device maps are those of Accelerate, and their tables, bytes and errors are true."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import functional_parallel as fp
from sharding_specs import SpecError

from ..models.families import made


class Three(nn.Module):
    """236 bytes: 64, 72 and 100. The model of Accelerate's own tests."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2, self.layer3 = Three(), Three(), Three()


def tied() -> nn.Module:
    model = Layers()
    model.layer3.linear2.weight = model.layer1.linear2.weight
    return model


def three_times() -> nn.Module:
    return nn.Sequential(Three(), Three(), Three())


GOLDEN: list[tuple[Any, dict[Any, int], list[str], dict[str, Any]]] = [  # model, bytes, no_split, memories by prefix
    (Three, {0: 200, 1: 200}, [], {"linear1": 0, "batchnorm": 1, "linear2": 1}),
    (Three, {0: 200, 1: 172, 2: 200}, [], {"linear1": 0, "batchnorm": 1, "linear2": 1}),
    (Three, {0: 150, "host": 300}, [], {"": "host"}),
    (Three, {"device": 150, "host": 300}, [], {"": "host"}),
    (three_times, {0: 500, 1: 500}, [], {"0": 0, "1.linear1": 0, "1.batchnorm": 0, "1.linear2": 1, "2": 1}),
    (three_times, {0: 500, 1: 500}, ["Three"], {"0": 0, "1": 1, "2": 1}),
    (
        tied,
        {0: 400, 1: 500},
        [],
        {"layer1": 0, "layer3.linear2": 0, "layer2": 1, "layer3.linear1": 1, "layer3.batchnorm": 1},
    ),
]


@pytest.mark.parametrize(("make", "limits", "no_split", "expected"), GOLDEN)
def test_the_golden_cases_of_accelerate(make: Any, limits: Any, no_split: list[str], expected: dict[str, Any]) -> None:
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = make()
        assert fp.device_map(model, limits, no_split=no_split).memories == by_name(model, expected)


def by_name(model: nn.Module, by_prefix: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
    whole = {name: [p for p in by_prefix if p in ("", name) or name.startswith(f"{p}.")] for name in names}
    return {name: by_prefix[max(found, key=len)] for name, found in whole.items()}


# --- Any model ---


@st.composite
def modules(draw: Any, depth: int = 3) -> nn.Module:
    sizes = st.integers(1, 5)
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        return nn.BatchNorm1d(draw(sizes)) if draw(st.booleans()) else nn.Linear(draw(sizes), draw(sizes))
    inner = [draw(modules(depth - 1)) for _ in range(draw(st.integers(1, 4)))]
    return nn.Sequential(*inner) if draw(st.booleans()) else nn.ModuleDict({f"m{i}": m for i, m in enumerate(inner)})


def size_of(model: nn.Module) -> int:
    return sum(each.numel() * each.itemsize for each in (*model.parameters(), *model.buffers()))


@settings(max_examples=40, deadline=None)
@given(st.lists(modules(), min_size=1, max_size=4), st.data())
def test_it_places_as_accelerate_does(parts: list[nn.Module], data: Any) -> None:
    model = nn.ModuleDict({f"m{i}": part for i, part in enumerate(parts)})
    no_split = data.draw(st.sampled_from([(), ("ModuleDict",), ("Linear", "BatchNorm1d")]))
    device, host = (data.draw(st.integers(4, size_of(model) + 50)) for _ in range(2))
    compare(model, device, host, [each for each in no_split if any(type(m).__name__ == each for m in model.modules())])


def compare(model: nn.Module, device: int, host: int, no_split: list[str], dtype: torch.dtype | None = None) -> None:
    accelerate = pytest.importorskip("accelerate")
    limits = {"device": device, "host": host, "disk": math.inf}
    try:
        found = fp.device_map(model, limits, no_split=no_split, dtype=dtype).memories
    except fp.BudgetError as error:  # Accelerate accepts a layer that no device can hold
        assert re.search("must be in 'device' while it runs|must be in 'host' while it runs", str(error))
        return
    theirs = accelerate.infer_auto_device_map(
        model, {0: device, "cpu": host}, no_split, dtype=dtype, offload_buffers=True
    )
    names = {0: "device", "cpu": "host", "disk": "disk"}
    assert found == by_name(model, {path: names[memory] for path, memory in theirs.items()})


@pytest.mark.parametrize("family", ["GPT-2", "Llama", "T5", "ViT"])
def test_models_of_transformers_lie_as_accelerate_places_them(family: str) -> None:
    """GPT-2 and T5 have tied embeddings (those of BERT are an error in Accelerate).

    The classes that the models must not be split in are the default.
    """
    model = made(family)[0].to(torch.float32)
    whole = size_of(model)
    for share in range(1, 9):
        dtype = (None, torch.bfloat16)[share % 2]
        compare(model, whole * share // 7, whole // 2, sorted(model._no_split_modules), dtype)
    limits = {"device": whole // 2, "host": whole}
    named = fp.device_map(model, limits, no_split=model._no_split_modules)
    assert named == fp.device_map(model, limits)


# --- Tables, bytes and placement by hand ---


@settings(max_examples=30, deadline=None)
@given(st.lists(modules(), min_size=1, max_size=4), st.data())
def test_a_map_placed_again_by_its_rows_is_the_same(parts: list[nn.Module], data: Any) -> None:
    """Its bytes are those of the parameters in each memory, and are within the limits with the room kept free."""
    model = nn.ModuleDict({f"m{i}": part for i, part in enumerate(parts)})
    whole = size_of(model)
    numbers = data.draw(st.integers(0, 3))
    devices = {number: data.draw(st.integers(1, whole)) for number in range(numbers)} or {"device": whole // 2 + 1}
    limits = {**devices, "host": data.draw(st.integers(1, whole)), "disk": math.inf}
    try:
        found = fp.device_map(model, limits, no_split=())
    except fp.BudgetError as error:
        assert re.search("must be in .* while it runs", str(error))
        return
    again = fp.device_map(model, found.by_path)
    assert again.memories == found.memories
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for memory, limit in limits.items():
        held = sum(each.numel() * each.itemsize for name, each in tensors.items() if found.memories[name] == memory)
        assert found.bytes[memory] == held == sum(row.bytes for row in found.rows if row.memory == memory)
        assert held + found.free.get(memory, 0) <= limit
    offloaded = [name for name in tensors if found.memories[name] in ("host", "disk")]
    if offloaded:
        layer = {name.rpartition(".")[0] for name in offloaded}
        sizes = [
            sum(t.numel() * t.itemsize for name, t in tensors.items() if name.rpartition(".")[0] == each)
            for each in layer
        ]
        assert found.free[found.devices[-1]] == max(sizes)


def stack(layers: int = 4) -> nn.Module:
    """256 bytes a layer, and a head that shares its weight with the embedding."""
    with torch.device("meta"):
        inner = nn.ModuleList(nn.Linear(7, 8) for _ in range(layers))
        model = nn.ModuleDict({"embedding": nn.Embedding(10, 8), "layers": inner, "head": nn.Linear(8, 10, bias=False)})
    model.head.weight = model.embedding.weight
    return model


def test_the_table() -> None:
    found = fp.device_map(stack(), {"device": 1100, "host": 2048})
    assert str(found).splitlines() == [
        "layer       memory  bytes",
        "embedding   device  320 B",
        "layers.0-1  device  512 B",
        "layers.2-3  host    512 B",
        "head        device    0 B",
        "",
        "memory  bytes  copies  kept free    limit",
        "device  832 B     0 B      256 B  1.1 KiB",
        "host    512 B     0 B        0 B  2.0 KiB",
        "layers.2 does not fit in 'device': 244 B (244 bytes) are missing",
    ]


def test_a_tree_of_parameters_and_a_function_are_models_too() -> None:
    layer = {"w": torch.empty(8, 8, device="meta"), "b": torch.empty(8, device="meta")}
    params = {"layers": [layer, {name: each.clone() for name, each in layer.items()}], "head": torch.empty(4)}
    found = fp.device_map(params, {"device": 590, "host": 1000})
    assert found.memories["layers/0/w"] == found.memories["layers/0/b"] == "host"
    assert found.memories["head"] == "device"
    assert fp.device_map((lambda params: 0, params), {"device": 590, "host": 1000}) == found
    module = made("GPT-2")[0]
    half = {"device": size_of(module) // 2, "host": size_of(module)}
    assert fp.device_map(fp.functional(module), half) == fp.device_map(module, half)


def test_devices_that_fit_without_room_for_other_layers() -> None:
    """The first device keeps no room if no memory is slower than devices. Accelerate finds no place here."""
    assert fp.device_map(Three(), {0: 136, 1: 100}, no_split=()).by_path == {"linear1": 0, "batchnorm": 0, "linear2": 1}


def test_the_last_device_runs_the_layers_of_the_host() -> None:
    found = fp.device_map(stack(), {0: 600, 1: 900, "host": 600})
    assert found.copies == {1: 320}
    assert found.by_path == {"embedding": 0, "layers.0": 0, "layers.1": 1, "layers.2-3": "host", "head": 0}
    assert found.free == {1: 256} and found.devices == [0, 1]


def test_a_tied_weight_has_a_copy_on_the_device_that_uses_it_last() -> None:
    found = fp.device_map(stack(3), {0: 900, 1: 900})
    assert found.by_path == {"embedding": 0, "layers.0": 0, "layers.1-2": 1, "head": 0}
    assert found.copies == {1: 320} and found.bytes == {0: 576, 1: 512}
    found = fp.device_map(stack(3), {0: 900, 1: 900, "host": 300})
    assert found.copies == {1: 320} and found.bytes["host"] == 0
    missing = r"head needs a copy of a tied weight, 320 bytes .* on 1: give it 188 bytes more, or fewer to those before"
    with pytest.raises(fp.BudgetError, match=missing):
        fp.device_map(stack(3), {0: 600, 1: 644, 2: 200})
    with pytest.raises(fp.BudgetError, match=r"from layers.1 on, 832 bytes .* Give 1 188 bytes more"):
        fp.device_map(stack(3), {0: 600, 1: 644})
    assert fp.device_map(stack(3), {0: 600, 1: 644 + 188}).copies == {1: 320}


def test_layers_by_hand() -> None:
    places = {"layers/0-1": "device", "*/3/bias": "disk", "layers/*": "host", "*": "device"}
    found = fp.device_map(stack(), places)
    assert found.by_path == {
        "embedding": "device", "layers.0-1": "device", "layers.2": "host", "layers.3.weight": "host",
        "layers.3.bias": "disk", "head": "device",
    }  # fmt: skip
    assert found.bytes == {"device": 832, "host": 480, "disk": 32}


@pytest.mark.parametrize(
    ("memories", "error", "said"),
    [
        ({"device": 400}, fp.BudgetError, "the model has 1344 bytes .* from embedding on, 1344 bytes .* 944 bytes"),
        (
            {"device": 400, "host": 500},
            fp.BudgetError,
            "from layers.0 on.* Give 'host' 844 bytes more, or a limit to 'disk'",
        ),
        ({"device": 200, "host": 5000}, fp.BudgetError, "embedding has 320 bytes .* must be in 'device' while it runs"),
        ({"host": 5000}, ValueError, 'give the bytes of "device"'),
        ({0: 500, "device": 500}, ValueError, 'give the bytes of "device", or those of devices by number'),
        ({"device": "much"}, ValueError, "'much' is no size"),
        ({"layers/0-1": "device"}, SpecError, "no pattern matches embedding.weight"),
        ({"layer/0": "host", "*": "device"}, SpecError, "pattern 'layer/0' matches nothing; the nearest are layers"),
        ({"layers/0-9": "host", "*": "cpu"}, SpecError, "'cpu' is no memory"),
        ({"head": "host", "*": "device"}, SpecError, "embedding.weight in 'device' and head.weight in 'host'"),
    ],
)
def test_errors(memories: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        fp.device_map(stack(), memories)


def test_an_unknown_class_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no_split='Linaer'.*nearest are Linear"):
        fp.device_map(stack(), {"device": 4000}, no_split=["Linaer"])
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        fp.device_map(nn.ReLU(), {"device": 4000})


def test_sizes_are_those_of_the_given_parameters() -> None:
    fn, params = fp.functional(torch.nn.Sequential(*[torch.nn.Linear(15, 16) for _ in range(12)]))
    wide = {name: each.double() for name, each in params.items()}
    assert sum(fp.device_map((fn, wide), {"device": "1MiB"}).bytes.values()) == 12 * 16 * 16 * 8


def test_layers_of_a_dict_are_in_the_order_of_their_numbers() -> None:
    layers = {"layers": {str(number): torch.zeros(256) for number in range(12)}}
    found = fp.device_map(layers, {0: "6KiB", 1: "1MiB"})
    assert found.by_path == {"layers/0-4": 0, "layers/5-11": 1}
