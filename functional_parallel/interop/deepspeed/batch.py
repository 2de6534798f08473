"""The three batch sizes of DeepSpeed: train_batch_size = micro-batch · accumulation steps · data ranks."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BatchSizes", "batch_sizes"]


class BatchSizes(NamedTuple):
    """Batch sizes that fit together."""

    train: int  # samples of a step
    micro: int  # samples of a microbatch of a rank
    accumulation: int  # microbatches of a step


def batch_sizes(train: int | None, micro: int | None, accumulation: int | None, ranks: int) -> BatchSizes:
    """Compute the batch sizes that are not given."""
    if train is None and micro is None:
        raise ValueError("Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided")
    if accumulation is None:
        accumulation = 1 if train is None or micro is None else train // micro // ranks
    if train is None:
        assert micro is not None
        train = micro * accumulation * ranks
    elif micro is None:
        micro = train // ranks // accumulation
    if train != micro * accumulation * ranks or not train:
        raise ValueError(
            "train_batch_size is not equal to train_micro_batch_size_per_gpu · gradient_accumulation_steps · ranks: "
            f"{train} != {micro} · {accumulation} · {ranks}"
        )
    return BatchSizes(train, micro, accumulation)
