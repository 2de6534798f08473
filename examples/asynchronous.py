"""How well asynchronous methods converge with more and more workers, on simulated ranks with a seeded clock.

    python examples/asynchronous.py --workers 1 2 4 8 16 --save runs/asynchronous.png

Every run uses the same number of gradients, so with more workers each takes fewer steps. The parameter server makes an
update of each gradient; synchronous training makes one of the mean over all workers. One worker of several is five
times slower. Synchronous training waits for it: the last column is the time of the widest run, in steps of a fast
worker.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh

WARNING = (
    "Warning, as it was published: with more workers the weights drift apart, and convergence suffers. It does so for "
    "every method here that does not wait; measure it for your model before you use one."
)
WIDTH, SAMPLES, SLOW = 16, 8, 5.0


class Run(NamedTuple):
    """The held-out loss as gradients are used, and the time of all of them."""

    gradients: list[int]
    losses: list[float]
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--gradients", type=int, default=1280, help="of each run; a multiple of the workers")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--inner", type=int, default=8, help="steps between two exchanges of local SGD and DiLoCo")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write a picture; needs matplotlib")
    args = parser.parse_args()
    runs = {name: {n: run(args, n) for n in args.workers} for name, run in METHODS.items()}
    print(f"held-out loss after {args.gradients} gradients of {SAMPLES} samples\n")
    print(f"{'method':<28}" + "".join(f"{f'{n} workers':>12}" for n in args.workers) + "   time")
    for name, by_workers in runs.items():
        losses = "".join(f"{each.losses[-1]:>12.4g}" for each in by_workers.values())
        print(f"{name:<28}{losses}  {by_workers[max(args.workers)].seconds:>5.0f}")
    print(f"\n{WARNING}")
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        draw(runs, args.save)
        print(f"picture: {args.save}")


# --- the model ---


def network(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ params["hidden"]) @ params["out"]


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (network(params, x) - network(TEACHER, x)).square().mean()


def parameters(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draws = {"hidden": (WIDTH, WIDTH), "out": (WIDTH, 1)}
    return {name: torch.randn(shape, generator=generator) / WIDTH**0.5 for name, shape in draws.items()}


def batch(number: int, samples: int = SAMPLES) -> Tensor:
    return torch.randn((samples, WIDTH), generator=torch.Generator().manual_seed(number))


TEACHER, HELD_OUT = parameters(0), batch(10**6, 1024)


# --- the methods ---


def clock(workers: int) -> fp.asynchronous.Clock:
    return fp.asynchronous.Clock((*[1.0] * (workers - 1), SLOW if workers > 1 else 1.0), jitter=0.2)


def asynchronous(make: Callable[..., Any], **options: Any) -> Callable[[argparse.Namespace, int], Run]:
    """A run of one method, whose steps are those of single workers."""

    def run(args: argparse.Namespace, workers: int) -> Run:
        bound = {name: choose(workers) for name, choose in options.items()}
        step = make(loss, fp.optim.sgd(args.rate), Mesh(worker=workers), clock=clock(workers), **bound)
        state = step.init(parameters(1))
        shown = Run([], [], 0.0)
        for number in range(args.gradients):
            try:
                state, metrics = step(state, batch(number))
            except fp.NonFiniteError:  # it diverged
                return Run([number], [float("inf")], state.seconds)
            if (number + 1) % (args.gradients // 16) == 0:
                shown.gradients.append(number + 1)
                shown.losses.append(loss(step.params(state), HELD_OUT).item())
        return shown._replace(seconds=metrics.seconds)

    return run


def replicas(plan: Callable[[int], Any]) -> Callable[[argparse.Namespace, int], Run]:
    """A run of a plan of `fp.train_step`, whose steps are those of all workers together."""

    def run(args: argparse.Namespace, workers: int) -> Run:
        train = fp.train_step(loss, fp.optim.sgd(args.rate), Mesh(worker=workers), plan(args.inner))
        state, pace = train.init(parameters(1)), clock(workers)
        shown = Run([], [], 0.0)
        for step in range(args.gradients // workers):
            state, _ = train(state, torch.cat([batch(step * workers + rank) for rank in range(workers)]))
            if (step + 1) % args.inner == 0:
                shown.gradients.append((step + 1) * workers)
                shown.losses.append(loss(train.params(state), HELD_OUT).item())
        each = [sum(pace.duration(rank, step) for step in range(state.step)) for rank in range(workers)]
        return shown._replace(seconds=max(each))

    return run


METHODS = {
    "synchronous (staleness 0)": asynchronous(fp.asynchronous.parameter_server, staleness=lambda n: 0),
    "parameter server": asynchronous(fp.asynchronous.parameter_server, staleness=lambda n: 6 * n),
    "rotating server": asynchronous(fp.asynchronous.rotating_server, staleness=lambda n: n),
    "local SGD": replicas(lambda inner: fp.local_sgd("worker", inner=inner)),
    "DiLoCo": replicas(lambda inner: fp.diloco("worker", inner=inner)),
}


def draw(runs: dict[str, dict[int, Run]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name, by_workers in runs.items():
        workers = list(by_workers)
        left.plot(workers, [each.losses[-1] for each in by_workers.values()], marker="o", label=name)
        most = by_workers[max(workers)]
        right.plot(most.gradients, most.losses, label=name)
    left.set(xscale="log", yscale="log", xlabel="workers", ylabel="held-out loss", title="after equally many gradients")
    left.set_xticks(workers, [str(each) for each in workers])
    left.minorticks_off()
    right.set(yscale="log", xlabel="gradients used", title=f"with {max(workers)} workers, one five times slower")
    right.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
