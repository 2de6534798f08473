"""How many equivalence checks a second hypothesis makes: a small function, 8 simulated ranks.

    python benchmarks/equivalence_rate.py --examples 300

Each example draws integers, computes value and gradients under the plan and without it, and compares them to the bit.
The plan is compiled once per shape, as it is in a test of one's own function; the second row
takes another plan each time, so every example is traced, partitioned and staged as well.
"""

from __future__ import annotations

import argparse
import time

import report
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.testing.strategies import integers
from sharding_specs import Mesh, P

MESH = Mesh(data=4, tensor=2)
SPECS = {"w1": P(None, "tensor"), "w2": P("tensor")}
SHAPES = {"w1": (4, 8), "w2": (8, 4)}

Params = dict[str, torch.Tensor]


def loss(params: Params, x: torch.Tensor) -> torch.Tensor:
    return ((x @ params["w1"]).relu() @ params["w2"]).sum()


@st.composite
def arguments(draw: st.DrawFn) -> tuple[Params, torch.Tensor]:
    return {name: draw(integers(shape)) for name, shape in SHAPES.items()}, draw(integers((8, 4)))


def rate(anew: bool, examples: int) -> float:
    """Examples per second, the first included."""
    compiled = fp.compile(fp.grad_and_value(plan(0)(loss)), MESH)

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(arguments=arguments(), stage=st.integers(0, 3))
    def check(arguments: tuple[Params, torch.Tensor], stage: int) -> None:
        params, x = arguments
        if anew:
            fp.testing.assert_equivalent(loss, plan(stage), MESH, params, x, exact=True)
            return
        grads, value = compiled(params, x)
        want_grads, want = fp.grad_and_value(loss)(params, x)
        assert torch.equal(value, want)
        assert all(torch.equal(grads[name], want_grads[name]) for name in grads)

    began = time.perf_counter()
    check()
    return examples / (time.perf_counter() - began)


def plan(stage: int) -> fp.transforms.Plan:
    return fp.chain(fp.tensor_parallel("tensor", SPECS), fp.zero(stage, "data"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        ["compiled once", options.examples, f"{rate(False, options.examples):.0f}"],
        ["another plan each time", options.examples, f"{rate(True, options.examples):.0f}"],
    ]
    text = report.table(["8 simulated ranks", "examples", "per second"], rows)
    print(text)
    if options.write:
        report.write("equivalence rate", text)


if __name__ == "__main__":
    main()
