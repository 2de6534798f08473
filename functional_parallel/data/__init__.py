"""Batches: which samples each rank reads, and batches of unequal sizes made equal."""

from .sampler import Sampler
from .uneven import UnevenBatchError, even_batches, looks_of, pad_batch, stay_in_step

__all__ = ["Sampler", "UnevenBatchError", "even_batches", "looks_of", "pad_batch", "stay_in_step"]
