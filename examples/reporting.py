"""Progress, and a plot, with tqdm and matplotlib where they are installed; a line of text where not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import functional_parallel as fp


def progress(total: int, done: int) -> Any:
    """An object with `update(loss=, tokens_per_s=)` and `close()`; silent on all ranks but the first."""
    if not fp.is_main_rank():
        return _Silent()
    try:
        from tqdm import tqdm
    except ImportError:
        return _Lines(total, done)
    return _Bar(tqdm(total=total, initial=done, unit="step", dynamic_ncols=True))


class _Silent:
    def update(self, loss: float, tokens_per_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class _Bar:
    def __init__(self, bar: Any) -> None:
        self.bar = bar

    def update(self, loss: float, tokens_per_s: float) -> None:
        self.bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
        self.bar.update()

    def close(self) -> None:
        self.bar.close()


class _Lines:
    """One line every tenth of the run."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self.first, self.began = total, done, done, time.perf_counter()

    def update(self, loss: float, tokens_per_s: float) -> None:
        self.done += 1
        if self.done % max(self.total // 10, 1) and self.done != self.total:
            return
        per_step = (time.perf_counter() - self.began) / (self.done - self.first)
        left = (self.total - self.done) * per_step
        print(
            f"step {self.done}/{self.total}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  {left:.0f} s left",
            flush=True,
        )

    def close(self) -> None:
        pass


def curve(rewards: list[float], path: Path, title: str) -> None:
    """The mean reward of each step, as a picture."""
    if fp.is_main_rank() and (plt := _pyplot()) is not None:
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        axes.plot(range(1, len(rewards) + 1), rewards, color="tab:blue")
        axes.set(xlabel="step", ylabel="mean reward of the samples", title=title, ylim=(0, 1))
        _write(figure, path, "plot of the rewards")


def plot(losses: list[float], held_out: float, path: Path) -> None:
    """The loss over steps, and what held-out text scored, as a picture."""
    if (plt := _pyplot()) is None:
        return
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8, color="tab:blue", label="training batch")
    axes.axhline(held_out, color="tab:orange", linestyle="--", label=f"held-out files, at the end: {held_out:.3f}")
    axes.axhline(2.4, color="tab:gray", linestyle=":", label="a bigram table: 2.4")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Byte-level GPT")
    axes.legend()
    _write(figure, path, "loss plot")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install functional-parallel[examples])")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _write(figure: Any, path: Path, what: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    figure.clear()
    print(f"{what}: {path}")
