"""``python -m examples.dcgan``: flags alone, or ``fit`` and LightningCLI's options."""

import sys

from examples.dcgan import flags
from examples.dcgan.cli import DCGANCLI
from examples.dcgan.errors import InputError
from lightning_amp import AmpConfigError


def main() -> None:
    """Runs the command that stands in `sys.argv`."""
    try:
        if sys.argv[1:2] == ["fit"]:
            DCGANCLI()
        else:
            flags.run()
    except (InputError, AmpConfigError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
