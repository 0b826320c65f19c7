"""``python -m examples.wgan_gp fit --config configs/wgan_gp/o1.yaml``."""

from examples.dcgan.__main__ import exit_with_a_sentence
from examples.dcgan.cli import DCGANCLI
from examples.wgan_gp.module import WGANGP

if __name__ == "__main__":
    with exit_with_a_sentence():
        DCGANCLI(WGANGP)
