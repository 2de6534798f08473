"""Text from a causal model on a mesh. Prompts fill a cache, and each step reads a token per row and writes the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any, NamedTuple

import optree
import torch
from torch import nn

from sharding_specs import Mesh

from .. import random
from ..compile import Compiled, compile
from ..functions import PyTree, SpecTree, explain_keywords, require_mesh
from ..ops import constrain
from ..quantities import is_positive_int
from ..stateful import Sharded
from ..training import TrainState, parameters_of
from ..transforms import Plan, Transform
from .cached_model import cached_model
from .prompts import LengthBuckets, Prompts, rows_of
from .sampling import Sampling
from .serving import data_axes, is_pipelined, microbatches_of, serving_plan, stored_by, without_single_ranks


@dataclass(frozen=True)
class Generated:
    """Text of each row.

    Attributes:
        tokens: the new tokens, (rows, most new tokens), with `pad` after the end of a row.
        lengths: number of new tokens of each row, the end token included, (rows,).
    """

    tokens: torch.Tensor
    lengths: torch.Tensor

    def rows(self) -> list[torch.Tensor]:
        """Return the new tokens of each row."""
        return [row[:length] for row, length in zip(self.tokens, self.lengths.tolist(), strict=True)]


class Programs(NamedTuple):
    """Programs of one bucket."""

    prefill: Compiled
    decode: Compiled
    batch: dict[str, torch.Tensor]
    shapes: PyTree  # of the state between them

    def weights(self, params: PyTree) -> Sharded:
        """Return parameters as both programs hold them."""
        return self.decode.hold(params, self.shapes, others=[self.prefill.lower(params, None, self.batch)])


@explain_keywords
class Generator:
    """Compiled generation of a model on a mesh. It is called with parameters and prompts, as often as they change.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh, P
    >>> def model(params, cache, tokens, positions):       # the next token is the sum of all so far, modulo 8
    ...     slots = torch.arange(cache.shape[1])
    ...     cache = cache.scatter(1, positions, tokens)
    ...     seen = torch.where(slots <= positions[..., None], cache[:, None], 0).sum(-1)
    ...     return params[(seen % 8)], cache
    >>> def empty(params, rows, length):
    ...     return torch.zeros(rows, length, dtype=torch.int64)
    >>> generator = fp.Generator(model, Mesh(data=2), fp.data_parallel("data"), cache=empty)
    >>> generator(torch.eye(8), [[1, 2], [3]], max_new_tokens=4).tokens
    tensor([[3, 6, 4, 0],
            [3, 6, 4, 0]])

    A prefill program reads the prompts, padded to a bucket of lengths, and a decode program reads a token of each row
    and writes the next. The cache is laid out as the plan lays out the keys and values of the model: rows over data,
    heads over tensor, layers over the stages of a pipeline. It stays on the ranks, and a step writes into its memory.
    Each is traced once per bucket.

    Args:
        fn: a model of transformers, its function of `fp.functional`, or with `cache`, a function `f(params, cache,
            tokens, positions) -> (logits, new cache)`. Tokens and positions are (rows, columns).
        mesh: the mesh.
        plan: a plan, such as the plan of the training step. ZeRO stages have no effect: parameters are gathered once.
        cache: function of params, rows and length that returns the empty cache of `fn`. Rows are the first dim.
        temperature, top_k, top_p: how the next token is drawn. A temperature of 0 takes the best.
        eos: the end token, or several. By default the end tokens of a model of transformers.
        pad: the token after the end of a row.
        buckets: lengths of padded prompts and caches, ascending. By default powers of 2 from 16.
        look_every: after this number of steps the host looks whether all rows have ended.

    Raises:
        ValueError: for options that are out of range, and a model of transformers with another state than keys and
            values, or with options of generation that are not supported.
    """

    def __init__(
        self,
        fn: Any,
        mesh: Mesh,
        plan: Any = None,
        *,
        cache: Callable[[PyTree, int, int], PyTree] | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos: int | Sequence[int] | None = None,
        pad: int = 0,
        buckets: Sequence[int] | None = None,
        look_every: int = 8,
    ) -> None:
        require_mesh(mesh, "Generator")
        if plan is not None and not isinstance(plan, (Plan, Transform)):
            raise TypeError(f"plan={plan!r}: give a transform such as fp.zero(3, 'data'), an fp.chain of them, or None")
        self.model = cached_model(fn, cache)
        self.mesh, self.plan, self.pad = mesh, without_single_ranks(plan, mesh), pad
        self.sampling = Sampling(temperature, top_k, top_p)
        self.buckets = LengthBuckets(None if buckets is None else tuple(buckets))
        self.eos = _end_tokens(self.model.module, eos)
        if not all(map(_is_token, (pad, *self.eos))):
            raise ValueError(
                f"eos={eos!r}, pad={pad!r}: an end token or several, and a padding token, are numbers from 0"
            )
        if not is_positive_int(look_every):
            raise ValueError(f"look_every={look_every!r}: it is a number of steps, 1 or more")
        self.look_every = look_every
        self.lock = RLock()  # a trace sets the mode and the parameters of the module
        self._prefills: dict[int, Compiled] = {}
        self._decodes: dict[Any, Compiled] = {}

    def __call__(
        self, params: PyTree, prompts: Any, *, max_new_tokens: int, seed: int = 0, keys: torch.Tensor | None = None
    ) -> Generated:
        """Return the text that follows each prompt.

        Args:
            params: the parameters: full tensors, an `fp.Sharded`, or a state of a training step.
            prompts: a list with the tokens of each row, a tensor (rows, columns), or the dict of a tokenizer with an
                attention mask.
            max_new_tokens: the number of new tokens per row, if no end token comes before.
            seed: seed of the keys of the rows.
            keys: an int64 key per row instead. A row with a key has the same text in any batch and on any mesh, up to
                rounding.

        Raises:
            ValueError: if the prompts are empty, padded without a mask, or beyond the positions of the model, or there
                is not a key per row.
        """
        steps = list(self.stream(params, prompts, max_new_tokens=max_new_tokens, seed=seed, keys=keys))
        return _generated(torch.stack(steps, 1), self.eos)

    def stream(
        self, params: PyTree, prompts: Any, *, max_new_tokens: int, seed: int = 0, keys: torch.Tensor | None = None
    ) -> Iterator[torch.Tensor]:
        """Iterate over the new tokens, one tensor (rows,) per step, with `pad` for rows that have ended."""
        if not is_positive_int(max_new_tokens):
            raise ValueError(f"max_new_tokens={max_new_tokens!r}: it is a number of tokens, 1 or more")
        if not isinstance(seed, int):
            raise ValueError(f"seed={seed!r}: it is an integer, of which each row has a key; or give keys")
        rows = rows_of(prompts, self.model)
        self.model.require(rows, max_new_tokens)
        keys = random.fold_in(random.key(seed), torch.arange(len(rows))) if keys is None else keys
        if not isinstance(keys, torch.Tensor) or keys.shape != (len(rows),) or keys.dtype != torch.int64:
            found = f"{keys.dtype} {tuple(keys.shape)}" if isinstance(keys, torch.Tensor) else type(keys).__name__
            raise ValueError(f"keys of {len(rows)} prompts: {found}; give an int64 tensor with a key per row")
        params, (batch, length) = self.parameters(params), self._batch(rows, max_new_tokens, keys)
        with self.lock, evaluated(self.model.module):
            programs = self.programs_for(params, batch, length)
            weights = programs.weights(params)
            _, state = programs.prefill(weights, None, batch)
            decode = programs.decode.steps(weights, programs.shapes)
        is_ended = torch.zeros(len(rows), dtype=torch.bool)
        for step in range(1, max_new_tokens + 1):
            with self.lock, torch.no_grad():
                token, state = decode(state)
            token = token[: len(rows)]
            yield token
            is_ended = is_ended.to(token.device) | _is_end(token, self.eos)
            if self.eos and step % self.look_every == 0 and is_ended.all():
                return

    def lower(self, params: PyTree, *, rows: int, prompt: int, max_new_tokens: int) -> Mapping[str, Any]:
        """Return the programs "prefill" and "decode" for rows of prompts of this length, without running them.

        They have the collectives, the memory and the price of generation on a mesh that nobody holds.

        Args:
            params: parameters, which may be on the meta device.
            rows, prompt, max_new_tokens: numbers of rows, of tokens of the longest prompt, and of new tokens.
        """
        self.programs_for(self.parameters(params), *self._batch([torch.zeros(prompt).long()] * rows, max_new_tokens))
        return self.programs()

    def hold(self, params: PyTree, *, rows: int = 1, prompt: int = 2, max_new_tokens: int = 1) -> Sharded:
        """Return parameters in the layout of generation, for several calls with them. Arguments are as for `lower`."""
        params, given = self.parameters(params), self._batch([torch.zeros(prompt).long()] * rows, max_new_tokens)
        with self.lock:
            return self.programs_for(params, *given).weights(params)

    def programs(self) -> Mapping[str, Any]:
        """Return the programs used last: "prefill" and "decode"."""
        found = {"prefill": self._prefills, "decode": self._decodes}
        return {name: list(each.values())[-1].program for name, each in found.items() if each}

    # --- the programs ---

    def parameters(self, params: PyTree) -> PyTree:
        """Return the parameters of a training state, or those given, in the dtypes that the plan stores."""
        return stored_by(self.plan, parameters_of(params) if isinstance(params, TrainState) else params)

    def _batch(
        self, rows: list[torch.Tensor], new: int, keys: torch.Tensor | None = None
    ) -> tuple[dict[str, torch.Tensor], int]:
        """Return the padded batch of a prefill, and the length of the cache."""
        prompts = Prompts(rows, self.model, self.rows_together(len(rows)))
        columns, length = self._lengths(prompts.longest, new)
        return prompts.padded(columns, torch.zeros(len(rows)).long() if keys is None else keys), length

    def programs_for(
        self, params: PyTree, batch: dict[str, torch.Tensor], length: int, rows: int | None = None
    ) -> Programs:
        """Return the programs for a batch of prompts and a cache of this length; `rows` if more rows are decoded."""
        with self.lock, evaluated(self.model.module):
            prefill = self._prefill(length)
            shapes, specs = prefill.new_state(params, None, batch)
            if rows is not None:
                shapes = optree.tree_map(lambda x: x.new_empty(rows, *x.shape[1:]) if x.ndim else x, shapes)
            decode = self._decode(specs)
            decode.lower(params, shapes)
        return Programs(prefill, decode, batch, shapes)

    def _lengths(self, prompt: int, new: int) -> tuple[int, int]:
        """Return the lengths of padded prompts and of the cache."""
        columns = self.buckets.at_least(max(prompt, 1), "a prompt")
        length = self.buckets.at_least(new + (0 if self.model.is_encoder_decoder else columns), "a cache")
        return self.model.slots(columns, length)

    @property
    def data_ranks(self) -> int:
        """Number of ranks along the axes that split the rows."""
        return math.prod(map(self.mesh.axis_size, data_axes(self.plan)))

    def rows_together(self, rows: int) -> int:
        """Return the number that the number of rows must be a multiple of."""
        found = self.data_ranks * microbatches_of(self.plan)
        return max(found, 2) if rows == 1 and is_pipelined(self.plan) else found  # stages cut the rows

    def _prefill(self, length: int) -> Compiled:
        model = self.model

        def prefill(params: PyTree, state: None, batch: Any) -> tuple[tuple[()], PyTree]:
            _, cache = model.begin(params, batch["tokens"], batch["lengths"], length)
            ended = torch.zeros_like(batch["lengths"], dtype=torch.bool)
            kept = {name: batch[name] for name in ("token", "position", "keys")}
            return (), {"cache": cache, "ended": ended, **kept}

        if length not in self._prefills:
            self._prefills[length] = compile(serving_plan(self.plan)(prefill), self.mesh, state=1)
        self._prefills[length] = self._prefills.pop(length)
        return self._prefills[length]

    def _decode(self, specs: SpecTree) -> Compiled:
        model, sampling, eos, pad = self.model, self.sampling, self.eos, self.pad

        def decode(params: PyTree, state: Any) -> tuple[torch.Tensor, PyTree]:
            position, ended = state["position"], state["ended"]
            logits, cache = model.proceed(params, state["cache"], state["token"][:, None], position[:, None])
            token = sampling.draw(logits[:, -1], state["keys"], position + 1)
            token = torch.where(ended, pad, token)
            ended = ended | _is_end(token, eos)
            position = torch.where(state["ended"], position, position + 1)  # within the positions of the model
            new = {"cache": cache, "ended": ended, "token": token, "position": position, "keys": state["keys"]}
            return token, optree.tree_map(constrain, new, specs)

        key = (optree.tree_structure(specs), tuple(optree.tree_leaves(specs)))
        if key not in self._decodes:
            self._decodes[key] = compile(serving_plan(self.plan, specs)(decode), self.mesh, state=1)
        self._decodes[key] = self._decodes.pop(key)
        return self._decodes[key]


def generate(
    fn: Any,
    params: PyTree,
    prompts: Any,
    mesh: Mesh,
    plan: Any = None,
    *,
    max_new_tokens: int,
    seed: int = 0,
    keys: torch.Tensor | None = None,
    **options: Any,
) -> Generated:
    """Return the text that follows each prompt. `fp.Generator` keeps the programs for further calls.

    Args:
        fn, mesh, plan, options: as for `fp.Generator`.
        params, prompts, max_new_tokens, seed, keys: as for a call of it.
    """
    generator = Generator(fn, mesh, plan, **options)
    return generator(params, prompts, max_new_tokens=max_new_tokens, seed=seed, keys=keys)


def _end_tokens(module: Any, eos: int | Sequence[int] | None) -> tuple[int, ...]:
    if eos is None and module is not None:
        eos = module.generation_config.eos_token_id
    return () if eos is None else tuple(eos) if isinstance(eos, Sequence) else (eos,)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_end(token: torch.Tensor, eos: tuple[int, ...]) -> torch.Tensor:
    found = torch.zeros_like(token, dtype=torch.bool)
    for end in eos:
        found = found | (token == end)
    return found


def _generated(tokens: torch.Tensor, eos: tuple[int, ...]) -> Generated:
    ends = _is_end(tokens, eos)
    before = ends.cumsum(1) - ends.long()
    lengths = (before == 0).sum(1)
    return Generated(tokens[:, : int(lengths.max())], lengths)


@contextmanager
def evaluated(module: nn.Module | None) -> Iterator[None]:
    """Context where a module is in the mode `eval`, and no gradient is wanted."""
    trained = [] if module is None or not module.training else [each for each in module.modules() if each.training]
    for each in trained:
        each.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for each in trained:
            each.training = True
