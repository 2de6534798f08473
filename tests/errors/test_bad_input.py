"""Bad input gets an error that says what, where, the numbers, and how to fix it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.errors import RuleError
from sharding_specs import Mesh, MeshError, P, SpecError, apply_rules, shard

MESH = Mesh(data=2, tensor=2)
OPTIMIZERS = (fp.optim.adam, fp.optim.adamw, fp.optim.lion, fp.optim.sgd, fp.optim.adafactor)
HERE = Path(__file__).name

Params = dict[str, torch.Tensor]


def loss(params: Params, x: torch.Tensor) -> torch.Tensor:
    return ((x @ params["w1"]).relu() @ params["w2"]).sum()


def params() -> Params:
    return {"w1": torch.ones(4, 6), "w2": torch.ones(6, 4)}


def under(specs: Any, mesh: Mesh = MESH, f: Any = loss) -> Callable[[], Any]:
    return lambda: fp.compile(fp.tensor_parallel("tensor", specs)(f), mesh)(params(), torch.ones(8, 4))


def body(f: Callable[..., Any], out: P) -> Callable[[], Any]:
    return lambda: fp.shard_map(f, Mesh(tensor=2), (P("tensor"),), out)(torch.ones(4))


def line_of(f: Callable[..., Any], text: str) -> str:
    """`file:line` of the line of f that holds a text."""
    lines, start = inspect.getsourcelines(f)
    return f"{HERE}:{start + next(index for index, line in enumerate(lines) if text in line)}"


def message(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# -----------------------------------------------------------------------------
# Specs and rules
# -----------------------------------------------------------------------------


def test_an_axis_that_the_mesh_has_not() -> None:
    said = message(under({"w1": P(None, "tenser"), "*": P()}), SpecError)
    assert "'tenser'" in said and "data, tensor" in said and "w1" in said


def test_a_spec_with_more_dims_than_the_tensor() -> None:
    said = message(under({"w1": P(None, None, "tensor"), "*": P()}), SpecError)
    assert "w1" in said and "(4, 6)" in said and "the spec has 3 dims, the tensor has 2; drop the last entries" in said


@pytest.mark.parametrize("specs", [{"w1": "embed hidden/tensor extra", "*": P()}, "embed hidden extra"])
def test_a_string_that_names_more_dims_than_the_tensor_has(specs: Any) -> None:
    said = message(under(specs), SpecError)
    assert "w1: shape (4, 6)" in said and "the spec has 3 dims, the tensor has 2; drop the last entries" in said
    assert "the spec has 3 dims" in message(lambda: shard(params(), "embed hidden extra", MESH, 0), SpecError)


def test_a_string_with_an_ellipsis_names_only_what_stands_before_it() -> None:
    under({"w1": "embed hidden/tensor ...", "w2": "hidden/tensor ..."})()


def test_a_constraint_that_names_more_dims_than_the_value_has() -> None:
    def f(params: Params, x: torch.Tensor) -> torch.Tensor:
        return fp.constrain(x @ params["w1"], "batch hidden/tensor extra").sum()

    said = message(under({"*": P()}, f=f), SpecError)
    assert line_of(f, "fp.constrain") in said and "(8, 6)" in said and "the spec has 3 dims" in said


def test_a_constraints_axis_that_is_nearly_one_of_the_mesh() -> None:
    def f(params: Params, x: torch.Tensor) -> torch.Tensor:
        return fp.constrain(x @ params["w1"], P(None, "tesnor")).sum()

    with pytest.warns(UserWarning, match=r"has no axis 'tesnor', which is ignored; did you mean 'tensor'\?") as caught:
        under({"*": P()}, f=f)()
    assert f"{Path(caught[0].filename).name}:{caught[0].lineno}" == line_of(f, "fp.constrain")


def test_a_constraints_axis_that_this_mesh_has_not() -> None:
    def f(params: Params, x: torch.Tensor) -> torch.Tensor:
        return fp.constrain(x @ params["w1"], P("sequence", "expert")).sum()

    under({"*": P()}, f=f)()  # the model may name axes that only other meshes have


def test_a_dim_that_does_not_divide() -> None:
    said = message(under({"w1": P(None, "tensor"), "w2": P("tensor")}, Mesh(tensor=4)), SpecError)
    assert "0/w1: shape (4, 6), P(None, 'tensor'): dim 1 of size 6 does not divide by 'tensor' of 4 ranks" in said
    assert "0/w2: shape (6, 4)" in said, "every offending leaf is listed"
    assert "make it 8" in said


def test_an_axis_used_twice() -> None:
    assert "uses the axis 'tensor' twice; an axis splits at most one dim" in message(
        lambda: P("tensor", "tensor"), SpecError
    )


def test_rules_that_fit_nothing() -> None:
    said = message(lambda: apply_rules({"w1": P("tensor"), "w3": P()}, params(), strict=True), SpecError)
    assert "no pattern matches w2" in said and "pattern 'w3' finds no leaf" in said
    assert "end the rules with ('*', P())" in said


def test_a_spec_tree_of_another_shape() -> None:
    said = message(lambda: shard(params(), {"w1": P(), "w9": P()}, MESH, 0), SpecError)
    assert "w9" in said and "w2" in said


def test_a_mesh_that_does_not_read() -> None:
    assert "two axes" not in message(lambda: Mesh.parse("data=two"), MeshError)
    assert "data" in message(lambda: Mesh.parse("data=two"), MeshError)
    assert "size 0" in message(lambda: Mesh(data=0), MeshError)


def test_constrain_to_what_does_not_divide() -> None:
    def f(params: Params, x: torch.Tensor) -> torch.Tensor:
        return fp.constrain(x @ params["w1"][:, :5], P(None, "tensor")).sum()

    said = message(under({"*": P()}, f=f), SpecError)
    assert "dim 1 of size 5 does not divide into 2 blocks along 'tensor'; pad it to 6" in said
    assert line_of(f, "fp.constrain") in said


# -----------------------------------------------------------------------------
# Local bodies
# -----------------------------------------------------------------------------


def test_a_missing_psum() -> None:
    said = message(body(lambda x: x.sum(), P()), fp.OutSpecError)
    assert "differs by rank along 'tensor'" in said and "a missing psum? write fp.psum(x, 'tensor')" in said


def test_a_doubled_psum() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        total = fp.psum(x, "tensor")
        return fp.psum(total, "tensor")

    said = message(body(twice, P()), fp.TypingError)
    assert "the operand is Invariant there" in said and line_of(twice, "fp.psum(total") in said


def test_a_wrong_out_spec() -> None:
    said = message(body(lambda x: fp.psum(x, "tensor"), P("tensor")), fp.OutSpecError)
    assert "is the same on all ranks along 'tensor', but P('tensor') says that it is sharded" in said


def test_a_nonlinear_op_on_partial_sums() -> None:
    def squared(x: torch.Tensor) -> torch.Tensor:
        partial = fp.pcast(x, "tensor", to="unreduced")
        return fp.psum(partial.exp(), "tensor")

    said = message(body(squared, P()), fp.TypingError)
    assert "is not linear" in said and "write fp.psum(x, 'tensor') first" in said
    assert line_of(squared, "partial.exp()") in said


def test_a_collective_outside_a_mesh() -> None:
    said = message(lambda: fp.psum(torch.ones(2), "data"), fp.UnboundAxisError)
    assert "no such axis is bound here" in said and "fp.shard_map, fp.compile or fp.vmap(axis_name='data')" in said


def test_a_collective_over_an_axis_that_a_transform_takes_care_of() -> None:
    def f(params: Params, x: torch.Tensor) -> torch.Tensor:
        return fp.psum(loss(params, x), "tensor")

    assert "this axis is hidden here" in message(under({"*": P()}, f=f), fp.UnboundAxisError)


def test_torch_funcs_grad_inside_a_body() -> None:
    """True 11, and torch.func's gradient would be [1, 10], without a word."""

    def call(w: torch.Tensor, x: torch.Tensor, grad: Any) -> torch.Tensor:
        return grad(lambda w: fp.psum((w * x).sum(), "tensor"))(w)

    arguments = (torch.tensor(1.0), torch.tensor([1.0, 10.0]))
    ours = fp.shard_map(lambda w, x: call(w, x, fp.grad), Mesh(tensor=2), (P(), P("tensor")), P())
    assert ours(*arguments) == 11
    theirs = fp.shard_map(lambda w, x: call(w, x, torch.func.grad), Mesh(tensor=2), (P(), P("tensor")), P())
    assert "Use fp.grad" in message(lambda: theirs(*arguments), fp.TypingError)


# -----------------------------------------------------------------------------
# Functions that cannot be traced or partitioned
# -----------------------------------------------------------------------------


def test_a_value_read_back_into_python() -> None:
    def f(params: Params, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return loss(params, x)
        return loss(params, -x)

    said = message(under({"*": P()}, f=f), ValueError)
    assert line_of(f, "if x.sum() > 0") in said


def test_torchs_own_random_numbers() -> None:
    def f(params: Params, x: torch.Tensor) -> torch.Tensor:
        return loss(params, x + torch.poisson(x.abs()))

    said = message(under({"*": P()}, f=f), ValueError)
    assert "draws from torch's generator" in said and "fp.random.uniform" in said and line_of(f, "poisson") in said


def test_dropout_without_a_key() -> None:
    def f(params: Params, x: torch.Tensor) -> torch.Tensor:
        return loss(params, torch.nn.functional.dropout(x, 0.5))

    said = message(under({"*": P()}, f=f), fp.errors.RandomKeyError)
    assert "no key is given" in said and "train_step(seed=…)" in said


def test_a_users_autograd_function() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    def f(params: Params, x: torch.Tensor) -> torch.Tensor:
        return loss(params, Twice.apply(x))

    said = message(under({"*": P()}, f=f), ValueError)
    assert "Twice" in said or "autograd.Function" in said


def test_changing_what_was_closed_over() -> None:
    seen = torch.zeros(4, 6)

    def f(params: Params, x: torch.Tensor) -> torch.Tensor:
        seen.add_(params["w1"])
        return loss(params, x)

    said = message(under({"*": P()}, f=f), ValueError)
    assert "The change would be lost; pass it in and return it" in said and line_of(f, "seen.add_") in said


def test_an_op_without_a_rule() -> None:
    def f(params: Params, x: torch.Tensor) -> torch.Tensor:
        return params["w1"].kthvalue(2).values.sum() + loss(params, x)

    specs = {"w1": P("tensor"), "w2": P()}
    with pytest.warns(fp.PartitionWarning, match=r"kthvalue"):
        fp.compile(fp.tensor_parallel("tensor", specs)(f), MESH)(params(), torch.ones(8, 4))
    strict = fp.tensor_parallel("tensor", specs, strict=True)
    said = message(lambda: fp.compile(strict(f), MESH)(params(), torch.ones(8, 4)), fp.PartitionError)
    assert "kthvalue" in said and line_of(f, "kthvalue") in said


def test_a_rule_of_no_op() -> None:
    said = message(lambda: fp.register_rule(torch.sin, "... -> ..."), TypeError)
    assert "takes an op, as torch.ops.mylib.scale_rows, not" in said
    said = message(lambda: fp.register_rule(torch.ops.aten.sin, 3), TypeError)  # type: ignore[arg-type]
    assert "a rule is a text such as '~r c, r -> r c', or a function, not 3" in said


def test_a_rule_that_is_no_text() -> None:
    library = torch.library.Library("bad_input_tests", "DEF")
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", torch.clone, "CompositeExplicitAutograd")
    torch.library.register_fake("bad_input_tests::same", torch.clone, lib=library)
    fp.register_rule(torch.ops.bad_input_tests.same, lambda node: 3)  # type: ignore[arg-type, return-value]

    def f(params: Params, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.bad_input_tests.same(x @ params["w1"]).sum()

    said = message(lambda: fp.compile(fp.data_parallel("data")(f), MESH)(params(), torch.ones(8, 4)), RuleError)
    assert "same.default" in said and line_of(f, "same") in said
    assert "is a function that returned 3; it must return the rule's text" in said


# -----------------------------------------------------------------------------
# Plans and steps
# -----------------------------------------------------------------------------


def test_a_wrong_order() -> None:
    said = message(lambda: fp.chain(fp.zero(3, "data"), fp.tensor_parallel("tensor", {})), fp.OrderError)
    assert "write chain(tensor_parallel('tensor'), zero(3, 'data'))" in said


def test_two_transforms_on_one_axis() -> None:
    said = message(lambda: fp.chain(fp.data_parallel("data"), fp.zero(1, "data")), fp.OrderError)
    assert "both take the axis 'data'" in said


def test_two_transforms_that_take_the_batch_apart() -> None:
    for both in itertools.permutations([fp.accumulate(2), fp.pipeline("pipe", microbatches=4)]):
        said = message(partial(fp.chain, *both), fp.OrderError)
        assert "leave accumulate(2) out, and give the pipeline as many times more microbatches" in said


def test_what_is_no_transform() -> None:
    assert "chain takes transforms" in message(lambda: fp.chain(torch.relu), TypeError)  # type: ignore[arg-type]


def test_a_bare_function() -> None:
    assert "pass in_specs= and out_specs=" in message(lambda: fp.compile(loss, MESH), fp.LayoutError)


def test_a_layout_given_twice() -> None:
    local = fp.data_parallel("data")(loss)
    said = message(lambda: fp.compile(local, MESH, in_specs=P(), out_specs=P()), fp.LayoutError)
    assert "carries its layout; leave in_specs and out_specs out" in said


def test_a_layout_lost_to_torch_func() -> None:
    local = fp.data_parallel("data")(loss)
    said = message(lambda: fp.compile(torch.func.grad(local), MESH), fp.LayoutError)
    assert "torch.func's transforms drop the layout" in said


def test_a_loss_that_is_no_scalar() -> None:
    step = fp.compile(fp.grad(fp.data_parallel("data")(lambda w, x: x @ w)), MESH)
    said = message(lambda: step(torch.ones(4), torch.ones(8, 4)), ValueError)
    assert "a gradient is taken of a scalar" in said and "sum or average it" in said


def test_a_batch_that_does_not_divide() -> None:
    step = fp.compile(fp.data_parallel("data")(loss), Mesh(data=3))
    said = message(lambda: step(params(), torch.ones(8, 4)), SpecError)
    assert "1: shape (8, 4), P('data'): dim 0 of size 8 does not divide by 'data' of 3 ranks" in said
    assert "fp.pad_batch(batch, rows) fills up a batch" in said and "pad=True" not in said


def test_a_transform_over_an_axis_that_the_mesh_does_not_have() -> None:
    local = fp.tensor_parallel("tp", {"w": P("tp")})(loss)
    for call in (fp.compile, lambda f, mesh: fp.train_step(f, fp.optim.sgd(0.1), mesh)):
        said = message(lambda call=call: call(local, MESH), MeshError)
        assert f"{MESH!r} has no axis 'tp', over which tensor_parallel('tp') splits; its axes are: " in said


@pytest.mark.parametrize(
    ("plan", "who", "where"),
    [
        (fp.tensor_parallel("tensor", {"w1": P("model")}), "tensor_parallel('tensor')", "0/w1: P('model')"),
        (fp.zero(3, "data", {"w1": P("model")}), "zero(3, 'data')", "0/w1: P('model')"),
        (fp.data_parallel("data", batch=P("model")), "data_parallel('data')", "1: P('model')"),
        (fp.partition, "partition('data')", "1: P('model')"),
    ],
)
def test_a_spec_of_an_axis_that_the_mesh_does_not_have(plan: Any, who: str, where: str) -> None:
    local = plan(loss, "data", (P(), P("model"))) if plan is fp.partition else plan(loss)
    said = message(lambda: fp.compile(local, Mesh(data=2, tensor=2))(params(), torch.ones(8, 4)), SpecError)
    assert f"specs of {who} name axes that the mesh does not have" in said
    assert f"{where}: the mesh has no axis 'model' (its axes: " in said and "data" in said


def test_a_spec_tree_of_an_axis_that_the_mesh_does_not_have() -> None:
    for specs, where in (({"w1": P("model")}, "w1: "), ([("*", "rows/model")], "*: "), (P("model"), "")):
        said = message(lambda specs=specs: fp.from_specs(specs, Mesh(data=2)), SpecError)
        assert f"Mesh(data=2) does not have:\n  {where}'model'" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": "bogus"}, "it is 'global' or 'own'"),
        ({"plan": "zero"}, "train_step takes a plan"),
        ({"clip": -1}, r"clip=-1\): the bound .* is a number above 0, or None"),
        ({"clip": 0.0}, "clip=0.0"),
        ({"clip": float("nan")}, "clip=nan"),
        ({"clip": "1"}, "clip='1'"),
    ],
)
def test_a_training_steps_arguments(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        fp.train_step(loss, fp.optim.sgd(0.1), MESH, **options)


WRONG_NUMBERS: list[tuple[Any, dict[str, Any], str]] = [
    *((make, {"lr": lr}, "a number of at least 0, or a function") for make in OPTIMIZERS for lr in (-0.1, "0.1", None)),
    *((make, {"lr": 0.1, "weight_decay": value}, "at least 0") for make in OPTIMIZERS for value in (-0.1, "0.1")),
    *((make, {"lr": 0.1, "eps": -1e-8}, "at least 0") for make in OPTIMIZERS[:2]),
    *(
        (make, {"lr": 0.1, "betas": betas}, "two numbers of at least 0 and less than 1")
        for make in OPTIMIZERS[:3]
        for betas in ((0.9, 1.0), (-0.1, 0.9), (0.9, float("nan")), 0.9, (0.9,))
    ),
    (fp.optim.sgd, {"lr": float("nan")}, "at least 0"),
    (fp.optim.sgd, {"lr": torch.ones(2)}, "at least 0"),
    (fp.optim.sgd, {"lr": 0.1, "momentum": -0.9}, "at least 0"),
    (fp.optim.sgd, {"lr": 0.1, "momentum": 0.9, "dampening": "0"}, "give a number"),
    (fp.optim.adafactor, {"beta2_decay": 0.8}, "at most 0"),
    (fp.optim.adafactor, {"eps": (None, -1e-3)}, "at least 0"),
    (fp.optim.adafactor, {"eps": 1e-3}, "and ε₂"),
    (fp.optim.adafactor, {"d": 0.0}, "above 0"),
]


@pytest.mark.parametrize(("make", "options", "said"), WRONG_NUMBERS)
def test_an_optimizers_numbers(make: Any, options: dict[str, Any], said: str) -> None:
    *_, (name, value) = options.items()
    told = message(lambda: make(**options), ValueError)
    assert told.startswith(f"{make.__name__}({name}") and said in told and (name == "eps" or repr(value) in told)


def test_rates_that_are_no_plain_numbers() -> None:
    for make in OPTIMIZERS:
        for lr in (0, torch.tensor(0.1), fp.optim.schedules.constant(0.1), lambda step: 0.1):
            make(lr)


@pytest.mark.parametrize("keep", [["w2", "*W1*"], "*W1*"])
def test_a_pattern_of_parameters_to_keep_that_finds_none(keep: Any) -> None:
    plan = fp.chain(fp.mixed_precision("bf16", keep=keep), fp.data_parallel("data"))
    said = message(lambda: fp.compile(plan(loss), Mesh(data=2))(params(), torch.ones(8, 4)), ValueError)
    assert "no parameter matches '*W1*'" in said and "The nearest paths are: w1" in said


def test_torchs_optimizer() -> None:
    weights = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(TypeError, match=r"takes an optimizer from fp.optim"):
        fp.train_step(loss, torch.optim.SGD(weights), MESH)  # type: ignore[arg-type]


def test_wrapped_modules() -> None:
    class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

    with pytest.raises(Exception, match="DistributedDataParallel"):
        fp.functional(DistributedDataParallel())
