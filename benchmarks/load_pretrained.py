"""Loading a Hugging Face folder on real processes: what each rank reads, holds at its peak, and computes.

    python benchmarks/load_pretrained.py            # makes a Llama of 603 MB, and prints a table
    python benchmarks/load_pretrained.py --write    # writes it into docs/hugging_face.md

Each row is one mesh, of fresh gloo processes. A rank loads a small folder first, which imports the model's
code. The peak is of anonymous resident memory above that before loading. Read bytes are those of the operating system.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import socket
import tempfile
import time
from pathlib import Path

import resident
import torch
import torch.distributed as dist
import transformers

import functional_parallel as fp
from sharding_specs import Mesh, local_shape, rules

PAGE = Path(__file__).parent.parent / "docs" / "hugging_face.md"
BEGIN, END = "<!-- loading: written by python benchmarks/load_pretrained.py --write -->", "<!-- end of loading -->"
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 10, "vocab_size": 16000}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
WAYS = {
    "`data=2`, ZeRO-3": "data=2",
    "`tensor=2`": "tensor=2",
    "`data=2, tensor=2`, ZeRO-3": "data=2,tensor=2",
    "`pipe=2`": "pipe=2",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    parser.add_argument("--json", action="store_true", help="print the numbers of each rank")
    parser.add_argument("--only", help="one mesh, such as data=2")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folders = [save(Path(place) / name, sizes) for name, sizes in (("small", SMALL), ("large", LARGE))]
        ways = {name: way for name, way in WAYS.items() if args.only in (None, way)}
        found = {name: on_processes(folders, way) for name, way in ways.items()}
    if args.json:
        print(json.dumps(found))
        return
    table = as_table(found)
    print(table)
    if args.write:
        page = PAGE.read_text()
        PAGE.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", f"{BEGIN}\n{table}\n{END}", page, flags=re.S))


def save(folder: Path, sizes: dict[str, int]) -> str:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200MB")
    return str(folder)


def on_processes(folders: list[str], way: str) -> list[dict[str, float]]:
    """Return the numbers of each rank."""
    size = Mesh.parse(way).size
    with socket.socket() as free, tempfile.TemporaryDirectory() as place:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        os.environ.update(resident.THRESHOLD | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        os.environ.update(WORLD_SIZE=str(size), OMP_NUM_THREADS="1")
        torch.multiprocessing.spawn(on_a_rank, (folders, way, size, place), nprocs=size)
        return [json.loads((Path(place) / str(rank)).read_text()) for rank in range(size)]


def on_a_rank(rank: int, folders: list[str], way: str, size: int, place: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    small, large = folders
    kept = [load(small, way)]
    resident.reset_peak()
    before, read, began = resident.resident(), read_bytes(), time.process_time()
    kept.append(load(large, way))
    numbers = {
        "peak": resident.peak() - before,
        "read": read_bytes() - read,
        "seconds": time.process_time() - began,
        "held": sum(shards(kept[-1])),
        "slice": max(shards(kept[-1])),
    }
    (Path(place) / str(rank)).write_text(json.dumps(numbers))
    dist.barrier()


def load(folder: str, way: str) -> fp.Sharded:
    mesh = Mesh.parse(way)

    def plan(model: torch.nn.Module) -> fp.Plan:
        found: list[fp.Transform] = []
        if "tensor" in mesh.axes:
            found.append(fp.tensor_parallel("tensor", rules.for_model(model, mesh=mesh)))
        if "data" in mesh.axes:
            found.append(fp.zero(3, "data"))
        if "pipe" in mesh.axes:
            found.append(fp.pipeline("pipe", microbatches=2))
        return fp.chain(*found)

    return fp.load_pretrained(folder, mesh, plan)[1]


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def shards(loaded: fp.Sharded) -> list[int]:
    """Return the bytes of each shard that this rank holds."""
    found = []
    for (name, spec), handle in zip(sorted(loaded.specs.items()), loaded.handles, strict=True):
        holders = getattr(handle, "holders", None)
        if holders is None or dist.get_rank() in holders:
            found.append(math.prod(local_shape(loaded.shapes[name].shape, spec, loaded.mesh)) * 4)
    return found


def as_table(found: dict[str, list[dict[str, float]]]) -> str:
    """Return a row for each way, with the largest number of any rank."""
    rows = ["| | ranks | shards | read | peak | processor time |", "|---|---|---|---|---|---|"]
    for name, ranks in found.items():
        worst = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
        sizes = " | ".join(f"{worst[key] / 1e6:.1f} MB" for key in ("held", "read", "peak"))
        rows.append(f"| {name} | {len(ranks)} | {sizes} | {worst['seconds']:.2f} s |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
