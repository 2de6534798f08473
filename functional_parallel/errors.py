"""All errors and warnings of the library. `Error` is the base class of all errors; docs/errors.md explains them."""

from __future__ import annotations

from typing import Any

from sharding_specs.errors import Error as Error  # without torch
from sharding_specs.errors import MeshError as MeshError
from sharding_specs.errors import SpecError as SpecError
from sharding_specs.errors import SpecWarning as SpecWarning


class TracingError(Error, ValueError):
    """Raised for a function that cannot be traced: it depends on values, or is not pure."""


class MutationError(TracingError):
    """Raised for an in-place op if its effect would be lost or is unknown."""


class CustomFunctionError(TracingError):
    """Raised for a user's autograd.Function inside a function. The backward is derived from the traced forward."""


class MemoryLayoutError(TracingError):
    """Raised for an op with a result that depends on strides or memory, which may differ between program and eager."""


class MemoriesError(Error, ValueError):
    """Raised for an op with operands in different memories, or for a memory that does not exist."""


class SideEffectError(Error, ValueError):
    """Raised for a side effect that a compiled function would ignore, such as a hook or a change after `fp.prepare`."""


class SideEffectWarning(UserWarning):
    """Warning of a side effect that happened only while a function was traced, such as a hook that records values."""


class RandomKeyError(Error, RuntimeError):
    """Raised for a draw without a key."""


class CollectiveTypeError(Error, ValueError):
    """Raised for a collective that does not match the state of its operand.

    It is not a TypeError: inside `x * y` a TypeError means "try the other operand", and its message is lost.
    """


class CollectiveShapeError(Error, ValueError):
    """Raised for a dim or a rank that does not fit the operand or the axes."""


class UnboundAxisError(Error, NameError):
    """Raised for a collective over an axis that is not bound around the call, or is hidden there."""


class NotDifferentiableError(Error, TypeError):
    """Raised when a transform differentiates a primitive without a derivative."""


class ForeignCollectiveError(Error, TypeError):
    """Raised for a collective of torch.distributed, or a module that contains some, under a function transform."""


class TypingError(CollectiveTypeError):
    """Raised for an op that does not support the state of an operand; the message names the source line."""


class ArgumentSpecError(CollectiveTypeError):
    """Raised for arguments of a local function that do not match its layout; the message lists all of them."""


class OutSpecError(CollectiveTypeError):
    """Raised for results with layouts that differ from their specs. The message lists all of them."""


class LayoutError(Error, ValueError):
    """Raised for a function with arguments of undeclared layout, or with a layout that was declared twice."""


class PartitionError(Error, ValueError):
    """Raised for a function that cannot be partitioned as its specs require."""


class PartitionWarning(UserWarning):
    """Warning of an op that every rank computes on full tensors because it has no sharding rule."""


class EqualCopiesWarning(UserWarning):
    """Warning of a sum or maximum over ranks of a value that is replicated by construction."""


class RuleError(Error, ValueError):
    """Raised for a rule's text that does not parse, or does not fit the op it is applied to."""


class OrderError(Error, ValueError):
    """Raised if transforms are chained in an order or combination without a valid meaning."""


class BudgetError(Error, ValueError):
    """Raised if no choice of recomputation, or no placement of layers, keeps within a budget of bytes."""


class UnrollError(Error, ValueError):
    """Raised for a program that needs all microbatches at the same time, as only ranks that run in parallel can."""


class PipelineError(Error, ValueError):
    """Raised if a function cannot be cut into pipeline stages, or if a pipeline does not fit the function."""


class ScheduleError(Error, ValueError):
    """Raised for a schedule that cannot run, or for arguments that a rule does not support."""


class CollectiveError(Error, RuntimeError):
    """Raised for a collective that failed or timed out. It names the ranks and their calls."""


class CallMismatchError(Error, RuntimeError):
    """Raised if ranks are about to make different calls and would wait for each other. It names the ranks and calls."""


class ReentrantCallError(CallMismatchError):
    """Raised for a call that began before another call of this process ended. Nothing of it ran."""


class ProgramMismatchError(Error, RuntimeError):
    """Raised if ranks are about to run different programs. It names the ranks and the first line that differs."""


class InputMismatchError(Error, ValueError):
    """Raised if ranks got different full tensors. It names the inputs."""


class LaunchError(Error, RuntimeError):
    """Raised if launchers contradict each other, or if a rank of `fp.launch` failed; its cause is the rank's error."""


class BackendError(Error, RuntimeError):
    """Raised for a backend that cannot compile here. It names the missing requirement."""


class DonatedStateError(Error, RuntimeError):
    """Raised for the use of a donated state. Its memory holds a later state, or a partly written one."""


class NonFiniteError(Error, FloatingPointError):
    """Raised for a step with a NaN or infinite loss or gradient norm.

    Attributes:
        step: the number of the step; the first is 0.
        parameter: the path of the first parameter that is not finite after the step; None if all are finite.
        state: the state after the last step that ran.
        metrics: the metrics of the step.
    """

    def __init__(self, message: str, step: int, parameter: str | None, state: Any, metrics: Any) -> None:
        super().__init__(message)
        self.step, self.parameter, self.state, self.metrics = step, parameter, state, metrics


class RestagingWarning(UserWarning):
    """Warning of a function that is traced again and again, for arguments of many shapes."""


class NothingToTrainError(Error, ValueError):
    """Raised for a loss that no parameter has a path to, so that training would change nothing."""


class NotTrainedWarning(UserWarning):
    """A parameter without a path to the loss, or a closed-over tensor that requires gradients."""


class LossScaleError(Error, ArithmeticError):
    """Raised if gradients overflow at the lowest scale: training has diverged, or float16 has not enough range."""


class UnevenBatchError(Error, ValueError):
    """Raised for a batch that cannot be padded.

    It is too large, has tensors of different lengths, or has samples that differ in signature from another rank.
    """


class NotEquivalentError(Error, AssertionError):
    """Raised for two results that should be equal and are not. It names the first leaf that differs."""


class FalseRuleError(NotEquivalentError):
    """Raised for a sharding rule that makes a false claim about its op."""


class UncheckedRuleError(Error, ValueError):
    """Raised for a sharding rule with a factor that no sample can split."""


class DiskError(Error, RuntimeError):
    """Raised if values of a run cannot be kept on a disk: it is full, cannot be written, or fails."""


class CheckpointError(Error, RuntimeError):
    """Raised for a checkpoint that cannot be written, or that is damaged, incomplete or of another model."""


class DamagedCheckpointError(CheckpointError):
    """Raised for a checkpoint with a file that is missing, changed or cut, or that does not fit the others."""


class RemovedCheckpointError(CheckpointError):
    """Raised for a checkpoint that a run removed or replaced while it was read, as a `Saver` with `keep` does."""


__all__ = sorted(name for name, each in globals().items() if isinstance(each, type) and issubclass(each, Exception))
