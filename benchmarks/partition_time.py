"""How long a model takes from function to flat program, at several depths, now and on an older checkout.

    git worktree add /tmp/before v0.9
    python benchmarks/partition_time.py --layers 12 24 48 96 --old /tmp/before --first-step

Nothing is computed: parameters and tokens are shapes without storage. GPT-3 is 12288 wide with 96 heads over 2048
tokens; its layers are a plain loop, or one with its block marked by `fp.repeated`. Hugging Face's Llama, from a
configuration with 256 tokens of vocabulary, has its layers as modules. `staging_cases.py` has the models and the plans.

Each row runs in processes of its own, the two checkouts in turn, and cells are medians of `--repeat` runs. Seconds are
processor time of one thread, after a program of 2 other layers has filled torch's caches. The program is then lowered
again, for the seconds of each phase: until it is traced, partitioned, differentiated and typed; its passes; and the cut
of a pipeline. With `--first-step` a small model also runs two steps: the first one, without the time of the second, is
the time in which the program's code is generated. With `--calls` Python's calls are counted, which other programs on
the machine do not change. `--profile` shows where the time goes. A run of all rows takes hours. With `--rows` each row
is written to a file when it is measured, and a later run with the same file measures only the rows that it lacks.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import report
import torch
from staging_cases import MODELS, PLANS, Case, model_of

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("traced", "passes", "cut")
TARGETS = (  # of the deepest model, relative to the old code at the least depth
    ("trace, partition, derivatives and types", MODELS, "traced", 1.2),
    ("whole lowering, marked", ("marked",), "seconds", 2.0),
    ("whole lowering, loop", ("loop",), "seconds", 2.5),
    ("whole lowering, modules", ("modules",), "seconds", 2.5),
)
PER_OP = 100  # µs of the first step, at most

Row = dict[str, Any]


class Key(NamedTuple):
    model: str
    plan: str
    layers: int


def main() -> None:
    args = arguments()
    if args.here:
        print(json.dumps(measure(args)))
        return
    models = [name for name in MODELS if name in args.model]
    keys = [Key(model, plan, layers) for model in models for plan in args.plan for layers in args.layers]
    found = {key: in_turn(key, args) for key in keys}
    tables = [report.table(*depths(found, args.calls)), report.table(*phases(found))]
    if args.first_step:
        tables.append(report.table(*first_steps(found)))
    if args.old or args.first_step:
        tables.append(report.table(("target", "measured", "at most"), list(targets(found, args))))
    text = "\n\n".join(tables)
    print(text)
    if args.write:
        report.write("partition time", text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["loop", "marked", "modules"])
    parser.add_argument("--plan", choices=PLANS, nargs="+", default=list(PLANS))
    parser.add_argument("--old", type=Path, metavar="PATH", help="another checkout, measured in turn with this one")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each row")
    parser.add_argument("--first-step", action="store_true", help="run small models too, for the first step")
    parser.add_argument("--calls", action="store_true", help="count Python's calls too, in a run of their own")
    parser.add_argument("--profile", type=int, metavar="LINES", help="print the functions that take most")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="where rows are kept, one JSON line each")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks.md")
    parser.add_argument("--here", choices=["lower", "step"], help="one row in this process, as JSON")
    args = parser.parse_args()
    if args.profile:
        args.here = "lower"
    return args


# --- one row, in a process of its own ---


def measure(args: argparse.Namespace) -> Row:
    torch.set_num_threads(1)
    (name, *_), (plan, *_), (layers, *_) = args.model, args.plan, args.layers
    is_small = args.here == "step"
    Case(model_of(name, 2, small=not is_small), PLANS["data"]).lower()
    case = Case(model_of(name, layers, small=is_small), PLANS[plan])
    if is_small:
        return stepped(case)
    with counted(args.calls or bool(args.profile), args.profile) as profiler:
        seconds, program = timed(case.lower)
    programs = programs_of(program)
    row = {
        "ops": sum(1 for part in programs for _ in part.traced.nodes),
        "collectives": sum(sum(part.counts().values()) for part in programs),
        "calls": profiler.calls,
        "seconds": seconds,
        "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    return row | phases_of(program)


class counted:
    """Counts Python's calls in a block, if told to, and prints the functions that take most."""

    def __init__(self, counts: bool, lines: int | None) -> None:
        self.profiler, self.lines = cProfile.Profile() if counts else None, lines
        self.calls: int | None = None

    def __enter__(self) -> counted:
        if self.profiler is not None:
            self.profiler.enable()
        return self

    def __exit__(self, *_: object) -> None:
        if self.profiler is not None:
            self.profiler.disable()
            stats = pstats.Stats(self.profiler, stream=sys.stderr)
            self.calls = stats.total_calls  # type: ignore[attr-defined]
            if self.lines:
                stats.sort_stats("tottime").print_stats(self.lines)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    began = time.process_time()
    result = run()
    return time.process_time() - began, result


def programs_of(program: Any) -> list[Any]:
    return [part for part, _ in program.programs()] if hasattr(program, "schedule") else [program]


def phases_of(program: Any) -> dict[str, float]:
    """Return the seconds of the phases of a lowering, by lowering again and looking at the clock after each pass."""
    found, last = dict.fromkeys(PHASES, 0.0), time.process_time()

    def watch(name: str, *_: object) -> None:
        nonlocal last
        now = time.process_time()
        found[name if name in PHASES else "passes"] += now - last
        last = now

    program.lowering(watch=watch)
    found["passes"] += time.process_time() - last
    return found


def stepped(case: Case) -> Row:
    """The first step of a small model, after its program was lowered, without what every step takes."""
    case.begin()
    program = case.lower()
    (first, _), (second, _) = timed(case.run), timed(case.run)
    ops = sum(sum(1 for _ in part.traced.nodes) for part in programs_of(program))
    return {"first": first - second, "step": second, "small ops": ops}


# --- all rows ---


def in_turn(key: Key, args: argparse.Namespace) -> dict[str, list[Row]]:
    """Rows of this checkout and of the old one, in turn."""
    found: dict[str, list[Row]] = {"now": []} | ({"before": []} if args.old else {})
    kept = [] if args.rows is None or not args.rows.exists() else map(json.loads, args.rows.read_text().splitlines())
    for *of, when, row in kept:
        if Key(*of) == key and when in found:
            found[when].append(row)
    for number in range(args.repeat):
        for when in [when for when, rows in found.items() if len(rows) == number]:
            found[when].append(one_run(key, when, args, counts=args.calls and not number))
            if args.rows is not None:
                with args.rows.open("a") as file:
                    file.write(json.dumps([*key, when, found[when][-1]]) + "\n")
    return found


def one_run(key: Key, when: str, args: argparse.Namespace, counts: bool) -> Row:
    row = apart("lower", key, when, args)
    if counts:
        row["calls"] = apart("lower", key, when, args, ["--calls"])["calls"]
    if args.first_step and PLANS[key.plan].is_step:
        row |= apart("step", key, when, args)
    return row


def apart(what: str, key: Key, when: str, args: argparse.Namespace, options: Sequence[str] = ()) -> Row:
    checkout = ROOT if when == "now" else args.old.resolve()
    command = [sys.executable, __file__, "--here", what, *options]
    command += ["--model", key.model, "--plan", key.plan, "--layers", str(key.layers)]
    environment = {**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'examples'}"}
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    row: Row = json.loads(result.stdout)
    return row


def median(rows: Iterable[Row], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def cell(rows: Sequence[Row], name: str) -> str:
    values = sorted(row[name] for row in rows)
    spread = f" ({values[0]:.2f} – {values[-1]:.2f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.2f}{spread}"


def depths(found: dict[Key, dict[str, list[Row]]], calls: bool) -> tuple[Sequence[str], list[list[object]]]:
    has_old = any("before" in each for each in found.values())
    head = ["layers as", "plan", "layers", "ops", "collectives", *["calls per op"] * calls, "seconds"]
    head += [*["before", "before ÷ now"] * has_old, "ms per layer", "peak memory"]
    rows: list[list[object]] = []
    for key, each in found.items():
        now, seconds = each["now"], median(each["now"], "seconds")
        row: list[object] = [*key, now[0]["ops"], now[0]["collectives"]]
        row += [f"{now[0]['calls'] / now[0]['ops']:.0f}"] if calls else []
        row.append(cell(now, "seconds"))
        if has_old:
            row += [cell(each["before"], "seconds"), f"{median(each['before'], 'seconds') / seconds:.1f}"]
        rows.append([*row, f"{1000 * seconds / key.layers:.0f}", f"{median(now, 'MiB'):.0f} MiB"])
    return head, rows


def phases(found: dict[Key, dict[str, list[Row]]]) -> tuple[Sequence[str], list[list[object]]]:
    """Return the seconds of each phase, those of the old code in parentheses."""
    head = ("layers as", "plan", "layers", "trace to types, s", "passes, s", "cut, s")
    return head, [[*key, *(beside(each, name) for name in PHASES)] for key, each in found.items()]


def beside(each: dict[str, list[Row]], name: str, form: str = ".2f") -> str:
    now, before = median(each["now"], name), each.get("before")
    return f"{now:{form}}" + (f" ({median(before, name):{form}})" if before else "")


def first_steps(found: dict[Key, dict[str, list[Row]]]) -> tuple[Sequence[str], list[list[object]]]:
    head = ("layers as", "plan", "layers", "ops", "first step, s", "a later one, s")
    ran = {key: each for key, each in found.items() if "first" in each["now"][0]}
    return head, [
        [*key, beside(each, "small ops", ".0f"), beside(each, "first"), beside(each, "step")]
        for key, each in ran.items()
    ]


def targets(found: dict[Key, dict[str, list[Row]]], args: argparse.Namespace) -> Iterable[list[object]]:
    least, most = min(args.layers), max(args.layers)
    for what, models, name, bound in TARGETS if args.old else ():
        for model in models:
            ratios = {
                plan: median(found[key]["now"], name) / median(found[key._replace(layers=least)]["before"], name)
                for plan in args.plan
                if (key := Key(model, plan, most)) in found
            }
            if ratios:
                plan = max(ratios, key=ratios.__getitem__)
                title = f"{what}, {most} layers ÷ old {least} ({model}, worst plan: {plan})"
                yield [title, f"{ratios[plan]:.2f}", bound]
    if args.first_step:
        ran = {key: each["now"] for key, each in found.items() if "first" in each["now"][0]}
        per_op = {key: 1e6 * median(rows, "first") / rows[0]["small ops"] for key, rows in ran.items()}
        if per_op:
            key = max(per_op, key=per_op.__getitem__)
            yield [
                f"first step after lowering, µs per op (worst: {', '.join(map(str, key))})",
                f"{per_op[key]:.0f}",
                PER_OP,
            ]


if __name__ == "__main__":
    main()
