"""Laws of the plans: every element is written once, ranks share the work, and a restore reads what a rank holds."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_parallel.checkpoint import plan_restore, plan_save
from sharding_specs import local_shape

from .layouts import MESHES, held_tensors, leaves

SHAPES = [(), (36,), (5, 36), (3, 7), (4, 2, 6), (0, 3), (36, 36)]


@settings(max_examples=60)
@given(data=st.data())
def test_every_element_is_written_once_and_read_back(data: Any) -> None:
    before, after = (data.draw(st.sampled_from(MESHES)) for _ in range(2))
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4))
    saved = plan_save([data.draw(leaves(before, f"leaf{i}", shape)) for i, shape in enumerate(shapes)], before)
    full = {leaf.key: torch.randn(leaf.shape, dtype=leaf.dtype) for leaf in saved.leaves}
    files: dict[tuple[int, int, str], tuple[Any, torch.Tensor]] = {}
    times = {key: torch.zeros(value.shape) for key, value in full.items()}
    for rank in before.ranks:
        held = {leaf.key: held_tensors(leaf, before, rank, full[leaf.key]) for leaf in saved.leaves}
        for item in saved.rank(rank):
            part = (
                torch.cat([part.view(held[item.leaf.key][part.held]) for part in item.parts])
                if item.box.size
                else (item.parts[0].view(held[item.leaf.key][item.parts[0].held]))
            )
            assert part.shape == torch.Size(item.box.size)
            assert (rank, item.number, item.leaf.key) not in files
            files[rank, item.number, item.leaf.key] = (item.box, part)
            times[item.leaf.key][item.box.slices] += 1
            assert torch.equal(part, full[item.leaf.key][item.box.slices])
    assert all(bool((count == 1).all()) for count in times.values())

    wanted = [data.draw(leaves(after, leaf.key, leaf.shape)) for leaf in saved.leaves]
    plan = plan_restore(saved, wanted, after)
    for rank in after.ranks:
        held = {leaf.key: held_tensors(leaf, after, rank, None) for leaf in wanted}
        for item in plan.rank(rank):
            view = item.part.view(held[item.leaf.key][item.part.held])
            for source, common in item.sources:
                box, values = files[source.rank, source.number, item.leaf.key]
                assert box == source.box
                view[common.within(item.part.box).slices] = values[common.within(box).slices]
        for leaf in wanted:
            for number, expected in held_tensors(leaf, after, rank, full[leaf.key]).items():
                got = held[leaf.key][number]
                outside = (expected == 0) | (expected == -2)  # padding, and other leaves of a vector
                assert torch.equal(got.masked_fill(outside, 0), expected.masked_fill(outside, 0))


@settings(max_examples=60)
@given(data=st.data())
def test_a_rank_writes_its_fair_share_and_at_most_one_box_more_of_the_pieces_that_the_same_ranks_hold(
    data: Any,
) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=8))
    plan = plan_save([data.draw(leaves(mesh, f"leaf{i}", shape)) for i, shape in enumerate(shapes)], mesh)
    for rank in mesh.ranks:
        coordinates, fair, largest = mesh.coordinates(rank), 0.0, dict[str, int]()
        for leaf, piece in ((each, piece) for each in plan.leaves for piece in each.pieces):
            shape, kind = leaf.shape if piece.rows is None else leaf.shape[1:], str(piece.replicas(mesh))
            size = math.prod(local_shape(shape, piece.spec, mesh)) * leaf.dtype.itemsize * len(piece.held)
            if piece.vector is not None:  # its slices hold more or less of it
                held = (region.box.numel for region in leaf.regions(piece, mesh, coordinates))
                fair += sum(held) * leaf.dtype.itemsize
            elif piece.is_held(coordinates):
                fair += size / piece.copies(mesh)
                largest[kind] = max(largest.get(kind, 0), size if piece.copies(mesh) > 1 else 0)
        written = sum(item.box.numel * item.leaf.dtype.itemsize for item in plan.rank(rank))
        assert written <= fair + sum(largest.values())
