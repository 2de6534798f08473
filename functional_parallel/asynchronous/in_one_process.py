"""Asynchronous ranks in one process, by a seeded clock. Messages take no time; steps do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import CollectiveError
from .async_state import AsyncMetrics, AsyncState
from .clock import Clock
from .protocol import TO_CLIENT, Message
from .worker import Work


def stepped(
    state: AsyncState, work: Work, loss: torch.Tensor, push: Message | None, clock: Clock
) -> tuple[AsyncState, AsyncMetrics]:
    rank, now = state.rank, state.ready[state.rank]
    ready = {each: at for each, at in state.ready.items() if each != rank}
    state = replace(state, work={**state.work, rank: work}, seconds=now)
    if push is None:
        after = replace(state, ready={**ready, rank: now + clock.duration(rank, work.steps)})
        return after, AsyncMetrics(loss, rank, work.version, None, work.waited, now)
    waiting = {**state.waiting, rank: now}
    after, replies = _delivered(replace(state, ready=ready, waiting=waiting), [push], clock)
    ages = [each.numbers["staleness"] for each in replies if each.numbers["staleness"] is not None]
    version, dropped = after.work[rank].version, sum(each.numbers["dropped"] for each in replies)
    return after, AsyncMetrics(loss, rank, version, max(ages, default=None), work.waited, now, dropped)


def dropped_rank(state: AsyncState, rank: int, clock: Clock) -> AsyncState:
    if rank not in state.work:
        raise ValueError(f"rank {rank} does not take part; ranks {sorted(state.work)} do")
    kept: dict[str, Any] = {
        name: {each: value for each, value in getattr(state, name).items() if each != rank}
        for name in ("work", "nodes", "ready", "waiting")
    }
    if not kept["nodes"]:
        raise CollectiveError(f"rank {rank}, the parameter server, died: no rank has what to go on from")
    return _delivered(replace(state, **kept), [Message("gone", rank, each) for each in kept["nodes"]], clock)[0]


def finished(state: AsyncState, leave: Sequence[Message], clock: Clock) -> AsyncState:
    state, replies = _delivered(replace(state, ready={}), leave, clock)
    final = next(each for each in replies if each.kind == "final")
    return replace(state, ready={}, waiting={}, final=(final.numbers["version"], final.tree))


def _delivered(state: AsyncState, messages: Sequence[Message], clock: Clock) -> tuple[AsyncState, list[Message]]:
    nodes, ready, waiting, work = dict(state.nodes), dict(state.ready), dict(state.waiting), dict(state.work)
    open_, replies = list(messages), list[Message]()
    while open_:
        message = open_.pop(0)
        rank = message.target
        if message.kind in TO_CLIENT:
            replies.append(message)
            if rank in work and message.kind == "reply":
                waited = state.seconds - waiting.pop(rank)
                work[rank] = work[rank].given(message.tree, message.numbers["version"], waited)
                ready[rank] = state.seconds + clock.duration(rank, work[rank].steps)
        elif rank in nodes:
            nodes[rank], more = nodes[rank].handle(message)
            open_ += more
    return replace(state, nodes=nodes, ready=ready, waiting=waiting, work=work), replies
