"""Saving in a loop: every n-th step, in a thread, with the last few checkpoints kept."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from ..quantities import is_positive_int
from .folder import newest
from .opened import Checkpoint
from .saving import Copies, Save, require_only


class Saves(Protocol):
    def begin_save(self, state: Any, path: Path, **options: Any) -> Save: ...


def inspect(path: str | Path, step: int | None = None) -> Checkpoint:
    """Open a checkpoint to read its step, leaves, mesh and other metadata. No tensor is read.

    >>> import tempfile, torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> train = fp.train_step(lambda w, x: (x @ w).square().mean(), fp.optim.sgd(0.1), Mesh(data=2))
    >>> folder = tempfile.mkdtemp()
    >>> train.save(train.init(torch.zeros(2)), folder, extra={"run": "first"}, data=fp.Position(0, 7))
    >>> info = fp.checkpoint.inspect(folder)
    >>> info.step, info.mesh, info.extra, info.data_position
    (0, Mesh(data=2), {'run': 'first'}, Position(epoch=0, batch=7))
    >>> info.leaves["params/~"]
    LeafInfo(shape=(2,), dtype=torch.float32)
    >>> info.verify()

    Args:
        path: folder of a run's checkpoints, or of one checkpoint.
        step: step of the checkpoint; by default the newest.

    Raises:
        CheckpointError: if there is none.
        DamagedCheckpointError: if its description is damaged, or a file is missing or was cut. `verify` reads them.
        RemovedCheckpointError: if a run removed it just now, and no other has this step.
    """
    return newest(Path(path), step, lambda found: found)


class Saver:
    """Saves every n-th state of a loop. A thread writes while training continues.

    >>> import tempfile, torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> train = fp.train_step(lambda w, x: ((x @ w - 1) ** 2).mean(), fp.optim.sgd(0.1), Mesh(data=2))
    >>> state, folder = train.init(torch.zeros(2)), tempfile.mkdtemp()
    >>> with fp.checkpoint.Saver(folder, every=2, keep=2) as saver:
    ...     while state.step < 7:
    ...         state, metrics = train(state, torch.eye(2))
    ...         saved = saver(train, state, extra={"loss": float(metrics.loss)})
    >>> fp.checkpoint.inspect(folder).step
    6

    Each process copies the boxes that it writes to main memory before a call returns, so a later step may donate the
    state. There is one copy, which the next save uses again: a save begins when the one before is committed.

    Args:
        path: folder of the run's checkpoints, which all hosts share.
        every: number of steps from one save to the next.
        keep: number of checkpoints to keep. Older checkpoints are removed when the next is safe. None keeps all.
        asynchronous: whether a thread writes. If not, a call returns when the checkpoint is safe.
        busy: "wait" for the save before, or "skip" this one, if a process has not finished writing.
        only: "trained" to leave out frozen parameters, as for `train.save`.

    Raises:
        ValueError: if an argument has another value.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        every: int = 1,
        keep: int | None = None,
        asynchronous: bool = True,
        busy: str = "wait",
        only: str | None = None,
    ) -> None:
        require_only(only)
        if not is_positive_int(every) or not (keep is None or is_positive_int(keep)):
            raise ValueError(f"Saver(every={every!r}, keep={keep!r}): positive numbers, or keep=None to keep all")
        if busy not in ("wait", "skip"):
            raise ValueError(f"Saver(busy={busy!r}): it is 'wait' or 'skip'")
        self.path, self.every, self.keep = Path(path), every, keep
        self.asynchronous, self.busy, self.only = asynchronous, busy, only
        self._last: Save | None = None
        self._copies = Copies() if asynchronous else None

    def __call__(self, train: Saves, state: Any, *, data: Any = None, extra: Any = None) -> bool:
        """Save a state if its step is a multiple of `every`. Every process must call it.

        Args:
            train: the training step.
            state: its state.
            data, extra: as for `train.save`.

        Returns:
            Whether a save has begun.

        Raises:
            CheckpointError: on every process, if the save before failed on one, or this save cannot begin. The state is
                unchanged, so training can continue.
        """
        if state.step % self.every:
            return False
        if self._last is not None and self.busy == "skip" and self._last.is_running_anywhere():
            return False
        self.wait()
        chosen = {"keep": self.keep, "copies": self._copies, "only": self.only}
        save = train.begin_save(state, self.path, data=data, extra=extra, **chosen)
        self._last = save
        if self.asynchronous:
            save.start()
        else:
            save.run()
            self.wait()
        return True

    def wait(self) -> None:
        """Wait until the last save is committed. Every process must call it.

        Raises:
            CheckpointError: on every process, if the save failed on one.
        """
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        elif self._last is not None:  # the other processes may not come
            self._last.join()
