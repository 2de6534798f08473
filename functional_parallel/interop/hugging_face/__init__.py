"""Hugging Face models: generation by models as they are."""

from .generation import CausalModel, EncoderDecoderModel, cached_model

__all__ = ["CausalModel", "EncoderDecoderModel", "cached_model"]
