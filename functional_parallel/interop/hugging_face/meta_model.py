"""Models of transformers on the meta device, made of a folder's config.json, with the buffers that they compute."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
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
        dtype: dtype of the parameters; None for that of config.json, or else `stored`.
        stored: a dtype in the files.
        changes: entries to use instead of those of config.json.
    """
    transformers, config = require_transformers(), _config(folder, model_class, changes)
    if model_class is None:
        named = getattr(config, "architectures", None) or [""]
        model_class = getattr(transformers, named[0], None)
        if model_class is None:
            raise CheckpointError(
                f"{folder / CONFIG}: its architecture {named[0]!r} is no class of transformers "
                f"{transformers.__version__}: give model_class=…, such as transformers.AutoModelForCausalLM"
            )
    config.name_or_path = str(folder)
    make = getattr(model_class, "from_config", None) or model_class._from_config
    dtype = dtype or config.dtype or stored
    with torch.device("meta"):
        model = make(config, dtype=dtype)
    if (folder / GENERATION).exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    _keep_types(model, dtype)
    return model.eval()


def _config(folder: Path, model_class: Any, changes: Mapping[str, Any]) -> Any:
    path, transformers = folder / CONFIG, require_transformers()
    if not path.exists():
        raise CheckpointError(f"{folder} has no {CONFIG}, which says what model its weights are of")
    raw = read_json(path)
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"{path}: quantization_config: its weights are quantized ({method}), which is not supported: take the "
            "folder of the model before quantization"
        )
    if raw.get("auto_map") and model_class is None:
        raise CheckpointError(
            f"{path}: auto_map: its code is in the folder ({', '.join(map(str, raw['auto_map'].values()))}), and is "
            "not run: give model_class=…, a class of transformers or of your own, if it has these weights"
        )
    of_class = getattr(model_class, "config_class", None)
    try:
        options = {**changes, "local_files_only": True, "return_unused_kwargs": True}
        if of_class is None:
            of_class, options = transformers.AutoConfig, {**options, "trust_remote_code": False}
        config, unknown = of_class.from_pretrained(folder, **options)
    except (ValueError, KeyError) as error:
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
