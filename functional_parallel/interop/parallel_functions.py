"""`replicate`, `scatter`, `parallel_apply` and `gather` of `torch.nn.parallel`, as functions of values.

They run in one process, on any devices, and are differentiable by autograd and by torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import optree
import torch
from torch import Tensor, nn

from sharding_specs import register_dataclasses, tree_paths

from ..functions import PyTree

Device = torch.device | str | int
Devices = int | Sequence[Device]


@dataclass(frozen=True)
class Replica:
    """Replica of a module: a function of the module's arguments.

    Attributes:
        module: the module. Its code runs.
        tensors: the replica's parameters and buffers, by dotted path.
    """

    module: nn.Module
    tensors: dict[str, Tensor]

    def __call__(self, *args: PyTree, **named: PyTree) -> PyTree:
        return torch.func.functional_call(self.module, self.tensors, args, named)


def replicate(network: nn.Module | PyTree, devices: Devices, detach: bool = False) -> list[PyTree]:
    """Copy the parameters of the master to replicas. Gradients of the replicas flow back and are summed there.

    >>> import torch
    >>> from functional_parallel import interop
    >>> w = torch.ones(2, requires_grad=True)
    >>> for number, replica in enumerate(interop.replicate({"w": w}, 3)):
    ...     (number * replica["w"]).sum().backward()
    >>> w.grad
    tensor([3., 3.])

    Args:
        network: a module, or a pytree of tensors such as the parameters of `fp.functional(module)`.
        devices: the devices, or a number of replicas on the devices of the tensors.
        detach: whether the replicas are separate from the master, so that no gradient flows back.

    Returns:
        One replica per device: a `Replica` of a module, or a pytree. Every replica has separate memory.
    """
    targets = _devices(devices, "replicate")
    if isinstance(network, nn.Module):
        held = dict(chain(network.named_parameters(), network.named_buffers()))
        return [Replica(network, _copied(held, device, detach)) for device in targets]
    register_dataclasses(network)
    return [_copied(network, device, detach) for device in targets]


def _copied(tree: PyTree, device: Device | None, detach: bool) -> PyTree:
    def copied(leaf: PyTree) -> PyTree:
        if not isinstance(leaf, Tensor):
            return leaf
        return (leaf.detach() if detach else leaf).to(device=device, copy=True)

    return optree.tree_map(copied, tree)


def scatter(inputs: PyTree, devices: Devices, dim: int = 0) -> list[PyTree]:
    """Split the tensors of a pytree into chunks along a dim, one per device. Other leaves are passed to all devices.

    >>> import torch
    >>> from functional_parallel import interop
    >>> interop.scatter((torch.arange(5), {"scale": 2}), 2)
    [(tensor([0, 1, 2]), {'scale': 2}), (tensor([3, 4]), {'scale': 2})]

    Args:
        inputs: a pytree: tensors, tuples, lists, dicts.
        devices: the devices, or a number of chunks that stay on the devices of the tensors.
        dim: the dim to split.

    Returns:
        The chunks, as `torch.chunk` makes them: the first ones are larger, and a short dim has fewer chunks than
        there are devices.

    Raises:
        ValueError: if a tensor lacks the dim, or tensors have different numbers of chunks. The message lists them.
    """
    targets = _devices(devices, "scatter")
    register_dataclasses(inputs)
    leaves, tree = optree.tree_flatten(inputs)
    paths = zip(tree_paths(inputs), leaves, strict=True)
    tensors = {path or "the input": leaf for path, leaf in paths if isinstance(leaf, Tensor)}
    scalars = [path for path, tensor in tensors.items() if not -tensor.ndim <= dim < tensor.ndim]
    if scalars:
        raise ValueError(f"interop.scatter along dim {dim}: {', '.join(scalars)} has no such dim; give it, or a number")
    parts = [leaf.chunk(len(targets), dim) if isinstance(leaf, Tensor) else [leaf] * len(targets) for leaf in leaves]
    counts = {len(tensor.chunk(len(targets), dim)) for tensor in tensors.values()}
    if len(counts) > 1:
        listed = ", ".join(f"{path}: {tensor.shape[dim]}" for path, tensor in tensors.items())
        raise ValueError(f"interop.scatter along dim {dim}: the sizes {listed} do not give {len(targets)} chunks alike")
    return [
        tree.unflatten([x.to(device=device) if isinstance(x, Tensor) else x for x in own])
        for device, *own in zip(targets, *parts, strict=False)  # as many as there are chunks
    ]


def parallel_apply(
    replicas: Sequence[Callable[..., PyTree]],
    inputs: Sequence[PyTree],
    kwargs: Sequence[Mapping[str, PyTree]] | None = None,
) -> list[PyTree]:
    """Call each replica on its inputs. On devices that compute asynchronously, the calls overlap.

    >>> import torch
    >>> from functional_parallel import interop
    >>> replicas = interop.replicate(torch.nn.Linear(2, 1), 2)
    >>> outputs = interop.parallel_apply(replicas, interop.scatter(torch.ones(4, 2), 2))
    >>> [output.shape for output in outputs]
    [torch.Size([2, 1]), torch.Size([2, 1])]

    Args:
        replicas: the functions.
        inputs: per replica a tuple of arguments, or one argument.
        kwargs: per replica its keyword arguments.

    Raises:
        ValueError: if the numbers of replicas, inputs and keyword arguments differ.
    """
    named = [{}] * len(inputs) if kwargs is None else kwargs
    if not len(replicas) == len(inputs) == len(named):
        raise ValueError(
            f"interop.parallel_apply: {len(replicas)} replicas, inputs for {len(inputs)} and keyword arguments for "
            f"{len(named)}; a short batch has fewer chunks than devices: call it with replicas[:{len(inputs)}]"
        )
    every = zip(replicas, inputs, named, strict=True)
    return [replica(*(given if isinstance(given, tuple) else (given,)), **more) for replica, given, more in every]


def gather(outputs: Sequence[PyTree], device: Device | None = None, dim: int = 0) -> PyTree:
    """Concatenate the outputs of replicas on one device, the master. Gradients flow back to the replicas.

    >>> import torch
    >>> from functional_parallel import interop
    >>> interop.gather([{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(2.0)}])
    {'loss': tensor([1., 2.])}

    Args:
        outputs: pytrees of one structure, one per replica. Scalars become a vector. A leaf that is not a tensor must
            be equal in all of them.
        device: the master's device; None for the device of the first output.
        dim: the dim to concatenate along.

    Raises:
        ValueError: if there are no outputs, or they differ in structure or in a leaf that is not a tensor.
    """
    if not outputs:
        raise ValueError("interop.gather: there are no outputs; pass one per replica")
    register_dataclasses(*outputs)
    trees = [optree.tree_structure(output) for output in outputs]
    for number, tree in enumerate(trees):
        if tree != trees[0]:
            raise ValueError(f"interop.gather: output {number} has the structure {tree}, but output 0 has {trees[0]}")
    paths = [path or "the output" for path in tree_paths(outputs[0])]
    columns = zip(paths, zip(*map(optree.tree_leaves, outputs), strict=True), strict=True)
    return trees[0].unflatten([_joined(path, parts, device, dim) for path, parts in columns])


def _joined(path: str, parts: Sequence[PyTree], device: Device | None, dim: int) -> PyTree:
    if all(isinstance(part, Tensor) for part in parts):
        target = parts[0].device if device is None else device
        return torch.cat([(part if part.ndim else part.unsqueeze(0)).to(device=target) for part in parts], dim)
    if any(isinstance(part, Tensor) or part != parts[0] for part in parts):
        raise ValueError(f"interop.gather: {path} is {', '.join(map(repr, parts))}; return a tensor, or equal values")
    return parts[0]


def _devices(devices: Devices, who: str) -> Sequence[Device | None]:
    if isinstance(devices, int) and not isinstance(devices, bool) and devices > 0:
        return [None] * devices
    if isinstance(devices, Sequence) and not isinstance(devices, str) and devices:
        return [torch.device(device) for device in devices]
    raise ValueError(f"interop.{who}: devices={devices!r}: give a list of devices, or a number of replicas, 1 or more")
