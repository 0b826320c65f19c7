"""Which leaves an autograd graph reaches."""

from torch import Tensor

MAX_NODES = 20_000
"""A larger graph is not walked: its answer would cost more than it is worth."""


def reached_leaves(loss: Tensor, limit: int = MAX_NODES) -> set[int] | None:
    """Walks the graph of ``loss`` without running it.

    Args:
        loss: The output to start from.
        limit: How many nodes are looked at.

    Returns:
        The ids of the leaf tensors that a backward pass would give a gradient, or None where the graph is larger than
        ``limit``.

    Example:
        >>> import torch
        >>> w = torch.ones(2, requires_grad=True)
        >>> reached_leaves((w * 3).sum()) == {id(w)}
        True
    """
    if loss.grad_fn is None:
        return {id(loss)} if loss.requires_grad else set()
    leaves: set[int] = set()
    seen = {loss.grad_fn}
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        edges = node.next_functions
        if not edges:
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                leaves.add(id(leaf))
            continue
        for child, _ in edges:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
        if len(seen) > limit:
            return None
    return leaves
