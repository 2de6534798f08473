"""Models of transformers on the meta device, made of a folder's config.json, with the buffers that they compute."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from sharding_specs.rules import nearest

from ... import _torch
from ...errors import CheckpointError
from .weight_names import first_names
from .weights_folder import CONFIG, GENERATION, read_json


def require_transformers() -> ModuleType:
    try:
        import transformers
        import transformers.conversion_mapping
    except ImportError as error:
        raise ModuleNotFoundError(
            f"folders of Hugging Face models need transformers 5 ({error}): "
            "pip install 'functional-parallel[hugging-face]'"
        ) from None
    return transformers


def meta_model(
    folder: Path, model_class: Any, dtype: torch.dtype | None, stored: torch.dtype, changes: Mapping[str, Any]
) -> Any:
    """Return the model of a folder without values.

    Args:
        folder: the folder.
        model_class: its class, or an Auto class; None for the class that config.json names.
        dtype: dtype of the parameters; None for the dtype in config.json, or else `stored`.
        stored: a dtype in the files.
        changes: entries that replace entries of config.json.
    """
    transformers, config = require_transformers(), _config(folder, model_class, changes)
    model_class = model_class or _architecture(folder / CONFIG, config)
    config.name_or_path = str(folder)
    automatic = getattr(model_class, "from_config", None)
    make = model_class._from_config if automatic is None else partial(automatic, trust_remote_code=False)
    dtype = dtype or config.dtype or stored
    try:
        with torch.device("meta"):
            model = make(config, dtype=dtype)
    except Exception as error:  # of any code, with the values of a file
        raise CheckpointError(
            f"{folder / CONFIG}: {model_class.__name__} cannot be made of it in {dtype}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if (folder / GENERATION).exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    _keep_types(model, dtype)
    return model.eval()


def _config(folder: Path, model_class: Any, changes: Mapping[str, Any]) -> Any:
    path, transformers = folder / CONFIG, require_transformers()
    if not path.exists():
        raise CheckpointError(f"{folder} has no {CONFIG}, which says what model its weights are of")
    raw = read_json(path)
    _refuse_quantized(path, raw)
    if raw.get("auto_map") and model_class is None:
        names = raw["auto_map"].values() if isinstance(raw["auto_map"], dict) else [raw["auto_map"]]
        raise CheckpointError(
            f"{path}: auto_map: its code is in the folder ({', '.join(map(str, names))}), and is not run: give "
            "model_class=…, a class of transformers or of your own, if it has these weights"
        )
    of_class = getattr(model_class, "config_class", None)
    try:
        options = {**changes, "local_files_only": True, "return_unused_kwargs": True}
        if of_class is None:
            of_class, options = transformers.AutoConfig, {**options, "trust_remote_code": False}
        config, unknown = of_class.from_pretrained(folder, **options)
    except Exception as error:  # of any code, with the values of a file
        if raw.get("model_type") in transformers.CONFIG_MAPPING or model_class is not None:
            raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} does not know model_type {raw.get('model_type')!r}: "
            f"take a version that does, or give model_class=… ({str(error).splitlines()[0]})"
        ) from None
    if unknown := sorted(unknown.keys() & changes.keys()):
        near = nearest(unknown[0], [*config.to_dict(), "num_labels"])
        raise CheckpointError(
            f"load_pretrained: config= has {', '.join(unknown)}, and {type(config).__name__} has no such entry: the "
            f"nearest are {', '.join(near)}"
        )
    return config


def _refuse_quantized(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config that has quantized weights, also of one of the models that it consists of."""
    for key, value in config.items():
        if key in ("quantization_config", "compression_config") and value is not None:
            method = value.get("quant_method", "unknown") if isinstance(value, dict) else value
            raise CheckpointError(
                f"{path}: {key}: its weights are quantized ({method}), which is not supported: take the folder of the "
                "model before quantization"
            )
        if isinstance(value, dict):
            _refuse_quantized(path, value)


def _architecture(path: Path, config: Any) -> Any:
    """Return the class that a config names."""
    transformers = require_transformers()
    named = getattr(config, "architectures", None) or [""]
    found: Any = getattr(transformers, str(named[0]), None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise CheckpointError(
            f"{path}: its architecture {named[0]!r} is no model of transformers {transformers.__version__}: give "
            "model_class=…, such as transformers.AutoModelForCausalLM"
        )
    takes = getattr(found, "config_class", None)
    if takes is not None and not isinstance(config, takes):
        raise CheckpointError(
            f"{path}: its architecture {named[0]} takes {takes.__name__}, and its model_type "
            f"{config.model_type!r} is {type(config).__name__}: correct one, or give model_class=…"
        )
    return found


def _keep_types(model: Any, dtype: torch.dtype) -> None:
    """Keep the parameters in float32 that a model marks so."""
    for pattern, kept in model._get_dtype_plan(dtype).items():
        for name, parameter in model.named_parameters():
            if re.search(pattern.replace("*", ".*"), name):
                parameter.data = parameter.data.to(kept)


def initialise(model: Any, read: Container[str], device: torch.device, seed: int) -> None:
    """Give values to the buffers and parameters that are not read: the model makes them, as those of a new model.

    Parameters are drawn on the CPU, where the numbers of a seed are equal on all machines.
    """
    first, cpu, again = first_names(model), torch.device("cpu"), set[str]()
    made = dict[int, torch.nn.Parameter]()  # by the one without values, which several modules may have
    for path, module in model.named_modules():
        for name, x in [*module._buffers.items(), *module._parameters.items()]:
            full = f"{path}.{name}".lstrip(".")
            if first.get(full, full) in read:
                continue
            again.add(path)
            if name in module._buffers:
                module._buffers[name] = None if x is None else torch.empty_like(x, device=device)
            elif x is not None:
                empty = torch.empty_like(x, device=cpu if x.requires_grad else device)
                module._parameters[name] = made.setdefault(id(x), torch.nn.Parameter(empty, x.requires_grad))
                again.update(path[: dot.start()] for dot in re.finditer(r"^|\.", path))  # may initialise those in them
    for path, module in model.named_modules():
        module._is_hf_initialized = path not in again
    generator = _torch.default_generator(cpu)
    assert generator is not None
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        model.initialize_weights()
    finally:
        generator.set_state(before)
