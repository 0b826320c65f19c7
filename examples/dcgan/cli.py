"""The command in Lightning's own form: ``python -m examples.dcgan fit --config configs/dcgan/o1.yaml``."""

from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only

from examples.dcgan import outputs
from examples.dcgan.data import ImageData, channels
from examples.dcgan.errors import InputError
from examples.dcgan.module import DCGAN

CONFIGS = Path(__file__).parents[2] / "configs"
BASE = CONFIGS / "dcgan" / "base.yaml"
Level = Literal["O0", "O1", "O2", "O3"]


class DCGANCLI(LightningCLI):
    """LightningCLI over `DCGAN` and `ImageData`; every configuration is read over a base.

    Args:
        model: What is trained.
        base: The configuration that every other is read over.
    """

    def __init__(self, model: type[DCGAN] = DCGAN, base: Path = BASE) -> None:
        super().__init__(
            model,
            ImageData,
            seed_everything_default=2809,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"fit": {"default_config_files": [str(base)]}},
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Returns what can be done: a GAN is only fitted."""
        return {"fit": LightningCLI.subcommands()["fit"]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the two words that are worth an option of their own, and lets the model follow the data."""
        parser.add_argument("--outf", type=str, default=".", help="folder for pictures, weights, checkpoints and logs")
        parser.add_argument("--opt_level", type=Level | None, default=None, help="replaces the plugin's opt level")
        parser.link_arguments("outf", "trainer.default_root_dir")
        parser.link_arguments("data.image_size", "model.image_size")
        parser.link_arguments("data.dataset", "model.nc", compute_fn=channels)

    def before_instantiate_classes(self) -> None:
        """Hands ``--opt_level`` to the plugin."""
        config = self.config[self.subcommand]
        if config.opt_level is None:
            return
        plugins = config.trainer.plugins if isinstance(config.trainer.plugins, list) else [config.trainer.plugins]
        amp = [plugin for plugin in plugins if plugin is not None and plugin.class_path.endswith("AmpPrecision")]
        if not amp:
            raise InputError(
                f"--opt_level {config.opt_level} needs AmpPrecision among trainer.plugins, and it is not there. Add "
                "it, or leave --opt_level out."
            )
        amp[0].init_args.opt_level = config.opt_level

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Adds what every run writes to what the configuration asks for."""
        config = self.config_init[self.subcommand]
        if config.trainer.logger is None:
            kwargs["logger"] = outputs.loggers(config.outf)
        kwargs["callbacks"] = [*(config.trainer.callbacks or []), *outputs.callbacks(config.outf)]
        return super().instantiate_trainer(**kwargs)

    @rank_zero_only
    def after_fit(self) -> None:
        """Says what there is to open."""
        print(outputs.summary(self.trainer, self.config[self.subcommand].outf))
