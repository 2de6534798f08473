"""Command line: properties of this machine, communication, price and memory of programs, and pipeline schedules.

`explain`, `price` and `memory` take `module:function`. The function is called with a mesh and returns the objects to
analyze:

    def step(mesh):   # for explain and price: a compiled function or a training step, and its arguments
        return fp.compile(fp.grad_and_value(plan(loss)), mesh), (params, batch)

    def model(mesh):  # for memory: parameters, tensors of any device, and their specs
        return params, {"*/w1": P(None, "tensor")}

Nothing is computed, so the parameters may be on the meta device.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
import torch.distributed as dist

from sharding_specs import Mesh, MeshError, SpecError, memory_table, validate
from sharding_specs.pytree import SpecTree, Tree

from . import checkpoint
from .errors import CheckpointError, LaunchError, OrderError, PipelineError, ScheduleError
from .generation import folder_command
from .planning import CONVENTIONS, estimate
from .program import HARDWARE, Program, columns
from .quantities import readable_bytes
from .runtime import launch_of_environment
from .schedules import command
from .transforms import chain, matched, pipeline, tensor_parallel, zero

_PIPE = "pipe"
_TARGETS = (__doc__ or "\n\n").split("\n\n", 1)[1]  # python -OO removes docstrings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return its status: 0, or 2 for an error in the arguments or in the objects that they name."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        print(chosen.run(chosen))
    except (UsageError, MeshError, SpecError, ScheduleError, PipelineError, OrderError, CheckpointError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


class UsageError(ValueError):
    """Raised if the arguments do not name the objects that a command needs."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("functional_parallel", description="Look at programs and at this machine.")
    commands = parser.add_subparsers(required=True, metavar="command")

    commands.add_parser("doctor", help="hardware and versions of this machine").set_defaults(run=_doctor)

    explain = commands.add_parser("explain", help="every collective of a program: kind, axis, count, bytes, line")
    of_each = "one row per source line, per axis, or per pass"
    explain.add_argument("--group", choices=("line", "axis", "pass"), default="line", help=of_each)
    explain.add_argument("--json", action="store_true", help="print JSON instead of a table")
    explain.add_argument("--program", action="store_true", help="print the program's text instead of a table")
    explain.set_defaults(run=_explain)

    price = commands.add_parser("price", help="what a step takes on a machine, and where the time goes")
    price.add_argument("--hardware", default="h100", help=f"one of {', '.join(HARDWARE)}")
    price.add_argument("--group", choices=("kind", "line"), default="kind", help="one row per kind, or per source line")
    price.add_argument("--json", action="store_true", help="print JSON instead of a table")
    price.set_defaults(run=_price)

    memory = commands.add_parser(
        "memory", help="the bytes that each rank holds of a model's parameters, or to train it"
    )
    also = "also count gradients and optimizer at this stage of ZeRO"
    memory.add_argument("--zero", type=int, choices=range(4), help=also)
    memory.add_argument("--axis", default="data", help="the mesh axis of --zero")
    cuts = f"the mesh axis of a pipeline, which cuts stacks of layers; {_PIPE!r} if the mesh has it"
    memory.add_argument("--pipe", help=cuts)
    counts = "bytes per parameter that --zero counts"
    memory.add_argument("--convention", choices=sorted(CONVENTIONS), default="zero", help=counts)
    memory.set_defaults(run=_memory)

    saved = commands.add_parser("checkpoint", help="what a checkpoint has; verify it, compare it, or consolidate it")
    saved.add_argument("path", metavar="PATH", help="folder of a run's checkpoints, or of one checkpoint")
    saved.add_argument("--step", type=int, help="step of the checkpoint; by default the newest")
    saved.add_argument("--verify", action="store_true", help="read every byte and compare the checksums")
    saved.add_argument("--diff", metavar="PATH", help="list the leaves that differ from those of another one")
    saved.add_argument("--consolidate", metavar="FOLDER", help="write full tensors to one safetensors file")
    saved.set_defaults(run=_checkpoint)

    schedule = commands.add_parser("schedule", help="a pipeline schedule: its timeline, bubble and peak memory")
    command.add_options(schedule)
    schedule.set_defaults(run=command.run)

    generate = commands.add_parser("generate", help="text from a Hugging Face folder, on a mesh")
    folder_command.add_options(generate)
    generate.set_defaults(run=folder_command.run)

    for signatures in (explain, price, memory):
        signatures.add_argument("target", metavar="module:function", help="called with the mesh, see below")
        signatures.add_argument("--mesh", required=True, help="axes and sizes: data=2,tensor=4")
        signatures.epilog, signatures.formatter_class = _TARGETS, argparse.RawDescriptionHelpFormatter
    return parser


def _checkpoint(chosen: argparse.Namespace) -> str:
    if chosen.consolidate is not None:
        return "\n".join(map(str, checkpoint.consolidate(chosen.path, chosen.consolidate)))
    found = checkpoint.inspect(chosen.path, chosen.step)
    if chosen.diff is not None:
        return "\n".join(found.differences(checkpoint.inspect(chosen.diff))) or "no leaf differs"
    if chosen.verify:
        found.verify()
    return f"{found}\n{'every byte is as it was written' if chosen.verify else ''}".rstrip()


def _doctor(_: argparse.Namespace) -> str:
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    rows = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": f"{os.cpu_count()}, of which torch uses {torch.get_num_threads()}",
        "devices": ", ".join(["cpu", *(f"cuda:{index} ({name})" for index, name in enumerate(devices))]),
        "backends": _backends(),
        "launcher": _launcher(),
        "extras": _listed(
            {name: importlib.util.find_spec(name) for name in ("tqdm", "matplotlib", "hypothesis", "cloudpickle")}
        ),
    }
    return "\n".join(columns(list(rows.items())))


def _listed(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in found.items())


def _backends() -> str:
    if not dist.is_available():
        return "none: this torch is built without torch.distributed; ranks are simulated"
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return _listed(found)


def _launcher() -> str:
    try:
        launch = launch_of_environment()
    except LaunchError as error:
        return f"refused: {error}"
    if launch is None:
        return "none: ranks are simulated in one process (start with torchrun or fp.launch for real ones)"
    return f"{launch}" if launch.address else f"{launch}; ranks are simulated, since MASTER_ADDR is not set"


def _explain(chosen: argparse.Namespace) -> str:
    program = _program(chosen)
    if chosen.program:
        return str(program)
    table = program.explain(group=chosen.group)
    return table.json(indent=1) if chosen.json else str(table)


def _price(chosen: argparse.Namespace) -> str:
    if chosen.hardware not in HARDWARE:
        raise UsageError(f"--hardware {chosen.hardware}: the known ones are {', '.join(HARDWARE)}")
    price = _program(chosen).price(chosen.hardware)
    return json.dumps(price.to_dict(), indent=1) if chosen.json else price.table(chosen.group)


def _program(chosen: argparse.Namespace) -> Program:
    wanted = "a compiled function or training step, and the tuple of its arguments"
    compiled, args = _result(chosen, wanted)
    if not hasattr(compiled, "lower") or not isinstance(args, tuple):
        found = f"a pair of {type(compiled).__name__} and {type(args).__name__}"
        raise UsageError(f"{chosen.target} returned {found}; it shall return {wanted}")
    program: Program = compiled.lower(*args)
    return program


def _memory(chosen: argparse.Namespace) -> str:
    params, rules = _result(chosen, "parameters, and their specs or path rules")
    mesh = Mesh.parse(chosen.mesh)
    specs, _, unused = matched(rules, params, chosen.target)
    validate(params, specs, mesh)
    used = {axis for spec in optree.tree_leaves(specs) for axis in spec.axes}
    if chosen.pipe is not None and mesh.axis_size(chosen.pipe) > 1 and chosen.pipe not in used:
        raise UsageError(
            f"--pipe {chosen.pipe}: no spec of {chosen.target} names the axis, so which parameters a rank holds "
            f"follows from where the model is cut: give P({chosen.pipe!r}, …) to stacked layers, or ask the program, "
            "by train.lower(params, *batch).memory()"
        )
    rows = sorted(memory_table(params, specs, mesh), key=lambda row: -row.bytes)
    total, lines = sum(row.bytes for row in rows), list[str]()
    if chosen.zero is not None:
        total, lines = _to_train(chosen, params, specs, mesh, used)
        used |= {chosen.axis}
    idle = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in used]
    lines += [f"mesh axis {axis!r} splits nothing: its {mesh.axis_size(axis)} ranks hold the same" for axis in idle]
    if unused:
        lines.append(f"rules that find no parameter: {', '.join(unused)}")
    table = columns([(row.path, str(list(row.shape)), repr(row.spec), readable_bytes(row.bytes)) for row in rows])
    return "\n".join([f"total {readable_bytes(total)} per rank on {mesh!r}", *lines, "", *table])


def _to_train(
    chosen: argparse.Namespace, params: Tree, specs: SpecTree, mesh: Mesh, used: set[str]
) -> tuple[int, list[str]]:
    mesh.axis_size(chosen.axis)  # raises for an unknown axis
    pipe = chosen.pipe or _PIPE
    others = [tensor_parallel(axis, specs) for axis in reversed(mesh.axes) if axis in used - {chosen.axis, pipe}]
    ranks = mesh.shape.get(pipe, 1)
    stacked = specs if pipe in used else None
    last = [pipeline(pipe, stacked, microbatches=2 * ranks)] if ranks > 1 or pipe in used else []
    at_rest = specs if chosen.zero == 3 and chosen.axis in used else None
    plan = chain(*others, zero(chosen.zero, chosen.axis, at_rest), *last)
    found = estimate(params, mesh, plan, convention=chosen.convention)
    parts = [line for line in str(found).splitlines() if not line.startswith("total")]
    return found.total, [f"{plan}, {sum(CONVENTIONS[chosen.convention])} bytes per parameter:", *parts]


def _result(chosen: argparse.Namespace, wanted: str) -> tuple[Any, Any]:
    result = _function(chosen.target)(Mesh.parse(chosen.mesh))
    if not isinstance(result, tuple) or len(result) != 2:
        raise UsageError(f"{chosen.target} returned {type(result).__name__}; it shall return {wanted}")
    return result


def _function(target: str) -> Callable[[Mesh], Any]:
    module, colon, name = target.partition(":")
    if not (colon and all(part.isidentifier() for part in module.split("."))):
        raise UsageError(f"{target!r} reads module:function, for example examples.model:step for examples/model.py")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the missing module is one that the target imports
        hint = "; a module is named without .py" if module.endswith(".py") else ""
        raise UsageError(f"{target!r} is not to be found: {error}{hint}") from error
    if not hasattr(loaded, name):
        raise UsageError(f"{target!r} is not to be found: {loaded.__file__} has no {name!r}")
    found = getattr(loaded, name)
    if not callable(found):
        raise UsageError(f"{target} is a {type(found).__name__}; it shall be a function that takes the mesh")
    return found  # type: ignore[no-any-return]
