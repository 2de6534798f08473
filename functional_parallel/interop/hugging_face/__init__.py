"""Hugging Face models: folders of safetensors in and out, and generation by models as they are."""

from .exported import save_pretrained
from .generation import CausalModel, EncoderDecoderModel, cached_model
from .pretrained import load_pretrained

__all__ = ["CausalModel", "EncoderDecoderModel", "cached_model", "load_pretrained", "save_pretrained"]
