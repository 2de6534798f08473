"""Nodes under any order of messages, where only links are first in first out, and ranks die and leave."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.asynchronous.async_step import Method
from functional_parallel.asynchronous.protocol import TO_CLIENT, Message, Rules
from sharding_specs import Mesh

STEPS = 6  # of a rank, at most


class Network:
    """Ranks that compute, and links between them, in an order that is drawn.

    A gradient is 1.0 and an update adds it to the state, so the weights count the gradients.
    """

    def __init__(self, server: int | None, ranks: int, staleness: int, seed: int) -> None:
        self.draw, self.staleness, self.server = random.Random(seed), staleness, server
        rules = Rules(ranks, staleness, self.updated, True)
        self.method = Method("test", staleness, server)
        self.nodes: dict[int, Any] = dict(self.method.nodes(rules, 0.0, 0.0))
        self.links: dict[tuple[int, int], list[Message]] = {}
        self.working = dict.fromkeys(range(ranks), 0)  # version of each rank that computes
        self.steps = dict.fromkeys(range(ranks), 0)
        self.wanted = {rank: self.draw.choice([STEPS, self.draw.randint(0, STEPS)]) for rank in range(ranks)}
        self.dead, self.left, self.final = set[int](), set[int](), dict[int, Message]()
        self.ages: list[int] = []
        self.by_version: dict[int, set[float]] = {}

    def updated(self, gradient: float, state: float, params: float) -> tuple[float, float]:
        return params + gradient, state + 1

    def deliver(self, message: Message) -> None:
        """Hand a message to its rank, and put what follows on the links."""
        rank = message.target
        if rank in self.dead:
            return
        if message.kind in TO_CLIENT:
            self.client(message)
        elif rank in self.nodes:
            self.nodes[rank], sent = self.nodes[rank].handle(message)
            version, params = self.nodes[rank].weights
            self.by_version.setdefault(version, set()).add(params)
            own = [each for each in sent if each.target == rank]
            for each in sent:
                if each.target != rank:
                    self.links.setdefault((rank, each.target), []).append(each)
            for each in own:
                self.deliver(each)

    def client(self, message: Message) -> None:
        if message.kind == "final":
            self.final[message.target] = message
            return
        self.working[message.target] = message.numbers["version"]
        if message.numbers["staleness"] is not None:
            self.ages.append(message.numbers["staleness"])

    def send(self, message: Message) -> None:
        if message.target == message.source:
            self.deliver(message)
        else:
            self.links.setdefault((message.source, message.target), []).append(message)

    def compute(self, rank: int) -> None:
        """One step of a rank, or its end after the last."""
        version = self.working.pop(rank)
        target = self.method.target(rank)
        if self.steps[rank] == self.wanted[rank]:
            self.left.add(rank)
            self.send(Message("left", rank, target))
            return
        self.steps[rank] += 1
        self.send(Message("push", rank, target, 1.0, {"version": version, "weight": 1.0}))

    def die(self, rank: int) -> None:
        """What is on its links arrives; then each peer sees the connection closed."""
        if rank in self.final:
            return  # it has what it came for
        self.dead.add(rank)
        self.working.pop(rank, None)
        for other in sorted(self.method.linked(len(self.steps), rank)):
            self.links.setdefault((rank, other), []).append(Message("gone", rank, other))

    def run(self, deaths: list[int]) -> None:
        """Until nothing can happen any more."""
        while True:
            ready: list[Any] = [link for link, queue in self.links.items() if queue]
            ready += sorted(self.working)
            if not ready:
                return
            if deaths and self.draw.random() < 0.1:
                self.die(deaths.pop())
                continue
            chosen = self.draw.choice(ready)
            if isinstance(chosen, tuple):
                self.deliver(self.links[chosen].pop(0))
            else:
                self.compute(chosen)


@settings(max_examples=150, deadline=None)
@given(ranks=st.integers(1, 5), bound=st.integers(0, 8), died=st.integers(0, 3), seed=st.integers(0, 10**6))
def test_a_parameter_server_ends_every_run(ranks: int, bound: int, died: int, seed: int) -> None:
    network = Network(0, ranks, bound, seed)
    network.run(list(range(1, ranks))[:died])
    alive = set(range(ranks)) - network.dead
    assert set(network.final) == alive, "a rank waits"
    assert {message.tree for message in network.final.values()} == {network.nodes[0].params}
    assert all(age <= bound for age in network.ages)
    assert all(network.steps[rank] == network.wanted[rank] for rank in alive)
    if not network.dead:
        assert network.nodes[0].params == sum(network.wanted.values()), "every gradient was used once"


@settings(max_examples=300, deadline=None)
@given(ranks=st.integers(1, 5), waits=st.booleans(), died=st.integers(0, 3), seed=st.integers(0, 10**6))
def test_a_rotating_server_ends_every_run(ranks: int, waits: bool, died: int, seed: int) -> None:
    bound = 0 if waits else ranks
    network = Network(None, ranks, bound, seed)
    deaths = network.draw.sample(range(ranks), min(died, ranks - 1))
    network.run(deaths)
    alive = set(range(ranks)) - network.dead
    assert set(network.final) == alive, "a rank waits"
    assert len({message.tree for message in network.final.values()}) == 1
    assert all(age <= bound for age in network.ages)
    if waits and not network.dead:
        assert all(len(each) == 1 for each in network.by_version.values()), "one version has one value"
    if waits and not network.dead and len(set(network.wanted.values())) == 1:
        assert {message.tree for message in network.final.values()} == {float(sum(network.wanted.values()))}


def test_a_server_that_is_given_as_another_rank() -> None:
    step = fp.asynchronous.parameter_server(
        lambda w, x: (w * x).sum(), fp.optim.sgd(1.0), Mesh(data=3), staleness=2, server=2, reduce="sum"
    )
    assert step.method.linked(3, 0) == {2} and step.method.linked(3, 2) == {0, 1}
    assert step.method.target(1) == 2
    with pytest.raises(ValueError, match="it is a rank of"):
        fp.asynchronous.parameter_server(abs, fp.optim.sgd(1.0), Mesh(data=3), staleness=2, server=3)
