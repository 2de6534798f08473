"""The blocks of README and docs/ run on real processes too, and print there what the page states.

A page is one session, as in `test_docs`, in two processes. Blocks that fail there run again in four, after the blocks
that define their names, because some of them have a mesh of four ranks.
"""

from __future__ import annotations

import ast
import doctest
import os
import tempfile
from pathlib import Path

import pytest

from .processes import run_on_processes
from .test_docs import PAGES, blocks, name

WORLD_SIZES = (2, 4)
LONG = ("docs/inference.md", "docs/hugging_face.md")  # each rank imports transformers

# Blocks that no number of processes can run, by page and first line, with the reason. One that runs fails the test.
ONLY_SIMULATED = {
    (
        "docs/optimizers.md",
        ">>> sampler.epoch(0)                                    # of this process, which simulates all ranks here",
    ): "prints the samples that a process with all ranks reads; a rank of several reads its block",
    **{
        ("docs/asynchronous.md", head): "steps of all ranks by a clock; a process makes those of its own rank"
        for head in (
            "clock = fp.asynchronous.Clock(seconds=(1.0, 1.0, 5.0), jitter=0.1, seed=0)  # rank 2 is five times slower",
            ">>> steps, round(metrics.seconds)",
            "step = fp.asynchronous.rotating_server(loss, fp.optim.sgd(0.02), Mesh(data=3), clock=clock)",
            ">>> {rank: node.weights[0] for rank, node in state.nodes.items()}  # the turn of each rank's weights",
        )
    },
    **{
        ("docs/from_loss_to_collectives.md", head): "shows the handles of simulated ranks"
        for head in (
            '>>> for path, spec, shards in zip(("down", "up"), state.layout.specs, state.handles):',
            ">>> up, spec = state.handles[1], state.layout.specs[1]",
        )
    },
    **{
        place: "each process makes a folder of its own; a run of several gives all the same one"
        for place in (
            ("docs/hugging_face.md", ">>> import tempfile"),
            ("docs/hugging_face.md", ">>> fn_of_reward, rewards = fp.load_pretrained("),
            ("docs/how_do_i.md", ">>> import tempfile, transformers"),
        )
    },
    **{
        place: "a mesh of one rank, or of another number of ranks than the processes have"
        for place in (
            ("docs/compression.md", ">>> hosts = Mesh(node=2, local=2)"),
            ("docs/device_maps.md", ">>> class Residual(torch.nn.Module):"),
            ("docs/device_maps.md", '>>> found = fp.device_map((fn, params), {0: "1.5KB", 1: "1.5KB"})'),
            ("docs/memory_tiers.md", ">>> product = fp.compile("),
            (
                "docs/optimizers.md",
                ">>> late = fp.train_step(lambda w: w.square().sum() / 2, "
                "fp.optim.delayed(fp.optim.sgd(0.5), after=1), Mesh())",
            ),
        )
    },
    **{
        place: "draws parameters without a seed, which ranks would draw differently"
        for place in (
            ("docs/compression.md", ">>> import torch, functional_parallel as fp"),
            (
                "docs/compression.md",
                '>>> exact = fp.train_step(loss, fp.optim.adamw(1e-2), mesh, fp.chain(precision, fp.zero(3, "data")))',
            ),
            ("docs/optimizers.md", '>>> wide = {"w": torch.randn(128, 512)}'),
        )
    },
    (
        "docs/launching.md",
        ">>> import torch, functional_parallel as fp",
    ): "launches ranks, which a rank cannot do",
}


def run_blocks(rank: int, page: Path, chosen: list[int], folder: str) -> dict[int, str]:
    """Run the chosen blocks of a page in a folder; return the report of each, by the line on which it starts."""
    os.chdir(folder)
    names: dict[str, object] = {"__name__": "__page__"}
    runner = doctest.DocTestRunner()
    reports: dict[int, str] = {}
    for line, code in blocks(page):
        if line not in chosen:
            continue
        report: list[str] = []
        try:
            if ">>>" in code:
                test = doctest.DocTestParser().get_doctest(code, names, f"{name(page)}, {line}", str(page), line)
                runner.run(test, out=report.append, clear_globs=False)
                names.update(test.globs)
            else:
                exec(compile("\n" * line + code, str(page), "exec", dont_inherit=True), names)
        except Exception as error:
            report.append(f"{type(error).__name__}: {error}")
        reports[line] = "".join(report)
    return reports


def first_failures(page: Path, chosen: list[int], world_size: int) -> dict[int, str]:
    """Run blocks on processes; return the report of the first rank where each of those that fail does."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_on_processes(run_blocks, world_size, page, chosen, folder)
    reports = {line: [found[line] for found in ranks] for line in chosen}
    return {
        line: next(f"rank {rank} of {world_size}: {text}" for rank, text in enumerate(each) if text)
        for line, each in reports.items()
        if any(each)
    }


def with_definitions(found: list[tuple[int, str]], wanted: list[int]) -> list[int]:
    """Return the lines of the wanted blocks, and of those that define the names that these read."""
    needed: set[int] = set()
    names: set[str] = set()
    for line, code in reversed(found):
        reads, binds = reads_and_binds(code)
        if line in wanted or names & binds:
            needed.add(line)
            names = (names - binds) | reads
    return sorted(needed)


def reads_and_binds(code: str) -> tuple[set[str], set[str]]:
    """Return the names that a block reads before it binds them, and those that it binds."""
    if ">>>" in code:
        code = "".join(example.source for example in doctest.DocTestParser().get_examples(code))
    reads: set[str] = set()
    binds: set[str] = set()
    for statement in ast.parse(code).body:
        nodes = list(ast.walk(statement))
        found = [node for node in nodes if isinstance(node, ast.Name)]
        reads |= {node.id for node in found if isinstance(node.ctx, ast.Load)} - binds
        binds |= {node.id for node in found if isinstance(node.ctx, ast.Store)}
        binds |= {
            (alias.asname or alias.name).split(".")[0]
            for node in nodes
            for alias in getattr(node, "names", ())
            if isinstance(alias, ast.alias)
        }
        binds |= {statement.name} if isinstance(statement, ast.FunctionDef | ast.ClassDef) else set()
    return reads, binds


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if name(page) in LONG else ()) for page in PAGES if blocks(page)],
    ids=lambda page: name(page),
)
def test_a_page_runs_on_processes(page: Path) -> None:
    found = blocks(page)
    heads = {line: code.splitlines()[0] for line, code in found}
    failures: dict[int, str] = {}
    wanted = list(heads)
    for size in WORLD_SIZES:
        again = first_failures(page, with_definitions(found, wanted), size)
        failures = {line: failures.get(line, "") + again[line] for line in wanted if line in again}
        wanted = list(failures)
        if not wanted:
            break
    listed = {line for line, head in heads.items() if (name(page), head) in ONLY_SIMULATED}
    report = "\n".join(f"{name(page)}:{line + 1}\n{failures[line]}" for line in sorted(failures.keys() - listed))
    assert not report, f"blocks that run in one process and not on several:\n{report}"
    able = [f"{name(page)}:{line + 1}: {heads[line]}" for line in sorted(listed - failures.keys())]
    assert not able, f"blocks that are listed as ones that cannot run on processes, and can: {able}"


def test_what_is_listed_exists() -> None:
    heads = {(name(page), code.splitlines()[0]) for page in PAGES for _, code in blocks(page)}
    assert ONLY_SIMULATED.keys() <= heads
