"""Models of transformers on the meta device, made of a folder's config.json, with the buffers that they compute."""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...errors import CheckpointError
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


def meta_model(folder: Path, model_class: Any, dtype: torch.dtype | None, stored: torch.dtype) -> Any:
    """Return the model of a folder without values.

    Args:
        folder: the folder.
        model_class: its class, or an Auto class; None for the class that config.json names.
        dtype: dtype of the parameters; None for that of config.json, or else `stored`.
        stored: a dtype in the files.
    """
    transformers, config = require_transformers(), _config(folder, model_class)
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


def _config(folder: Path, model_class: Any) -> Any:
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
        if of_class is not None:
            return of_class.from_pretrained(folder, local_files_only=True)
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} does not know model_type {raw.get('model_type')!r}: "
            f"take a version that does, or give model_class=… ({str(error).splitlines()[0]})"
        ) from None


def _keep_types(model: Any, dtype: torch.dtype) -> None:
    """Keep the parameters in float32 that a model marks so."""
    for pattern, kept in model._get_dtype_plan(dtype).items():
        for name, parameter in model.named_parameters():
            if re.search(pattern.replace("*", ".*"), name):
                parameter.data = parameter.data.to(kept)


def make_buffers(model: Any, saved: Container[str], device: torch.device) -> None:
    """Give values to the buffers that no file has: the model computes them, as for a new one."""
    for path, module in model.named_modules():
        mine = [name for name in module._buffers if f"{path}.{name}".lstrip(".") not in saved]
        for name in mine:
            if module._buffers[name] is not None:
                module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
        module._is_hf_initialized = not mine
    model.initialize_weights()
