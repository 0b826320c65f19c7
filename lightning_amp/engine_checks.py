"""What an engine is given, looked at before it starts."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn


def refuse_skip_settings(max_consecutive_skips: Any, skip_together: Any = None) -> None:
    """Refuses settings of skipped steps that would fail, or mean something else, long after they were given.

    Args:
        max_consecutive_skips: To be a whole number of at least 1, or None.
        skip_together: To be a list of lists of indices, or None.

    Raises:
        ValueError: One of them is not.
    """
    limit = max_consecutive_skips
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(
            f"max_consecutive_skips={limit!r} cannot be used. Use a whole number of at least 1, or None for no limit."
        )
    groups = () if skip_together is None else skip_together
    if not _is_list(groups) or not all(_is_list(group) and all(type(i) is int for i in group) for group in groups):
        raise ValueError(
            f"skip_together={skip_together!r} cannot be used. Use lists of optimizers' indices, such as [[0, 1]]."
        )


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def partners(groups: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Returns, for each optimizer, those that it skips together with.

    Args:
        groups: Groups of optimizers, by index.
        count: How many optimizers there are.

    Raises:
        ValueError: An index is out of range.
    """
    for i in (i for group in groups for i in group):
        if not 0 <= i < count:
            raise ValueError(f"skip_together names optimizer {i}; there are {count}, so 0 to {count - 1} are allowed.")
    return [sorted({j for group in groups if i in group for j in group} - {i}) for i in range(count)]


def refuse_optimizer_in_backward(modules: Iterable[nn.Module]) -> None:
    """Refuses parameters with a hook that would see their gradients multiplied by a scale.

    Args:
        modules: The models.

    Raises:
        ValueError: One has a post-accumulate-grad hook.
    """
    for module in modules:
        for name, param in module.named_parameters():
            if getattr(param, "_post_accumulate_grad_hooks", None):  # there is no public way to ask
                raise ValueError(
                    f"Parameter {name!r} has a post-accumulate-grad hook, which would see its gradient multiplied by "
                    "the loss scale. Remove the hook and step after the backward pass, or set loss_scale=1."
                )
