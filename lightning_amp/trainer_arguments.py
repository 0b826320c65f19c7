"""One knob for a Trainer's precision."""

from typing import Any

from lightning.pytorch.plugins.precision import Precision

from lightning_amp.precision import AmpPrecision


def trainer_kwargs(opt_level: str = "O1", **settings: Any) -> dict[str, Any]:
    """Returns what a Trainer takes to train at a level: ``Trainer(max_epochs=1, **trainer_kwargs("O2"))``.

    Args:
        opt_level: ``"O0"`` to ``"O3"``.
        **settings: For `AmpPrecision`; ``plugins`` are others for the Trainer to have beside it.

    Returns:
        ``plugins``, for the Trainer's constructor.

    Raises:
        ValueError: ``precision`` is among the settings, or a precision plugin among the plugins.
        AmpConfigError: As `AmpPrecision`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> Trainer(logger=False, accelerator="cpu", **trainer_kwargs("O2", num_losses=3)).precision
        '16-true'
    """
    if "precision" in settings:
        raise ValueError(
            f"precision={settings['precision']!r} was given beside opt_level={opt_level!r}, which sets the precision. "
            "Delete precision=; dtype='bfloat16' chooses the other half type."
        )
    others = settings.pop("plugins", None) or []
    others = list(others) if isinstance(others, (list, tuple)) else [others]
    for plugin in others:
        if isinstance(plugin, Precision):
            raise ValueError(
                f"The plugin {type(plugin).__name__} sets the precision, and so does opt_level={opt_level!r}. Delete "
                "one of the two."
            )
    return {"plugins": [AmpPrecision(opt_level, **settings), *others]}  # type: ignore[arg-type]
