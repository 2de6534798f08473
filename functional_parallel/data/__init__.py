"""Batches of training data: the samples that each rank reads, and padding for batches of unequal sizes."""

from .pad_to import pad_to
from .sampler import Position, Sampler
from .uneven import batch_signature, check_same_call, even_batches, pad_batch
