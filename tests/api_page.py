"""The public API on one page, read from the code.

`python -m tests.api_page` writes docs/api.md.
"""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import functional_parallel as fp
import sharding_specs
from functional_parallel import cli
from functional_parallel.pipelines import PipelineProgram
from functional_parallel.testing import strategies
from functional_parallel.training import TrainStep
from functional_parallel.training.on_state import StateFunction

__all__ = ["MODULES", "PAGE", "Entry", "entries", "page", "public_names", "ungrouped"]

PAGE = Path(__file__).parent.parent / "docs" / "api.md"

# Public modules by the name that users write. The page has every name of their `__all__` once.
MODULES: dict[str, ModuleType] = {
    "fp": fp,
    "fp.asynchronous": fp.asynchronous,
    "fp.checkpoint": fp.checkpoint,
    "fp.optim": fp.optim,
    "fp.optim.schedules": fp.optim.schedules,
    "fp.deepspeed": fp.deepspeed,
    "fp.random": fp.random,
    "fp.schedules": fp.schedules,
    "fp.testing": fp.testing,
    "fp.testing.strategies": strategies,
    "fp.interop": fp.interop,
    "fp.errors": fp.errors,
    "sharding_specs": sharding_specs,
    "sharding_specs.rules": sharding_specs.rules,
}

# Names of `functional_parallel.__all__` by section, in the order of the page. Errors are in the section of fp.errors.
GROUPS: dict[str, tuple[str, ...]] = {
    "Modules": (
        "asynchronous",
        "checkpoint",
        "deepspeed",
        "errors",
        "interop",
        "optim",
        "random",
        "schedules",
        "testing",
    ),
    "Transforms": (
        "chain",
        "Plan",
        "Transform",
        "LocalFunction",
        "data_parallel",
        "zero",
        "compress",
        "tensor_parallel",
        "pipeline",
        "accumulate",
        "local_sgd",
        "diloco",
        "mixed_precision",
        "LossScale",
        "remat",
        "partition_activations",
        "offload",
        "from_specs",
        "partition",
        "constrain",
        "outputs",
        "to_memory",
        "disk",
        "recompute",
        "repeated",
        "stage_boundary",
        "into_tiles",
        "tiled",
        "register_rule",
    ),
    "Compile and train": (
        "functional",
        "load_pretrained",
        "save_pretrained",
        "compile",
        "shard_map",
        "Compiled",
        "Sharded",
        "train_step",
        "prepare",
        "PreparedStep",
        "TrainState",
        "Metrics",
        "abstract",
        "launch",
        "rank",
        "is_main_rank",
    ),
    "Generate": ("Generator", "generate", "Generated", "ContinuousBatch"),
    "Collectives": (
        "psum",
        "pmean",
        "pmax",
        "pmin",
        "all_gather",
        "psum_scatter",
        "pscatter",
        "all_to_all",
        "relayout",
        "ppermute",
        "pbroadcast",
        "pvary",
        "pcast",
        "axis_index",
        "axis_size",
        "broadcast",
        "scatter",
        "gather",
        "reduce",
        "send",
        "recv",
    ),
    "Derivatives and vmap": ("grad", "grad_and_value", "hessian", "jvp", "vmap"),
    "Data": ("Sampler", "Position", "even_batches", "pad_batch", "pad_to"),
    "Planning and estimates": (
        "estimate",
        "device_map",
        "DeviceMap",
        "layer_costs",
        "search_pipeline",
        "PipelineChoice",
        "PipelineChoices",
    ),
    "Programs and their reports": ("Program", "Price", "Hardware", "Line", "Memory"),
}

# Classes that the library creates; their constructors are not part of the API.
RETURNED = {
    "AsyncMetrics",
    "AsyncState",
    "AsyncStep",
    "Checkpoint",
    "LeafInfo",
    "SavePlan",
    "Compiled",
    "Sharded",
    "Config",
    "DeviceMap",
    "PreparedStep",
    "TrainState",
    "PipelineChoice",
    "PipelineChoices",
    "Program",
    "Price",
    "Timeline",
    "Event",
}

# Descriptions of data, which has no docstring.
DATA = {
    "fp.optim.Schedule": "Learning rate: a number, or a function from the number of updates done to a rate.",
    "fp.schedules.FAMILIES": "Known schedules by name, each a `Family`.",
}

# Signatures of classes that have none, because a builtin makes their instances.
SIGNATURES = {"sharding_specs.optional": "(pattern)"}

# Public methods by the section that describes them. Members of a class that are not here are for the library itself.
METHODS: dict[str, tuple[str, str, type, tuple[str, ...]]] = {
    "Methods of a training step": (
        "`train = fp.train_step(…)` returns a training step.",
        "train",
        TrainStep,
        (
            *("init", "__call__", "params", "save", "restore", "begin_save", "whole", "load", "copy", "check", "lower"),
            *("explain", "replay", "compile", "sharded", "frozen"),
        ),
    ),
    "Methods of a prepared step": (
        "`step = fp.prepare(…)` returns a training step for a loop of torch.",
        "step",
        fp.PreparedStep,
        ("__call__", "module", "eval"),
    ),
    "Methods of an asynchronous step": (
        "`step = fp.asynchronous.parameter_server(…)` and `rotating_server(…)` return an asynchronous step.",
        "step",
        fp.asynchronous.AsyncStep,
        ("init", "__call__", "params", "finish", "ended", "drop"),
    ),
    "Methods of a function of the state": (
        "`predict = train.compile(plan(f))` returns a function of a training state.",
        "predict",
        StateFunction,
        ("__call__", "lower", "explain"),
    ),
    "Methods of a sharded tree": (
        "`fp.Sharded.of(…)`, `train.sharded(state)` and functions compiled with `state=` return sharded trees.",
        "tree",
        fp.Sharded,
        ("of", "restore", "full", "copy", "relayout", "save"),
    ),
    "Methods of a compiled function": (
        "`f = fp.compile(…)` and `f = fp.shard_map(…)` return a compiled function. `f.program` is its last program.",
        "f",
        fp.Compiled,
        ("lower", "explain"),
    ),
    "Methods of a program": (
        "`program = f.lower(…)`, `train.lower(…)` and `train.program` are programs. `print(program)` shows every op.",
        "program",
        fp.Program,
        (
            "explain",
            "collectives",
            "counts",
            "bytes_sent",
            "memory",
            "price",
            "host_ops",
            "before",
            "after",
            "lines",
            "fingerprint",
        ),
    ),
    "More methods of a pipeline's program": (
        "The program of a plan with `fp.pipeline` has all methods of a program, and these:",
        "program",
        PipelineProgram,
        ("record", "timeline", "programs", "programs_of_rank", "per_microbatch"),
    ),
}

_INTRODUCTION = """\
# API

This page lists every public name with its signature and the first sentence of its docstring. `help(fp.zero)` prints
the complete docstring. Defaults that are long are shown as `…`. Annotations are left out. The last column is the file
of `functional_parallel` (or of `sharding_specs`) that defines the name.

    import functional_parallel as fp
    import sharding_specs
    from sharding_specs import Mesh, P

`python -m tests.api_page` writes this page from the code. `tests/test_api_page.py` compares them."""


class Entry(NamedTuple):
    """Row of the page. `name` is qualified, such as `fp.psum`. `file` defines it; data is in none."""

    section: str
    name: str
    signature: str
    text: str
    file: str


def page() -> str:
    """Return the page as Markdown."""
    sections = _by_section()
    links = [f"- [{name}](#{_anchor(name)})" for name in (*sections, "Command line")]
    parts = [_INTRODUCTION, "", *links]
    for section, rows in sections.items():
        parts += [f"\n## {section}\n", *_lead(section), "| name | description | in |", "|---|---|---|"]
        parts += [f"| `{each.signature}` | {each.text} | {each.file} |" for each in rows]
    parts += ["\n## Command line\n", *_command_line()]
    return "\n".join(parts) + "\n"


def entries() -> list[Entry]:
    """Return all rows except those of the command line, in the order of the page.

    Raises:
        LookupError: if a name of `functional_parallel.__all__` has no section.
    """
    if missing := ungrouped():
        raise LookupError(f"{', '.join(missing)}: add to a section of GROUPS in tests/api_page.py")
    found = [_entry(section, f"fp.{name}", getattr(fp, name)) for section, names in GROUPS.items() for name in names]
    for title, (_, shown, kind, methods) in METHODS.items():
        found += [_method(title, shown, kind, name) for name in methods]
    for prefix, module in MODULES.items():
        if module is not fp:
            names = [name for name in _names(module) if _belongs(prefix, name, getattr(module, name))]
            found += [_entry(f"`{prefix}`", f"{prefix}.{name}", getattr(module, name)) for name in names]
    return found


def public_names() -> dict[str, Any]:
    """Return the public objects by qualified name. An object of several modules has several names."""
    return {f"{prefix}.{name}": getattr(module, name) for prefix, module in MODULES.items() for name in _names(module)}


def ungrouped() -> list[str]:
    """Return the names of `functional_parallel.__all__` that no section has."""
    known = {name for names in GROUPS.values() for name in names} | set(fp.errors.__all__)
    return [name for name in fp.__all__ if name not in known]


def _names(module: ModuleType) -> list[str]:
    return list(module.__all__)


def _by_section() -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for each in entries():
        found.setdefault(each.section, []).append(each)
    return found


def _anchor(section: str) -> str:
    return re.sub(r"[^\w -]", "", section.lower()).replace(" ", "-")


def _belongs(prefix: str, name: str, value: Any) -> bool:
    """Whether a name has its row here. Names of fp have theirs in its sections, errors in the section of fp.errors."""
    is_error = isinstance(value, type) and issubclass(value, (fp.errors.Error, Warning))
    is_elsewhere = is_error or value is getattr(fp, name, None)
    is_elsewhere |= prefix == "sharding_specs.rules" and value is getattr(sharding_specs, name, None)
    return prefix == "fp.errors" or not is_elsewhere


def _lead(section: str) -> Iterator[str]:
    if section in METHODS:
        yield f"{METHODS[section][0]}\n"
    elif section == "`fp.errors`":
        yield "[Errors](errors.md) has the usual meaning of each error, and what to try.\n"
    elif (module := MODULES.get(section.strip("`"))) is not None:
        yield f"{_first_sentence(inspect.getdoc(module) or '')}\n"


# -----------------------------------------------------------------------------
# Rows
# -----------------------------------------------------------------------------


def _entry(section: str, name: str, value: Any) -> Entry:
    shown = name + (SIGNATURES.get(name) or _shown_signature(value))
    return Entry(section, name, shown, _description(name, value), _file(value))


def _method(section: str, shown: str, kind: type, name: str) -> Entry:
    method = getattr(kind, name)
    makes = inspect.ismethod(method)  # a class method, which has no instance
    called = shown if name == "__call__" else f"{f'fp.{kind.__name__}' if makes else shown}.{name}"
    parameters = list(inspect.signature(method).parameters.values())[0 if makes else 1 :]
    text = _escaped(_first_sentence(inspect.getdoc(method) or ""))
    return Entry(section, f"{kind.__name__}.{name}", called + _in_parentheses(parameters), text, _file(method))


def _file(value: Any) -> str:
    """Return the file that defines a function, a class or a module of the library."""
    module = sys.modules.get(value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", ""))
    name = module.__name__ if module is not None else ""
    if not name.startswith(("functional_parallel.", "sharding_specs")):
        return ""
    path = name.removeprefix("functional_parallel.").replace(".", "/")
    return f"`{path}`" if hasattr(module, "__path__") else f"`{path}.py`"


def _description(name: str, value: Any) -> str:
    text = DATA.get(name) or _first_sentence(inspect.getdoc(value) or "")
    if isinstance(value, type) and issubclass(value, (Exception, Warning)):
        bases = [f"`{base.__name__}`" for base in value.__bases__]
        others = [f"`{other}.{value.__name__}`" for other in ("fp", "sharding_specs") if _has(MODULES[other], value)]
        also = f" Also {', '.join(others)}." if others else ""
        text = f"{text} Bases: {', '.join(bases)}.{also}"
    return _escaped(text)


def _has(module: ModuleType, value: Any) -> bool:
    return any(getattr(module, name) is value for name in _names(module))


def _shown_signature(value: Any) -> str:
    if isinstance(value, type) and (value.__name__ in RETURNED or issubclass(value, (Exception, Warning))):
        return ""
    if isinstance(value, ModuleType) or not callable(value):
        return ""
    return _in_parentheses(list(inspect.signature(value).parameters.values()))


def _in_parentheses(parameters: list[inspect.Parameter]) -> str:
    short = [each.replace(annotation=each.empty, default=_Shown.of(each.default)) for each in parameters]
    return str(inspect.Signature(short))


class _Shown(str):
    """Default value as it is printed."""

    @classmethod
    def of(cls, default: Any) -> Any:
        if default is inspect.Parameter.empty:
            return default
        text = f"{default:g}" if isinstance(default, float) and float(f"{default:g}") == default else repr(default)
        return cls("…" if len(text) > 30 or text.startswith("<") or " at 0x" in text else text)

    def __repr__(self) -> str:
        return str(self)


def _first_sentence(doc: str) -> str:
    """Return the first sentence of a docstring, on one line."""
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    found = re.match(r".+?\.(?=\s+[A-Z`]|$)", paragraph)
    return found.group() if found else f"{paragraph.rstrip(':')}."


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*") if "`" not in text else text.replace("|", "\\|")


# -----------------------------------------------------------------------------
# Command line
# -----------------------------------------------------------------------------


def _command_line() -> Iterator[str]:
    yield "`python -m functional_parallel --help` lists the commands. `… COMMAND --help` explains their options.\n"
    yield "| command | description |"
    yield "|---|---|"
    for name, text in re.findall(r"^    (\w+) +(\S.*)$", _help(), re.MULTILINE):
        usage = _help(name).partition("\n")[0].partition("functional_parallel ")[2].replace("[-h] ", "")
        yield f"| `{_escaped(usage.removesuffix(' [-h]'))}` | {_escaped(text[0].upper() + text[1:])}. |"


def _help(*command: str) -> str:
    """Return the text of `--help`, without line breaks inside of a sentence."""
    text = io.StringIO()
    wide = {"COLUMNS": "2000", "NO_COLOR": "1"}
    with mock.patch.dict(os.environ, wide), redirect_stdout(text), suppress(SystemExit):
        cli.main([*command, "--help"])
    return text.getvalue()


if __name__ == "__main__":
    PAGE.write_text(page())
