"""Batches: which samples each rank reads, and batches of unequal sizes made equal."""

from .sampler import Position, Sampler
from .uneven import UnevenBatchError, batch_signature, check_same_call, even_batches, pad_batch

__all__ = ["Position", "Sampler", "UnevenBatchError", "batch_signature", "check_same_call", "even_batches", "pad_batch"]
