"""``python -m examples.wgan_gp fit --config configs/wgan_gp/o1.yaml``."""

from examples.dcgan.__main__ import exit_with_a_sentence
from examples.dcgan.cli import CONFIGS, DCGANCLI
from examples.wgan_gp.module import WGANGP


def main() -> DCGANCLI:
    """Runs the command that stands in `sys.argv`."""
    with exit_with_a_sentence():
        return DCGANCLI(WGANGP, CONFIGS / "wgan_gp" / "base.yaml")


if __name__ == "__main__":
    main()
