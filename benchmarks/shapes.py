"""Lists of parameter shapes that the benchmarks of the kernels run over: real networks, and two extremes."""

from collections.abc import Callable
from itertools import pairwise

Shape = tuple[int, ...]


def dcgan(width: int = 64, noise: int = 100, colours: int = 3) -> list[Shape]:
    """Generator and discriminator for 64x64 pictures: 24 tensors, 6.3 million elements."""
    shapes: list[Shape] = []
    ups = [noise, 8 * width, 4 * width, 2 * width, width, colours]
    for i, (come, go) in enumerate(pairwise(ups)):
        shapes.append((come, go, 4, 4))
        shapes += [(go,), (go,)] if i < 4 else []
    downs = [colours, width, 2 * width, 4 * width, 8 * width, 1]
    for i, (come, go) in enumerate(pairwise(downs)):
        shapes.append((go, come, 4, 4))
        shapes += [(go,), (go,)] if 0 < i < 4 else []
    return shapes


def resnet50() -> list[Shape]:
    """ResNet-50: 161 tensors, 25.6 million elements."""

    def conv(come: int, go: int, kernel: int) -> list[Shape]:
        return [(go, come, kernel, kernel), (go,), (go,)]

    shapes, come = conv(3, 64, 7), 64
    for width, blocks in [(64, 3), (128, 4), (256, 6), (512, 3)]:
        for block in range(blocks):
            shapes += conv(come, width, 1) + conv(width, width, 3) + conv(width, 4 * width, 1)
            shapes += conv(come, 4 * width, 1) if block == 0 else []
            come = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def gpt2() -> list[Shape]:
    """GPT-2 small: 148 tensors, 124 million elements."""
    n = 768
    norm: list[Shape] = [(n,), (n,)]
    block = [*norm, (n, 3 * n), (3 * n,), (n, n), (n,), *norm, (n, 4 * n), (4 * n,), (4 * n, n), (n,)]
    return [(50257, n), (1024, n), *block * 12, *norm]


def tiny() -> list[Shape]:
    """2,000 tensors of 256 elements: nothing but overhead."""
    return [(256,)] * 2000


def big() -> list[Shape]:
    """One tensor of 2^28 elements: nothing but bandwidth."""
    return [(2**28,)]


LISTS: dict[str, Callable[[], list[Shape]]] = {
    "dcgan": dcgan,
    "resnet50": resnet50,
    "gpt2": gpt2,
    "tiny2000": tiny,
    "big": big,
}
