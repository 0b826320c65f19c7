"""Which scaler a backward pass uses: a question of range only, as each gradient is divided by its own pass's scale."""

from collections.abc import Iterable

from torch import Tensor

from lightning_amp.graph import reached_leaves
from lightning_amp.loss_scaler import DEFAULT_KEY, Key


def loss_key(loss_id: int, num_losses: int) -> Key:
    """Returns the key of a loss that the caller named.

    Args:
        loss_id: 0 to ``num_losses - 1``.
        num_losses: How many there are.

    Raises:
        ValueError: It is out of range.
    """
    is_number = type(loss_id) is int or (isinstance(loss_id, int) and not isinstance(loss_id, bool))
    if not is_number or not 0 <= loss_id < num_losses:
        raise ValueError(
            f"loss_id={loss_id!r} is out of range: num_losses={num_losses} allows 0 to {num_losses - 1}. Raise "
            "num_losses, or use one of those."
        )
    return ("loss", (loss_id,))


def optimizers_key(indices: Iterable[int]) -> Key:
    """Returns the key of a set of optimizers.

    Args:
        indices: Their places among the optimizers, in any order.
    """
    return ("optimizer", tuple(sorted(set(indices))))


def reached_key(loss: Tensor, lists: list[list[Tensor]], *, may_differ: bool) -> Key:
    """Returns the key of the optimizers that a loss nobody named is for.

    Those that are not frozen, where others are (`toggle_optimizer`); else those whose parameters the loss reaches; else
    the one for all.

    Args:
        loss: What the backward pass starts from.
        lists: Each optimizer's parameters.
        may_differ: Whether graphs may differ between processes, so that they are not looked at.
    """
    if len(lists) == 1:
        return ("optimizer", (0,))
    active = [i for i, params in enumerate(lists) if [p for p in params if p.requires_grad]]
    if 0 < len(active) < len(lists):
        return ("optimizer", tuple(active))
    leaves = None if may_differ else reached_leaves(loss)
    if leaves:
        active = [i for i, params in enumerate(lists) if not leaves.isdisjoint(map(id, params))]
        if active:
            return ("optimizer", tuple(active))
    return DEFAULT_KEY
