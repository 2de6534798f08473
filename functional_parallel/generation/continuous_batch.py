"""Continuous batching: requests come and go, while the other rows of the decode program go on.

A request has a row of the cache. The prefill program reads the prompts of new requests, in a batch of few rows. Each
rank then copies their keys and values from its shards into free rows. Rows have their own positions.

Models of transformers write the tokens of all rows into one slot, the clock, so that their windows and relative
positions need no change. A new row is moved so that it ends at the clock. When the clock has passed the last slot, all
rows move back by the slots that no request needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch

from sharding_specs import tree_paths

from .. import random
from ..functions import PyTree
from ..quantities import is_positive_int
from ..stateful import Sharded, brought, own_shards, with_rows
from .generate import Generator, evaluated
from .prompts import Prompts, rows_of

_SPARE = 4  # rows move after at least length / 4 steps


@dataclass
class _Request:
    number: int
    prompt: torch.Tensor
    most: int  # new tokens
    key: torch.Tensor
    text: list[int] = field(default_factory=list)

    @property
    def held(self) -> int:
        """Number of tokens in the cache."""
        return len(self.prompt) - 1 + len(self.text)


class ContinuousBatch:
    """Requests that are continued together, each in a row of one cache, with the text that each has alone.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> def model(params, cache, tokens, positions):       # the next token is the sum of all so far, modulo 8
    ...     slots = torch.arange(cache.shape[1])
    ...     cache = cache.scatter(1, positions, tokens)
    ...     seen = torch.where(slots <= positions[..., None], cache[:, None], 0).sum(-1)
    ...     return params[(seen % 8)], cache
    >>> def empty(params, rows, length):
    ...     return torch.zeros(rows, length, dtype=torch.int64)
    >>> generator = fp.Generator(model, Mesh(data=2), fp.data_parallel("data"), cache=empty)
    >>> serving = fp.ContinuousBatch(generator, torch.eye(8), rows=2, length=16)
    >>> serving.add([1, 2], max_new_tokens=3)
    0
    >>> serving.step()                                     # the new token of each request
    {0: 3}
    >>> serving.add([3], max_new_tokens=2)
    1
    >>> {number: text.tolist() for number, text in serving.run()}
    {0: [3, 6, 4], 1: [3, 6]}

    The programs are the generator's programs: a prefill per bucket of prompts, and one decode. In a pipeline, the rows
    of its microbatches are requests on different stages. All processes make the same calls.

    Args:
        generator: the generator, with its model, mesh, plan and draws.
        params: the parameters, as for a call of the generator.
        rows: number of requests that are continued at a time: a multiple of data ranks · microbatches. Others wait.
        length: most tokens of a request, prompt and text.
        seed: seed of the keys of requests that have none.

    Attributes:
        finished: text of the requests that have ended, by number. `run` takes them out.

    Raises:
        ValueError: if the numbers do not fit the mesh or the model, the model has an encoder, or its cache has a tensor
            without rows.
    """

    def __init__(self, generator: Generator, params: PyTree, *, rows: int, length: int, seed: int = 0) -> None:
        self.generator, self.rows, self.length, self._key = generator, rows, length, random.key(seed)
        self._model, params = generator.model, generator.parameters(params)
        self._seats, self._blocks = generator.rows_together(1), generator.data_ranks
        self._require(rows, length)
        room = generator.buckets.at_least(length + length // _SPARE, "a cache")
        self._slots = self._model.slots(1, room)[1]
        dummy = _Request(-1, torch.zeros(1, dtype=torch.int64), 1, self._key)
        with generator.lock, evaluated(self._model.module):
            programs = generator.programs_for(params, self._batch({0: dummy}), self._slots, rows)
            self._prefill, self._weights = programs.prefill, programs.weights(params)
            self._program = programs.decode.lower(self._weights, programs.shapes)
            self._decode = programs.decode.steps(self._weights, programs.shapes)
        self._dims = self._slot_dims(programs.shapes["cache"])
        self._clock = 0 if max(self._dims) > 0 else None
        self._state: Any = None  # an fp.Sharded, after the first request
        self._waiting, self._live = deque[_Request](), dict[int, _Request]()  # live requests by row
        self._next, self.finished = 0, dict[int, torch.Tensor]()

    def add(self, prompt: Any, *, max_new_tokens: int | None = None, key: torch.Tensor | None = None) -> int:
        """Add a request, which begins in the first step that has a free row. Return its number.

        Args:
            prompt: its tokens.
            max_new_tokens: number of new tokens, if no end token comes before. By default all that fit.
            key: an int64 scalar for its draws. By default `seed` and the number give it.

        Raises:
            ValueError: if the request is longer than `length`, or the model cannot read it.
        """
        (tokens,) = rows_of([prompt], self._model)
        most = self.length - len(tokens) if max_new_tokens is None else max_new_tokens
        if not is_positive_int(most) or len(tokens) + most > self.length:
            raise ValueError(
                f"request {self._next}: a prompt of {len(tokens)} tokens and max_new_tokens={max_new_tokens!r}; a "
                f"request has a new token, and at most length={self.length} tokens: shorten it, or take a "
                "larger length"
            )
        self._model.require([tokens], most)
        key = random.fold_in(self._key, self._next) if key is None else key
        if not isinstance(key, torch.Tensor) or key.shape != () or key.dtype != torch.int64:
            raise ValueError(f"request {self._next}: key={key!r}; give an int64 scalar, such as fp.random.key(0)")
        self._waiting.append(_Request(self._next, tokens, most, key))
        self._next += 1
        return self._next - 1

    def step(self) -> dict[int, int]:
        """Begin what waits and fits, and return the next token of each request that has a row, by number."""
        while chosen := self._chosen():
            try:
                self._begin(chosen)
            except BaseException:  # no request is lost
                self._waiting.extendleft(sorted((each for _, each in chosen.values()), key=lambda each: -each.number))
                raise
        if self._state is None or not self._live:
            return {}
        if self._clock == self._slots:
            self._move_to(max(each.held for each in self._live.values()))
        with self.generator.lock, torch.no_grad():
            token, self._state = self._decode(self._state)
        self._clock = None if self._clock is None else self._clock + 1
        tokens = token.tolist()
        for row, each in self._live.items():
            each.text.append(tokens[row])
        found = {each.number: each.text[-1] for each in self._live.values()}
        ends = self.generator.eos
        ended = [row for row, each in self._live.items() if each.text[-1] in ends or len(each.text) == each.most]
        self.finished |= {self._live[row].number: torch.tensor(self._live[row].text) for row in ended}
        self._live = {row: each for row, each in self._live.items() if row not in ended}
        self._mark_ended(ended)
        return found

    def run(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Step until nothing is left, and iterate over the requests that end, with their text. Others may be added."""
        while self.finished or self._waiting or self._live:
            for number in list(self.finished):
                yield number, self.finished.pop(number)
            self.step()

    # --- rows ---

    def _require(self, rows: int, length: int) -> None:
        if self._model.is_encoder_decoder:
            name = type(self._model.module).__name__
            raise ValueError(f"{name} has an encoder, and a ContinuousBatch has rows of decoders: call the generator")
        if not is_positive_int(rows) or rows % self._seats or not is_positive_int(length) or length < 2:
            raise ValueError(
                f"rows={rows!r}, length={length!r}: give rows as a multiple of {self._seats}, the data ranks · "
                "microbatches of the generator's plan, and 2 or more tokens for a prompt and its text"
            )
        self._model.require([torch.zeros(length - 1, dtype=torch.int64)], 1)

    def _slot_dims(self, cache: PyTree) -> list[int]:
        """Return the dim of slots of each leaf of the cache; -1 for a leaf without slots."""
        leaves, dims = optree.tree_leaves(cache), self._model.slot_dims(cache)
        scalar = next((path for path, leaf in zip(tree_paths(cache), leaves, strict=True) if not leaf.ndim), None)
        if dims is None and scalar is not None:
            raise ValueError(
                f"the cache has a tensor without rows at {scalar or 'its root'}: requests that come and go do not "
                "share a number; give it rows as its first dim"
            )
        return [-1] * len(leaves) if dims is None else optree.tree_leaves(dims)

    def _chosen(self) -> dict[int, tuple[int, _Request]]:
        """Take waiting requests. Return them with their rows, by their row in the prefill, on the same data rank."""
        found, seats, rows = dict[int, tuple[int, _Request]](), self._seats // self._blocks, self.rows // self._blocks
        free = [[row for row in range(rows * b, rows * (b + 1)) if row not in self._live] for b in range(self._blocks)]
        for seat in range(seats):
            for block in sorted(range(self._blocks), key=lambda block: -len(free[block])):
                if self._waiting and free[block]:
                    found[block * seats + seat] = (free[block].pop(0), self._waiting.popleft())
        return found

    def _batch(self, requests: Mapping[int, _Request]) -> dict[str, torch.Tensor]:
        """Return the batch of the prefill. A row without a request reads the prompt of another."""
        some = next(iter(requests.values()))
        rows = [requests.get(seat, some) for seat in range(self._seats)]
        prompts = Prompts([each.prompt for each in rows], self._model, 1)
        columns = self.generator.buckets.at_least(max(prompts.longest, 1), "a prompt")
        return prompts.padded(self._model.slots(columns, self._slots)[0], torch.stack([each.key for each in rows]))

    def _begin(self, chosen: Mapping[int, tuple[int, _Request]]) -> None:
        batch = self._batch({seat: request for seat, (_, request) in chosen.items()})
        with self.generator.lock, evaluated(self._model.module):
            _, new = self._prefill(self._weights, None, batch)
        new = brought(new, self._program, self._weights)
        if self._state is None:
            self._state = with_rows(new, self.rows)
            self._mark_ended(range(self.rows))
        if self._clock is not None:
            self._move_to(max(self._clock, *(request.held for _, request in chosen.values())))
            self._roll(new, self._clock - batch["tokens"].shape[1])
        read = {(each.leaf, rank): each for each in own_shards(new) for rank in each.ranks}
        for each in own_shards(self._state):
            for seat, (row, _) in chosen.items():
                if row in each.rows:
                    source = read[each.leaf, each.ranks[0]]
                    each.shard[row - each.rows.start].copy_(source.shard[seat - source.rows.start])
        self._live |= dict(chosen.values())

    def _mark_ended(self, rows: Sequence[int]) -> None:
        for each in own_shards(self._state) if rows else ():
            if each.leaf == len(self._dims):  # "ended", after the leaves of "cache"
                each.shard[[row - each.rows.start for row in rows if row in each.rows]] = True

    def _move_to(self, clock: int) -> None:
        self._roll(self._state, clock - (self._clock or 0))
        self._clock = clock

    def _roll(self, state: Sharded, by: int) -> None:
        """Move the tokens of all rows to later slots."""
        for each in own_shards(state) if by else ():
            dim = self._dims[each.leaf] if each.leaf < len(self._dims) else -1
            if dim >= 0:
                each.shard.copy_(each.shard.roll(by, dim))
            elif not each.shard.ndim:  # the clock of the model
                each.shard.add_(by)
