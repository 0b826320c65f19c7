"""What an engine is given, looked at before it starts."""

from collections.abc import Iterable, Sequence

from torch import nn


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
