"""Check that an optimizer's update is elementwise."""

from __future__ import annotations

from ..errors import NotEquivalentError
from ..functions import PyTree
from ..optim import Optimizer
from ..training import require_elementwise


def assert_elementwise(optimizer: Optimizer, params: PyTree) -> None:
    """Check the law of elementwise optimizers: the update of slices is the slice of the update.

    Then the optimizer may be declared `fp.optim.Optimizer(…, elementwise=True)`. The values are drawn. A dim longer
    than 16 is shortened. A training step also checks layers of a stack and flat vectors, if its plan has them.

    >>> import torch, functional_parallel as fp
    >>> fp.testing.assert_elementwise(fp.optim.adamw(1e-3), {"w": torch.zeros(3, 4), "b": torch.zeros(4)})

    Args:
        optimizer: the optimizer.
        params: parameters. Only their shapes and dtypes matter.

    Raises:
        NotEquivalentError: if a result differs. The message names it.
    """
    decide = optimizer.constants
    try:
        require_elementwise(optimizer, params, None if decide is None else decide(params))
    except ValueError as error:
        raise NotEquivalentError(str(error)) from None
