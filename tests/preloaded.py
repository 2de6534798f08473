"""Runs scripts as `python` does, each in a process forked from this one, which has imported torch once for all.

A line of JSON on standard input says what to run, `[script, options, folder, out, err]`; the answer is its exit code.
Processes that a script starts are forked too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import sys
from functools import partial
from pathlib import Path

import torch._dynamo  # torch imports it when it first traces
import torch.multiprocessing

for name in ("functional_parallel", "matplotlib.pyplot"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

__all__: list[str] = []


def main() -> None:
    """Answer until standard input ends; a process that is forked returns from here as the script's own would end."""
    torch.multiprocessing.spawn = partial(torch.multiprocessing.start_processes, start_method="fork")
    for line in sys.stdin:
        script, options, folder, *files = json.loads(line)
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            for number, file in zip((0, 1, 2), (os.devnull, *files), strict=True):
                os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
            sys.argv, sys.path[0] = [script, *options], str(Path(script).parent)
            runpy.run_path(script, run_name="__main__")
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
