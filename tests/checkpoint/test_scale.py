"""A plan for GPT-3 with AdamW on 16,384 ranks, in one process, by ranks and classes of equal ranks."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from functional_parallel.checkpoint import LeafLayout, Piece, SavePlan, plan_restore, plan_save
from sharding_specs import Box, Mesh, P

MESH = Mesh(pipe=16, data=128, tensor=8)
LAYERS, WIDTH, VOCABULARY = 96, 12288, 50304
Row = tuple[str, tuple[int, ...], P, P]  # key, shape, spec of the parameter, spec of its moments


def rows() -> list[tuple[Row, int | None]]:
    """Parameters with their stage; the embedding is on the first and the last."""
    found: list[tuple[Row, int | None]] = []
    shapes = {
        "attention/qkv/w": ((WIDTH, 3 * WIDTH), P(None, (3, "tensor")), P("data", (3, "tensor"))),
        "attention/qkv/b": ((3 * WIDTH,), P((3, "tensor")), P((3, "tensor", "data"))),
        "attention/out/w": ((WIDTH, WIDTH), P("tensor"), P(("tensor", "data"))),
        "attention/out/b": ((WIDTH,), P(), P("data")),
        "mlp/up/w": ((WIDTH, 4 * WIDTH), P(None, "tensor"), P("data", "tensor")),
        "mlp/up/b": ((4 * WIDTH,), P("tensor"), P(("tensor", "data"))),
        "mlp/down/w": ((4 * WIDTH, WIDTH), P("tensor"), P(("tensor", "data"))),
        "mlp/down/b": ((WIDTH,), P(), P("data")),
        **{f"norm{i}/{name}": ((WIDTH,), P(), P("data")) for i in (1, 2) for name in "wb"},
    }
    for layer, (name, (shape, spec, moments)) in itertools.product(range(LAYERS), shapes.items()):
        found.append(((f"layers/{layer}/{name}", shape, spec, moments), layer * 16 // LAYERS))
    found.append((("embedding", (VOCABULARY, WIDTH), P("tensor"), P(("tensor", "data"))), None))
    return found


def leaves(dtype: torch.dtype = torch.float32) -> list[LeafLayout]:
    made = []
    for (key, shape, spec, moments), stage in rows():
        where = (("pipe", (0, 15) if stage is None else (stage,)),)
        made.append(LeafLayout("params", key, shape, dtype, (Piece(spec, where=where),)))
        made += [
            LeafLayout("optimizer", f"{name}/{key}", shape, torch.float32, (Piece(moments, where=where),))
            for name in ("mean", "square")
        ]
    return made


@pytest.fixture(scope="module")
def plan() -> SavePlan:
    return plan_save(leaves(), MESH)


def test_the_work_of_ranks_is_balanced(plan: SavePlan) -> None:
    """Ranks of one stage hold as much as each other, so they write as much, up to one box of a parameter."""
    for stage in (0, 7, 15):
        chosen = random.Random(stage).sample(range(128 * 8), 24)
        written = [sum(item.box.numel * 4 for item in plan.rank(stage * 1024 + rank)) for rank in chosen]
        box = WIDTH * 4 * WIDTH // 8 * 4 if 0 < stage < 15 else VOCABULARY // 8 * WIDTH * 4
        total = sum(
            math.prod(leaf.shape) * 4 / len(dict(piece.where)["pipe"])
            for leaf in plan.leaves
            for piece in leaf.pieces
            if stage in dict(piece.where)["pipe"]
        )
        assert max(written) <= total / 1024 + box


def test_boxes_of_a_leaf_cover_it_once(plan: SavePlan) -> None:
    by_key = {leaf.key: leaf for leaf in plan.leaves}
    for key in ("layers/50/attention/qkv/w", "mean/layers/0/attention/qkv/b", "square/embedding", "layers/95/norm1/w"):
        leaf = by_key[key]
        whole = Box((0,) * len(leaf.shape), leaf.shape)
        writers = leaf.writers(whole, MESH)
        boxes = [region.box for rank in writers for region in leaf.written(MESH, rank)]
        assert sum(box.numel for box in boxes) == whole.numel
        assert len({box.start for box in boxes}) == len(boxes)  # equal sizes on a grid, so they are disjoint


def test_a_rank_reads_little_of_a_large_checkpoint(plan: SavePlan) -> None:
    """Onto 8,192 ranks: the sources of a rank's boxes are found without a look at all ranks."""
    mesh = Mesh(data=1024, tensor=8)
    wanted = [
        LeafLayout(leaf.kind, leaf.key, leaf.shape, leaf.dtype, (Piece(spec),))
        for leaf, (_, _, _, spec) in zip(plan.leaves, (row for row, _ in rows() for _ in range(3)), strict=True)
    ]
    found = plan_restore(plan, wanted, mesh)
    for rank in (0, 4097, 6143):  # along data 0, 512, 767: of 12288 / 8 rows, later ranks hold padding only
        items = list(found.rank(rank))
        assert len(items) >= len(wanted)
        assert all(len(item.sources) <= 12 for item in items)
