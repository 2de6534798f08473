"""State of another step as the source of a restore: it is moved between the ranks, without files."""

from __future__ import annotations

from typing import Any

from ..checkpoint import SavePlan
from ..errors import InputMismatchError
from ..runtime import Runtime
from ..stateful import HeldLeaves, StaticLeaf
from .finite import settle
from .saved import saved_leaves
from .train_state import TrainState


class HeldState(HeldLeaves):
    """A state in memory as the source of a restore on the ranks of `target`."""

    def __init__(self, state: TrainState, target: Runtime[Any, Any]) -> None:
        layout, states = state.layout, state.layout.states
        super().__init__(states.runtime_for(state), state.handles, layout.specs, target)
        settle(states, state)

        def known() -> tuple[Any, ...]:
            numbers = [each.value if isinstance(each, StaticLeaf) else None for each in state.handles]
            return self.where(), numbers, state.step, states.programs.batch_signature

        every = self.agreed(known)
        steps = {each[2] for each in every}
        if len(steps) > 1:
            told = ", ".join(map(str, sorted(steps)))
            raise InputMismatchError(f"train_step.load: the ranks load states of different steps: {told}")
        where, numbers, self.step, self.body["batch"] = every[0]
        self.leaves = saved_leaves(states, layout, where.__getitem__)
        self.path = f"the state of step {self.step} on {layout.mesh!r}"
        self.plan = SavePlan(layout.mesh, self.leaves.tensors, self.path)
        self.numbers = {key: numbers[index] for key, index in self.leaves.numbers.items()}
