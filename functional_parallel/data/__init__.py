"""Batches: which samples each rank reads, and batches of unequal sizes made equal."""

from .sampler import Position, Sampler
from .uneven import UnevenBatchError, even_batches, looks_of, pad_batch, stay_in_step

__all__ = ["Position", "Sampler", "UnevenBatchError", "even_batches", "looks_of", "pad_batch", "stay_in_step"]
