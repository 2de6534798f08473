"""Training state in the memory of the host: the bits and collectives of the run without, exact bytes and peaks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.ir import info
from functional_parallel.ops import TO_MEMORY, kind_of_memory, moved_value
from functional_parallel.pipelines import PipelineProgram
from functional_parallel.program import StorageTable, memories_of, memory_moves
from sharding_specs import Mesh

from ..memories import tracked_memories, zeros_on_device
from ..passes.networks import SPLIT, batch, loss, parameters
from ..pipelines.test_memory import OneRank
from ..processes import run_on_processes
from ..program.test_memory import HeldMove, filled, flat_function, moves_beside

OPTIMIZERS = {
    "adamw": fp.optim.adamw(1e-2),
    "momentum": fp.optim.sgd(0.1, momentum=0.9),
    "scheduled": fp.optim.adamw(lambda count: 0.1 / (1 + count)),
    "lamb": fp.optim.lamb(1e-2),
    "adafactor": fp.optim.adafactor(1e-2),
    "by path": fp.optim.by_path({"head": fp.optim.sgd(0.1), "layers/*": fp.optim.lion(1e-3)}),
    "ema": fp.optim.ema(fp.optim.adamw(1e-2), 0.5),
    "muon": fp.optim.by_path({"head": fp.optim.sgd(0.1), "layers/*": fp.optim.muon(1e-3)}),  # sums of other sizes
}
ANY_LAYOUT = ("adamw", "momentum", "scheduled", "by path", "ema")


def count_of_parameters() -> int:
    return sum(leaf.numel() for leaf in optree.tree_leaves(parameters(3, 24, 16)))


def is_same(a: Any, b: Any) -> bool:
    pairs = zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def trained(plan: Any, mesh: Mesh, optimizer: str, steps: int = 2, dtype: Any = torch.float32, **options: Any) -> Any:
    params, (x, y) = optree.tree_map(lambda w: w.to(dtype), parameters(3, 24, 16)), batch(8, 24, 16)
    train = fp.train_step(loss, OPTIMIZERS[optimizer], mesh, plan, **options)
    state = train.init(params)
    for _ in range(steps):
        state, metrics = train(state, x.to(dtype), y)
    return train, state, metrics


def memory_of(node: torch.fx.Node) -> str:
    spec = info(node).spec
    return "device" if spec is None else kind_of_memory(spec.memory)


class Tracked(OneRank):
    zeros = staticmethod(zeros_on_device)
    in_flight = False

    def run(self, program: Any, values: Any) -> Any:
        if program not in self.functions:
            self.functions[program] = flat_function(program, self.zeros, self.in_flight)
        return self.functions[program](values)

    def tracking(self, inputs: Any, constants: Any) -> Any:
        return tracked_memories(inputs, constants, memory_of)


class TrackedInFlight(Tracked):
    in_flight = True


def measured(program: Any, in_flight: bool = False) -> list[dict[str, int]]:
    """The peak of each memory, on each rank of a pipeline."""
    if isinstance(program, PipelineProgram):
        one = TrackedInFlight if in_flight else Tracked
        return [one(program, rank).peak() for rank in range(program.schedule.ranks)]  # type: ignore[misc]
    inputs = {node: filled(info(node).val) for node in program.traced.inputs}
    run = flat_function(program, zeros_on_device, in_flight)
    table = StorageTable("", program.traced)
    late = {old: table.storages[moved_value(new)][0] for old, new in moves_beside(program)[2].items() if in_flight}
    copied = {storage: torch.zeros(table.sizes[storage], dtype=torch.uint8) for storage in late.values()}

    def place(key: Any) -> str:
        return table.memories[key[0]] if key in copied else memory_of(key)

    every, constants = {**inputs, **copied}, list(program.traced.constants.values())
    values = [HeldMove(x, copied[late[node]]) if node in late else x for node, x in inputs.items()]
    with torch.no_grad(), tracked_memories(every, constants, place) as tracker:
        every.clear()
        copied.clear()
        run(values)
    return [tracker.peaks]


def predicted(program: Any, in_flight: bool = False) -> list[dict[str, int]]:
    memory, name = program.memory(), "peaks_in_flight" if in_flight else "peaks"
    return [getattr(each, name) for each in (memory.ranks if isinstance(program, PipelineProgram) else [memory])]


@st.composite
def plans(draw: st.DrawFn) -> tuple[Any, ...]:
    """A plan, the same with offload, a mesh, an optimizer and options."""
    stage, optimizer = draw(st.integers(0, 3)), draw(st.sampled_from(sorted({*OPTIMIZERS} - {"muon"})))
    flat = stage in (1, 2) and optimizer in ANY_LAYOUT and draw(st.booleans())
    last = draw(st.sampled_from(["", "accumulate", "each", "pipeline"]))
    tensor = draw(st.booleans())
    flat = flat and last != "pipeline"
    # Ranks of a pipeline exchange a skipped step's small values, such as means of rows, or compute them again.
    types = [None, "bf16"] if last == "pipeline" and optimizer == "adafactor" else [None, "bf16", "fp16"]
    precision = draw(st.sampled_from(types))
    reduce = draw(st.sampled_from(["fp32", precision])) if precision else "fp32"
    scale = {"loss_scale": fp.LossScale(draw(st.sampled_from([2.0**8, 2.0**16])))} if precision == "fp16" else {}
    before = [fp.mixed_precision(precision, reduce=reduce, **scale)] if precision else []  # 2**16 overflows
    before += [fp.remat()] if draw(st.booleans()) else []
    before += [fp.tensor_parallel("tensor", SPLIT)] if tensor else []
    before += [fp.zero(stage, "data", layout="flat" if flat else "dims")]
    after = {
        "accumulate": [fp.accumulate(2)],
        "each": [fp.accumulate(2, reduce="each")],
        "pipeline": [fp.pipeline("pipe", microbatches=2)],
    }.get(last, [])
    sizes = {"pipe": 2} if last == "pipeline" else {}
    mesh = Mesh({**sizes, "data": 2, **({"tensor": 2} if tensor else {})})
    fraction = 1.0 if flat else draw(st.sampled_from([1.0, 0.5, 0.25]))
    memories, sums = st.sampled_from(["device", "host", "disk"]), st.sampled_from(["device", "host"])
    asked = draw(st.tuples(memories, memories, sums).filter(lambda each: set(each) != {"device"}))
    kinds = dict(zip(("state", "parameters", "gradients"), asked, strict=True))
    update = draw(st.sampled_from([None, "device"])) if kinds["state"] != "device" else None
    disk = {"path": tempfile.gettempdir()} if "disk" in asked else {}
    offload = fp.offload(**kinds, update=update, fraction=fraction, group=draw(st.integers(1, 4000)), **disk)
    options = {
        "clip": draw(st.sampled_from([None, 0.5])),
        "bucket": draw(st.sampled_from([None, 512, "auto"])),
        "donate": draw(st.booleans()),
    }
    return fp.chain(*before, *after), fp.chain(*before, offload, *after), mesh, optimizer, options


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(plans(), st.sampled_from([0, 512, 4096, 1 << 20]))
def test_the_run_has_the_bits_of_the_run_without(drawn: tuple[Any, ...], limit: int) -> None:
    plain, moved, mesh, optimizer, options = drawn
    a, b = trained(plain, mesh, optimizer, **options), trained(moved, mesh, optimizer, **options)
    assert is_same(a[0].whole(a[1]), b[0].whole(b[1])) and is_same(a[2], b[2])
    assert a[0].program.counts() == b[0].program.counts()
    assert predicted(b[0].program) == measured(b[0].program)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_moves, "LEAST", 0)
        patch.setattr(memory_moves, "IN_FLIGHT", limit)
        found = predicted(b[0].program, in_flight=True)
        assert found == measured(b[0].program, in_flight=True)
    for synchronous, asynchronous in zip(predicted(b[0].program), found, strict=True):
        assert all(asynchronous[memory] >= peak for memory, peak in synchronous.items())


def test_an_optimizer_whose_collectives_follow_each_other() -> None:
    """Muon brings each matrix to one rank: over one axis, and then over the other."""
    before = [fp.tensor_parallel("tensor", SPLIT), fp.zero(1, "data")]
    plain, moved = (
        trained(fp.chain(*before, *more), Mesh(data=2, tensor=2), "muon") for more in ([], [fp.offload(state="host")])
    )
    assert is_same(plain[0].whole(plain[1]), moved[0].whole(moved[1]))
    assert plain[0].program.counts() == moved[0].program.counts()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_move_down_and_parameters_up_in_their_types(stage: int) -> None:
    """ZeRO-Offload: 2Ψ + 2Ψ bytes, divided by the ranks that shard the update, and 4 of the clipping factor."""
    before = [fp.mixed_precision("bf16", reduce="bf16"), fp.zero(stage, "data")]
    program = trained(fp.chain(*before, fp.offload(state="host")), Mesh(data=2), "adamw", clip=1.0)[0].program
    count = count_of_parameters() // (2 if stage else 1)
    assert program.bytes_moved() == {("device", "host"): 2 * count + 4, ("host", "device"): 2 * count}
    assert program.price().moving > 0


def peaks_and_bytes(mesh: Mesh, *plan: Any, **options: Any) -> Any:
    params, (x, y) = optree.tree_map(torch.Tensor.float, parameters(3, 24, 16)), batch(8, 24, 16)
    train = fp.train_step(loss, OPTIMIZERS["adamw"], mesh, fp.chain(*plan), bucket=None, **options)
    program = train.lower(params, x.float(), y)
    return program.memory().peaks, program.bytes_moved()


def test_the_device_never_holds_the_sums() -> None:
    """Each microbatch's gradients move down, beside the old parameters, as there are no masters."""
    size, accumulated = 4 * count_of_parameters(), fp.accumulate(2)
    here, _ = peaks_and_bytes(Mesh(), fp.offload(state="host"), accumulated)
    there, moved = peaks_and_bytes(Mesh(), fp.offload(state="host", gradients="host"), accumulated)
    assert there["device"] < here["device"] - size and there["host"] == here["host"]
    assert moved == {("device", "host"): 3 * size, ("host", "device"): size + 4}  # and the norm


@pytest.mark.parametrize(("reduce", "down", "up"), [("each", 1, 0), ("once", 4, 2)])
def test_sums_over_ranks_are_on_the_device(reduce: str, down: int, up: int) -> None:
    """Of two microbatches, a shard each moves down. With one sum per step all of each does, and the sum goes up."""
    zero, accumulated, own = fp.zero(2, "data"), fp.accumulate(2, reduce=reduce), 2 * count_of_parameters()
    _, before = peaks_and_bytes(Mesh(data=2), zero, fp.offload(state="host"), accumulated)
    _, after = peaks_and_bytes(Mesh(data=2), zero, fp.offload(state="host", gradients="host"), accumulated)
    assert after["device", "host"] - before["device", "host"] == down * own
    assert after["host", "device"] - before["host", "device"] == up * own + 4


@pytest.mark.parametrize("state", ["device", "host", "disk"])
def test_an_update_on_the_device_fetches_groups(state: str) -> None:
    """Two moments and the gradients go up once, and the moments down. No memory holds them twice."""
    kinds: dict[str, Any] = {"state": state, "gradients": "host", "path": tempfile.gettempdir()}
    kinds |= {"update": "device"} if state != "device" else {}
    accumulated, size, states = fp.accumulate(2), 4 * count_of_parameters(), 2 if state != "device" else 0
    plain, _ = peaks_and_bytes(Mesh(), accumulated, clip=1.0)
    (small, moved), (large, _) = (
        peaks_and_bytes(Mesh(), fp.offload(**kinds, group=group), accumulated, clip=1.0) for group in (1, "1MiB")
    )
    assert moved["host", "device"] == (1 + states) * size + 4 and moved["device", "host"] == (2 + states) * size
    assert plain["device"] - small["device"] > (0.9 + states / 2) * size and small["device"] < large["device"]
    assert small["host"] < (1.5 + states * (state == "host")) * size
    assert small.get("disk", 0) == (states * size if state == "disk" else 0)


@pytest.mark.parametrize("update", [None, "device"])
def test_state_is_updated_in_place_after_a_pipeline_with_clipping(update: str | None) -> None:
    """The norm is one level of programs before the update, in which no state is fetched."""
    pipeline, size = fp.pipeline("pipe", microbatches=2), count_of_parameters()
    offload = fp.offload(state="disk", update=update, path=tempfile.gettempdir(), group=1)
    peaks, _ = peaks_and_bytes(Mesh(pipe=2), offload, pipeline, clip=1.0)
    assert peaks["disk"] < 2 * 4 * size and peaks["host"] < 2 * 4 * size


def test_one_rank_does_not_hold_old_and_new_parameters() -> None:
    """Donated parameters are overwritten as they come back, on one rank too, where no bucket brings them."""
    precision = fp.mixed_precision("bf16", reduce="bf16")
    plan = fp.chain(precision, fp.zero(2, "data"), fp.offload(state="host"))
    program = trained(plan, Mesh(data=1), "adamw", donate=True)[0].program
    assert predicted(program) == measured(program)
    parameters_and_gradients = 4 * sum(leaf.numel() for leaf in optree.tree_leaves(parameters(3, 24, 16)))
    assert program.memory().peaks["device"] < parameters_and_gradients + 2 * 24 * 48
    assert not [move for move in program.moves() if move.node.target is TO_MEMORY and move.kind == "host → device"]


@pytest.mark.parametrize("bucket", ["auto", None])
def test_a_bucket_is_one_transfer(bucket: Any) -> None:
    plan = fp.chain(fp.mixed_precision("bf16"), fp.zero(2, "data"), fp.offload(state="host"))
    program = trained(plan, Mesh(data=2), "adamw", bucket=bucket)[0].program
    sums = [one for one in program.collectives() if one.kind == "psum_scatter"]
    gathers = [one for one in program.collectives() if one.kind == "all_gather"]
    kinds = [move.kind for move in program.moves() if move.operand.ndim]
    assert kinds.count("device → host") == len(sums) and kinds.count("host → device") == len(gathers)
    assert str(program.explain()).count("device → host") >= 1


def test_state_moves_between_memories(tmp_path: Path) -> None:
    """A run goes on from a checkpoint, or from a state, of a run in other memories, bit for bit."""
    zero = fp.zero(2, "data")
    plain, _, _ = expected = trained(zero, Mesh(data=2), "adamw", steps=4)
    (x, y), dtype = batch(8, 24, 16), torch.float32
    both = fp.offload(state="host", parameters="host")
    plans = [fp.chain(zero, fp.offload(state="host")), zero, fp.chain(fp.zero(3, "data"), both)]
    train, state, metrics = trained(plans[0], Mesh(data=2), "adamw", steps=1)
    for number, plan in enumerate(plans):
        train.save(state, tmp_path / str(number))
        train = fp.train_step(loss, OPTIMIZERS["adamw"], Mesh(data=2), plan)
        restored, moved = train.restore(tmp_path / str(number)), train.load(state)
        assert is_same(train.whole(restored), train.whole(moved))
        state, metrics = train(restored, x.to(dtype), y)
    assert is_same(train.whole(state), plain.whole(expected[1])) and is_same(metrics, expected[2])


def on_rank(rank: int) -> bool:
    """On real processes, and in the memories that the specs say."""
    before, after = [fp.mixed_precision("bf16"), fp.zero(3, "data")], [fp.accumulate(2)]
    options: dict[str, Any] = {"clip": 0.5, "reduction": "ordered"}
    a = trained(fp.chain(*before, *after), Mesh(data=2), "adamw", **options)
    moves = (
        fp.offload(state="host", parameters="host", fraction=0.5),
        fp.offload(state="host", update="device", gradients="host", group=1000),
    )
    runs = [trained(fp.chain(*before, moved, *after), Mesh(data=2), "adamw", **options) for moved in moves]
    return all(is_same(a[0].whole(a[1]), b[0].whole(b[1])) and is_same(a[2], b[2]) for b in runs)


def test_real_processes() -> None:
    assert run_on_processes(on_rank, 2) == [True, True]


def test_a_program_for_a_device_that_is_absent() -> None:
    """Its host values are in main memory, and its moves name both."""
    plan = fp.chain(fp.mixed_precision("fp16"), fp.zero(2, "data"), fp.offload(state="host", parameters="host"))
    train = fp.train_step(loss, OPTIMIZERS["scheduled"], Mesh(data=2), plan, clip=1.0)
    params, data = parameters(2, 24, 16), batch(8, 24, 16)
    there = fp.abstract((params, data), device="cuda")
    program = train.lower(there[0], *there[1])
    here = train.lower(params, *data)
    assert program.bytes_moved() == here.bytes_moved() and program.memory().peaks == here.memory().peaks
    for node, memory in memories_of(program.traced).items():
        assert all(
            each.device.type == ("cpu" if memory == "host" or not each.ndim else "cuda") or not each.ndim
            for each in info(node).results
        )


def test_wrong_orders_and_memories_are_refused() -> None:
    right = r"write chain\(zero\(2, 'data'\), offload\(state='host'\), accumulate\(2\)\)"
    with pytest.raises(fp.OrderError, match=right):
        fp.chain(fp.zero(2, "data"), fp.accumulate(2), fp.offload(state="host"))
    with pytest.raises(ValueError, match="the memories are 'device', 'host'"):
        fp.offload(state="tape")
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        fp.offload(state="host", fraction=0)
    with pytest.raises(ValueError, match=r"gradients='disk'.*: each microbatch is added to the sums"):
        fp.offload(gradients="disk", path=tempfile.gettempdir())
    for wrong in ({"gradients": "host"}, {"state": "host", "path": "/"}):
        with pytest.raises(ValueError, match="update='device' or 'host' is where state='host' or state='disk'"):
            fp.offload(update="device" if "state" not in wrong else "disk", **wrong)
    with pytest.raises(fp.BudgetError, match=r"of the memory 'host', .* above the budget, at "):
        trained(fp.offload(state="host"), Mesh(), "adamw", memory=fp.Memory(device="1MiB", host="1KiB"))
    on_disk = fp.offload(state="disk", path=tempfile.gettempdir())
    with pytest.raises(fp.BudgetError, match=r"of the memory 'disk', .* above the budget, at "):
        trained(on_disk, Mesh(), "adamw", memory=fp.Memory(disk="1KiB"))


def test_a_second_offload_adds_to_the_first() -> None:
    def peaks(*moves: fp.offload) -> Any:
        plan = fp.chain(fp.zero(2, "data"), *moves)
        return trained(plan, Mesh(data=2), "adamw", steps=1)[0].program.memory().peaks

    together = peaks(fp.offload(state="host", parameters="host"))
    assert peaks(fp.offload(state="host"), fp.offload(parameters="host")) == together
    assert peaks(fp.offload(parameters="host"), fp.offload(state="host")) == together
    first, second = {"layers/0": "host"}, {"layers/1": "host"}
    both = peaks(fp.offload(parameters={**first, **second}))
    assert peaks(fp.offload(parameters=first), fp.offload(parameters=second)) == both
    apart = peaks(fp.offload(gradients="host", group=1), fp.offload(state="host", update="device", group=1))
    assert apart == peaks(fp.offload(state="host", update="device", gradients="host", group=1))
    assert apart == peaks(fp.offload(state="host", update="device", group=1), fp.offload(gradients="host"))
    with pytest.raises(ValueError, match="its fraction is that of the gradients too"):
        peaks(fp.offload(state="host", fraction=0.5), fp.offload(gradients="host"))
    with pytest.raises(ValueError, match="name the memory of the state once"):
        peaks(fp.offload(state="host"), fp.offload(state="disk", path=tempfile.gettempdir()))
    with pytest.raises(fp.errors.SpecError, match="is the first match of no parameter; the nearest are "):
        peaks(fp.offload(parameters={"head": "host", "nope": "disk"}, path=tempfile.gettempdir()))
    with pytest.raises(ValueError, match="a flat layout has one vector of state"):
        trained(
            fp.chain(fp.zero(1, "data", layout="flat"), fp.offload(state="host", fraction=0.4)), Mesh(data=2), "adamw"
        )
