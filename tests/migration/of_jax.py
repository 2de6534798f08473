"""Rows for programs in JAX."""

from __future__ import annotations

from typing import Any

import torch

import functional_parallel as fp
from sharding_specs import Mesh, P

from .checks import BODY, UNCHANGED, close, in_body, products, recomputes, traced_twice
from .names import loss, params, x, y
from .of_deepspeed import repeats_product
from .row import Row

__all__ = ["ROWS", "left"]

DATA, PAIR = Mesh(data=2), Mesh(data=2, tensor=2)
HALVES = BODY[:2], BODY[2:]


def left() -> dict[str, Any]:
    """Names of the left sides. JAX does not have to be installed for the rest of this module."""
    import jax

    return {"jax": jax, "NamedSharding": jax.NamedSharding, "P": jax.P}


def of_data(in_spec: P, out_spec: P, want: torch.Tensor) -> Any:
    return in_body(in_spec, out_spec, want, DATA)


def sums_gradients(f: Any) -> bool:
    """The transpose of `pvary` is a sum over the ranks."""

    def body(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return fp.psum((f(w) * x).sum(), "data")

    step = fp.shard_map(fp.grad(body), DATA, (P(), P("data")), P())
    return close(step(torch.ones(4), BODY), BODY.sum(0))


def constrained(f: Any) -> bool:
    step = fp.compile(fp.data_parallel("data")(lambda w, x: f(x @ w).sum()), DATA)
    return close(step(torch.ones(4, 2), x), (x @ torch.ones(4, 2)).sum())


def saves_products(plan: Any) -> bool:
    return products(plan) == products(UNCHANGED)


def is_one_step(found: Any) -> bool:
    (state, metrics), old = found
    return state.step == 1 and metrics.loss.ndim == 0 and "donated" in repr(old)


ROWS = [
    Row('jax.make_mesh((2, 2), ("data", "tensor"))', "Mesh(data=2, tensor=2)", lambda found: found == PAIR),
    Row(
        'P(("data", "tensor"), None)',
        'P(("data", "tensor"))',
        lambda spec: spec == P(("data", "tensor")),
        "Trailing dims are replicated.",
    ),
    Row(
        'jax.device_put(x, NamedSharding(mesh, P("data")))',
        'shard(x, P("data"), mesh, rank=1)',
        lambda part: close(part, x[4:]),
        "Rarely needed: compiled functions take and return full tensors.",
    ),
    Row(
        'jax.jit(f, in_shardings=NamedSharding(mesh, P("data")))',
        'fp.compile(fp.data_parallel("data")(loss), mesh)',
        lambda f: close(f(params, x, y), loss(params, x, y)),
        "A plan states the layouts of the parameters and of the batch. Layouts of other values follow by rules.",
    ),
    Row(
        'jax.jit(f, in_shardings=({"w": NamedSharding(mesh, P("data", "tensor"))}, None))',
        'fp.from_specs({"w": P("data", "tensor")}, Mesh(data=2, tensor=2))',
        lambda plan: close(
            fp.compile(plan(lambda p, x: (x @ p["w"]).sum()), PAIR)({"w": torch.ones(4, 4)}, x),
            (x @ torch.ones(4, 4)).sum(),
        ),
        "Specs of the parameters become a plan: here tensor parallelism and ZeRO-3.",
    ),
    Row(
        "jax.jit(train_step, donate_argnums=0)",
        "train(state, x, y), state",
        is_one_step,
        "`fp.train_step` donates the state. `train.copy(state)` keeps it.",
    ),
    Row(
        "jax.jit(lambda params, cache, x: (x, cache + 1), donate_argnums=1)",
        "fp.compile(plan(lambda params, cache, x: (x, cache + 1)), mesh, state=1)",
        lambda f: close(f(params, x, x)[1].full(), x + 1),
        "The cache stays on the ranks as an `fp.Sharded`.",
    ),
    Row(
        'jax.lax.with_sharding_constraint(x, P("data"))',
        'lambda x: fp.constrain(x, P("data"))',
        constrained,
        "In a model. An axis that no transform of the plan splits is an error.",
    ),
    Row(
        'jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P())',
        'fp.shard_map(lambda x: fp.psum(x.sum(0), "data"), mesh, in_specs=P("data"), out_specs=P())',
        lambda f: close(f(x), x.sum(0)),
        "Types are always checked.",
    ),
    Row(
        'jax.jit(lambda w, x: jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P())(x * w))',
        'lambda w, x: fp.shard_map(lambda x: fp.psum(x.sum(0), "data"), mesh, P("data"), P())(x * w)',
        lambda f: close(fp.compile(fp.data_parallel("data")(f), DATA)(torch.full((4,), 2.0), x), (x * 2).sum(0)),
        "In a model, under a plan that splits the axis. Along other axes the plan partitions the body.",
    ),
    Row(
        'jax.pmap(f, axis_name="data")',
        'fp.vmap(lambda x: fp.psum(x, "data"), axis_name="data")',
        lambda f: close(f(BODY), BODY.sum(0).expand(4, 4)),
        "On one process, for tests. To run on ranks, use `fp.shard_map`.",
    ),
    Row(
        'jax.lax.psum(x, "data")',
        'lambda x: fp.psum(x, "data")',
        of_data(P("data"), P(), HALVES[0] + HALVES[1]),
    ),
    Row(
        'jax.lax.pmean(x, "data")',
        'lambda x: fp.pmean(x, "data")',
        of_data(P("data"), P(), (HALVES[0] + HALVES[1]) / 2),
    ),
    Row(
        'jax.lax.pmax(x, "data")',
        'lambda x: fp.pmax(x.detach(), "data")',
        of_data(P("data"), P(), HALVES[1]),
        "It has no derivative, so its operand is detached.",
    ),
    Row(
        'jax.lax.all_gather(x, "data", tiled=True)',
        'lambda x: fp.all_gather(x, "data", to="invariant")',
        of_data(P("data"), P(), BODY),
        'Without `to="invariant"` the result varies over the ranks, and its transpose is `psum_scatter`.',
    ),
    Row(
        'jax.lax.psum_scatter(x, "data", tiled=True)',
        'lambda x: fp.psum_scatter(x, "data")',
        of_data(P("data"), P("data"), HALVES[0] + HALVES[1]),
    ),
    Row(
        'jax.lax.all_to_all(x, "data", split_axis=1, concat_axis=0, tiled=True)',
        'lambda x: fp.all_to_all(x, "data", split_dim=1, concat_dim=0)',
        of_data(P("data"), P(None, "data"), BODY),
    ),
    Row(
        'jax.lax.ppermute(x, "data", perm=[(0, 1), (1, 0)])',
        'lambda x: fp.ppermute(x, "data", [(0, 1), (1, 0)])',
        of_data(P("data"), P("data"), torch.cat(HALVES[::-1])),
    ),
    Row(
        'jax.lax.axis_index("data")',
        'lambda x: x + fp.axis_index("data")',
        of_data(P("data"), P("data"), torch.cat([HALVES[0], HALVES[1] + 1])),
        "`jax.lax.axis_size` is `fp.axis_size`.",
    ),
    Row(
        'jax.lax.pcast(x, "data", to="varying")',
        'lambda x: fp.pvary(x, "data")',
        sums_gradients,
        "Inserted where the types imply it.",
    ),
    Row(
        "jax.value_and_grad(f)",
        "grads, value = fp.grad_and_value(loss)(params, x, y)",
        lambda found: close(found[1], loss(params, x, y)),
        "Gradients are first, as in `torch.func`.",
    ),
    Row(
        "jax.grad(f)",
        "fp.compile(fp.grad(plan(loss)), mesh)",
        lambda f: close(f(params, x, y), torch.func.grad(loss)(params, x, y)),
        "`fp.jvp`, `fp.hessian` and `fp.vmap` too.",
    ),
    Row(
        "jax.jit(lambda h, w: jax.numpy.sin(h @ w))",
        "fp.repeated(lambda h, w: torch.sin(h @ w))",
        traced_twice,
        "In a model that calls it for many layers. Outside of `fp.compile` it is the function itself.",
    ),
    Row(
        "jax.checkpoint(f)",
        "fp.recompute(lambda h, w: torch.sin(h @ w))",
        repeats_product,
    ),
    Row(
        "jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)",
        'fp.remat(lambda node: "mm" in str(node.target))',
        saves_products,
        "A policy is a function of a node of the program.",
    ),
    Row(
        "jax.checkpoint(f, policy=jax.checkpoint_policies.nothing_saveable)",
        'fp.remat("nothing")',
        recomputes,
    ),
    Row(
        "jax.random.fold_in(jax.random.key(0), 1)",
        "fp.random.fold_in(fp.random.key(0), 1)",
        lambda key: bool((fp.random.key(0) != key).any()),
    ),
    Row(
        "jax.random.normal(key, x.shape)",
        "fp.random.normal(fp.random.key(0), x)",
        lambda drawn: drawn.shape == x.shape,
        "`fp.random.next_key()` makes a key in a model, new in every step of `train_step(seed=0)`.",
    ),
    Row(
        "jax.make_jaxpr(f)(x)",
        "step = fp.compile(plan(loss), mesh)\nstr(step.lower(params, x, y))",
        lambda text: "psum" in text,
        "`step.explain(params, x, y)` is a table of the collectives.",
    ),
    Row(
        "jax.ShapeDtypeStruct(x.shape, x.dtype)",
        'train.lower(fp.abstract(params, "cuda"), fp.abstract(x, "cuda"), fp.abstract(y, "cuda"))',
        lambda program: program.memory().peak > 0,
        "The machine needs no such device.",
    ),
    Row(
        "jax.distributed.initialize()",
        "",
        lambda _: fp.rank() == 0,
        "`torchrun` starts the processes. The library makes the process group when it is first needed.",
    ),
]
