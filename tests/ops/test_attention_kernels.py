"""The attention kernel on CUDA is a function of shapes and dtypes, and a program for CUDA contains it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_parallel as fp
from functional_parallel.ir import info
from functional_parallel.ops.attention_kernels import AttentionKernel, Shape, attention_kernel
from sharding_specs import Mesh

LONG = Shape(torch.bfloat16, 64, 64, 1024, 1024, has_mask=False, is_causal=True)
CHOSEN: dict[str, tuple[Shape, str]] = {
    "full tiles": (LONG, "cudnn"),
    "heads of 128": (LONG._replace(head=128, value=128, dtype=torch.float16), "cudnn"),
    "a tile that is not full": (LONG._replace(queries=1000, keys=1000), "flash"),
    "16 tokens": (LONG._replace(head=8, value=8, queries=16, keys=16), "flash"),
    "heads of 96": (LONG._replace(head=96, value=96), "flash"),
    "heads of 20": (LONG._replace(head=20, value=20), "flash"),
    "one query": (LONG._replace(queries=1, is_causal=False), "flash"),
    "causal, not square": (LONG._replace(queries=512), "efficient"),
    "a mask": (LONG._replace(has_mask=True, is_causal=False), "efficient"),
    "values of another size": (LONG._replace(value=32), "efficient"),
    "heads of 512": (LONG._replace(head=512, value=512), "efficient"),
    "float32": (LONG._replace(dtype=torch.float32), "efficient"),
    "float64": (LONG._replace(dtype=torch.float64), "math"),
    "no keys": (LONG._replace(keys=0, is_causal=False), "math"),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_choice(name: str) -> None:
    shape, kernel = CHOSEN[name]
    found = attention_kernel(shape)
    assert found.name == kernel and found.reason


def test_choice_by_device_and_switches() -> None:
    assert attention_kernel(LONG, (8, 0)).name == "flash"
    assert attention_kernel(LONG, (7, 5)).name == "math"
    assert attention_kernel(LONG._replace(dtype=torch.float16), (7, 5)).name == "efficient"
    assert attention_kernel(LONG._replace(head=200, value=200), (8, 6)).name == "efficient"
    assert attention_kernel(LONG, enabled=["efficient"]).name == "efficient"
    found = attention_kernel(LONG, enabled=[])
    told = (f"not {name}: disabled in torch.backends.cuda" for name in ("cudnn", "flash", "efficient"))
    assert found == AttentionKernel("math", "; ".join(told))


def lowered(shape: Shape, heads: tuple[int, int] = (4, 4), batch: tuple[int, ...] = (2,)) -> Any:
    """Return the program of the gradients of an attention on CUDA, of (queries, keys, values)."""
    (queries, groups), (_, head, value, times, keys, *_) = heads, shape
    sizes = ((queries, times, head), (groups, keys, head), (groups, keys, value))
    qkv = [torch.zeros(*batch, *size) for size in sizes]
    mask = [torch.ones(shape.queries, shape.keys, dtype=torch.bool)] if shape.has_mask else []

    def attend(qkv: list[Tensor], *mask: Tensor) -> Tensor:
        options: dict[str, Any] = {"is_causal": shape.is_causal, "enable_gqa": heads[0] != heads[1]}
        return F.scaled_dot_product_attention(*qkv, *mask, **options).float().square().sum()

    step = fp.compile(fp.grad(fp.remat("nothing")(attend)), Mesh())
    return step.lower(fp.abstract(qkv, dtype=shape.dtype), *fp.abstract(mask))


@pytest.mark.parametrize("name", CHOSEN)
def test_program(name: str) -> None:
    shape, kernel = CHOSEN[name]
    program = lowered(shape)
    ops = [str(node.target) for node in program.traced.nodes if "scaled_dot" in str(node.target)]
    wanted = f"aten._scaled_dot_product_{kernel}_attention"
    assert ops == ([] if kernel == "math" else [f"{wanted}.default", f"{wanted}_backward.default"])
    notes = [note for note in program.explain().notes if note.startswith("attention at test_attention_kernels.py")]
    assert len(notes) == (kernel != "math") and all(f": {kernel} kernel" in note for note in notes)
    outputs = [info(output).aval for output in program.traced.outputs]
    assert [each.shape for each in outputs] == [info(node).aval.shape for node in program.traced.inputs[:3]]
    assert {each.dtype for each in outputs} == {shape.dtype}


@pytest.mark.parametrize("dims", [0, 1, 3])
def test_other_numbers_of_dims_and_grouped_queries(dims: int) -> None:
    short = LONG._replace(queries=16, keys=16)
    program = lowered(short, (4, 2), (2, 3, 1)[:dims])
    assert "_scaled_dot_product_flash_attention(" in str(program)
    masked = lowered(short._replace(has_mask=True, is_causal=False), (4, 2), (2, 3, 1)[:dims])
    assert "_scaled_dot_product_efficient_attention(" in str(masked)


@pytest.mark.parametrize(("head", "dtype"), list(product((6, 8), (torch.float16, torch.float32))))
def test_what_the_kernels_require_of_memory(head: int, dtype: torch.dtype) -> None:
    """Heads are filled up to multiples of 16 bytes, and the rows of a mask begin at multiples of 8 elements."""
    program = lowered(Shape(dtype, head, head, 5, 7, has_mask=True, is_causal=False))
    (kernel,) = [node for node in program.traced.nodes if str(node.target).endswith("efficient_attention.default")]
    q, k, v, bias = (info(operand).aval for operand in kernel.args[:4])
    assert all(each.shape[-1] * dtype.itemsize % 16 == 0 for each in (q, k, v))
    assert bias.shape == (2, 4, 5, 7) and bias.dtype == dtype
    padded = [info(node).aval.shape[-1] for node in program.traced.nodes if "constant_pad_nd" in str(node.target)]
    assert 8 in padded, "the mask of 7 keys"
    assert info(kernel).results[0].shape[-1] == v.shape[-1]
