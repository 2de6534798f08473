"""The page for people who come from another library: tables of what they have and what they write here.

`python -m tests.migration_page` writes docs/migration.md. `tests/test_migration.py` runs every row.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from .migration import (
    of_accelerate,
    of_ddp,
    of_deepspeed,
    of_dtensor,
    of_fsdp2,
    of_jax,
    of_megatron,
    of_torch,
    of_transformers,
)
from .migration.of_torch import AS_IN_TORCH, NO_EFFECT, REFUSED, Habit
from .migration.row import NAMES, Row

__all__ = ["PAGE", "TABLES", "page"]

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "migration.md"

TABLES: dict[str, tuple[list[Row], str]] = {
    "DDP": (of_ddp.ROWS, "`DistributedDataParallel` and the calls of its loop."),
    "FSDP2": (of_fsdp2.ROWS, "`fully_shard` is ZeRO stage 3."),
    "DTensor": (
        of_dtensor.ROWS,
        "A spec has one entry per dim of the tensor, and names mesh axes. A list of placements has one entry per dim "
        "of the mesh. A row with `lambda x:` is a line in the body of `fp.shard_map`, or of the model where noted.",
    ),
    "DeepSpeed": (of_deepspeed.ROWS, "Keys of `ds_config.json`, and calls of the engine."),
    "Megatron": (
        of_megatron.ROWS,
        "Arguments of Megatron-LM, and names of `megatron.core`. The model stays a model for one device: the rules "
        "name its parameters.",
    ),
    "transformers": (
        of_transformers.ROWS,
        "A model of transformers in parallel as it is: by transformers itself, by OSLO, or by parallelformers.",
    ),
    "Accelerate": (of_accelerate.ROWS, "Methods and arguments of `Accelerator`."),
    "JAX": (
        of_jax.ROWS,
        "The functions have the same meaning. Gradients precede the value, and a collective has a type. A row with "
        "`lambda x:` is a line in the body of `fp.shard_map`, or of the model where noted.",
    ),
}

_INTRODUCTION = """\
# Migration

This page has a table per library: code of that library, and its replacement here. Every row is a test. "Nothing
to write" means that the library does this in any case. "Not available" links to the limits.

Chunks, gradient accumulation steps and microbatches are the same thing here: `fp.accumulate(n)`, or
`fp.pipeline("pipe", microbatches=n)`.

`python -m tests.migration_page` writes this page from `tests/migration`. `tests/test_migration.py` runs the rows."""

_NAMES = """\
## Names in the tables

The rows use these names. A plan is a transform, or a chain of them; its mesh has the axes that it names."""

_SCRIPT = """\
## A script before and after

`examples/ddp_loop.py` trains with DDP, AdamW in two groups, a cosine schedule, clipping and accumulation.
`examples/prepared_loop.py` is the same script with this library and ZeRO-1. The losses are the same to 1e-5
(`tests/interop/test_prepare.py`).

`examples/ddp_resnet.py` and `examples/prepared_resnet.py` are another such pair: a ResNet with batch norm, evaluation
and a checkpoint per epoch, in 15 changed lines (`tests/interop/test_ported_resnet.py`)."""


_HABITS = """\
## torch's habits

A loop of torch changes more than values: it hooks into a backward, edits the optimizer, or writes into parameters. A
row has the effect that this has between two steps of `fp.prepare`: none on a later step, the effect as in torch, or an
error of the class `SideEffectError`. The error names the object, the change, and the replacement. `fp.functional`
does the same, as far as the module's forward is concerned.

`tests/interop/test_habits.py` compares each row with a loop of torch, and any sequence of them. It finds public names
of `nn.Module`, `torch.optim.Optimizer` and the schedulers, and names of tensors that change state, without a row."""

_EFFECTS = {NO_EFFECT: "no effect on a later step", AS_IN_TORCH: "as in torch", REFUSED: "refused"}


def page() -> str:
    """Return the page as Markdown."""
    titles = ["Names in the tables", *TABLES, "torch's habits", "A script before and after"]
    links = [f"- [{title}](#{title.lower().replace(' ', '-').replace(chr(39), '')})" for title in titles]
    parts = [_INTRODUCTION, "", *links, "", _NAMES, "", f"```python\n{_names()}```"]
    for title, (rows, lead) in TABLES.items():
        parts += [f"\n## {title}\n", f"{_wrapped(lead)}\n", f"| {title} | here | |", "|---|---|---|"]
        parts += [_row(each) for each in rows]
    parts += ["", _HABITS, "", "| torch | effect here | |", "|---|---|---|", *map(_habit, of_torch.ROWS)]
    parts += ["", _SCRIPT, "", f"```diff\n{_diff()}```"]
    return "\n".join(parts) + "\n"


def _names() -> str:
    return NAMES.read_text().partition('"""\n\n')[2].replace("  # noqa: F401", "")


def _row(row: Row) -> str:
    here = _code(row.right) if row.right else "not available" if row.limit else "nothing to write"
    note = f"see [{row.limit}](what_works.md#limits)" if row.limit else row.note
    return f"| {_code(row.left)} | {here} | {note} |"


def _habit(row: Habit) -> str:
    names = "<br>".join(f"{kind}: {_listed(names)}" for kind, names in row.names.items())
    return f"| {names} | {_EFFECTS[row.verdict]} | {row.note} |"


def _listed(names: str) -> str:
    found = re.findall(r"\([^()]*(?:\(\)[^()]*)?\)|\S+", names)
    return ", ".join(name[1:-1] if name.startswith("(") else f"`{name}`" for name in found)


def _code(lines: str) -> str:
    return "<br>".join(f"`{line}`".replace("|", "\\|") for line in lines.splitlines())


def _wrapped(text: str, width: int = 120) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _diff() -> str:
    names = ("examples/ddp_loop.py", "examples/prepared_loop.py")
    before, after = (_without_docstring((ROOT / name).read_text()) for name in names)
    return "".join(_unblank(difflib.unified_diff(before, after, *names, n=2)))


def _without_docstring(script: str) -> list[str]:
    return re.sub(r'\A""".*?"""\n\n', "", script, flags=re.DOTALL).splitlines(keepends=True)


def _unblank(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield line.rstrip() + "\n"  # editors strip the space of an unchanged empty line


if __name__ == "__main__":
    PAGE.write_text(page())
