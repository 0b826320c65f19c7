"""``python -m examples.dcgan``: flags alone, or ``fit`` and LightningCLI's options."""

import sys

from examples.dcgan import flags
from examples.dcgan.cli import DCGANCLI
from examples.dcgan.errors import InputError
from lightning_amp import AmpConfigError


def main(args: list[str]) -> None:
    """Runs the command.

    Args:
        args: The command line, without the program's name.
    """
    try:
        if args and args[0] in DCGANCLI.subcommands():
            DCGANCLI(args)
        else:
            flags.run(args)
    except (InputError, AmpConfigError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
