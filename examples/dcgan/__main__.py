"""``python -m examples.dcgan``: flags alone, or ``fit`` and LightningCLI's options."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from examples.dcgan import flags
from examples.dcgan.cli import DCGANCLI
from examples.dcgan.errors import InputError
from lightning_amp import AmpConfigError


@contextmanager
def exit_with_a_sentence() -> Iterator[None]:
    """Ends the program with the message alone where something given cannot be used."""
    try:
        yield
    except (InputError, AmpConfigError) as error:
        sys.exit(f"error: {error}")


def main() -> None:
    """Runs the command that stands in `sys.argv`."""
    with exit_with_a_sentence():
        if sys.argv[1:2] == ["fit"]:
            DCGANCLI()
        else:
            flags.run()


if __name__ == "__main__":
    main()
