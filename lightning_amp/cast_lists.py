"""What autocast does to each function on CUDA, by name, and how to find these functions in torch.

The CPU's autocast has shorter lists. `CPU_CASTS` is what it takes to make them mean the same: the three lists as far as
the CPU lacks them, with the functions of torch's Python code that are made of listed ones
(https://docs.pytorch.org/docs/stable/amp.html, and ``ATen/autocast_mode.h`` in torch itself).
"""

import itertools
from collections.abc import Callable, Iterator
from inspect import isroutine
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Kind = Literal["half", "float", "promote"]
"""How a function's floating tensors are cast: to half, to float32, or to the widest dtype among them."""

_HALF = """addmv addr chain_matmul einsum gru gru_cell lstm lstm_cell multi_dot mv prelu rnn_relu rnn_relu_cell rnn_tanh
rnn_tanh_cell"""

_FLOAT = """__pow__ __rdiv__ __rpow__ __rtruediv__ acos arccos arcsin asin binary_cross_entropy_with_logits cdist cosh
cosine_embedding_loss cosine_similarity cpu cross_entropy cumprod cumsum dist erfinv exp expm1 frobenius_norm
gaussian_nll_loss group_norm gumbel_softmax hinge_embedding_loss huber_loss interpolate kl_div l1_loss layer_norm
local_response_norm log log10 log1p log2 log_softmax logsumexp margin_ranking_loss matrix_norm mse_loss
multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss nll_loss norm normalize nuclear_norm
pairwise_distance pdist poisson_nll_loss pow prod reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss
soft_margin_loss softmax softmin softplus square sum tan triplet_margin_loss triplet_margin_with_distance_loss upsample
upsample_bilinear upsample_nearest vector_norm"""

_PROMOTE = "addcdiv addcmul atan2 arctan2 bilinear cross dot index_put scatter_add tensordot vdot"

_NO_HALF_KERNEL = """cholesky cholesky_inverse cholesky_solve ctc_loss det geqrf inverse istft logdet lu lu_solve
matrix_exp matrix_power orgqr ormqr pinverse qr slogdet stft svd"""
_HALF_KERNEL_IN_LINALG = {"cross", "diagonal", "matmul", "matrix_norm", "multi_dot", "norm", "vecdot", "vector_norm"}
_NO_ARITHMETIC_IN_FFT = {"fftfreq", "fftshift", "ifftshift", "rfftfreq"}

_OWNERS = (torch, F, Tensor, torch.linalg, torch.special, torch._VF)
"""The last is where torch's recurrent layers look their functions up."""


def _places() -> Iterator[tuple[tuple[Any, str], tuple[Callable[..., Any], Kind]]]:
    lists: dict[Kind, str] = {"half": _HALF, "float": _FLOAT, "promote": _PROMOTE}
    for kind, names in lists.items():
        for owner, name in itertools.product(_OWNERS, names.split()):
            function = getattr(owner, name, None)
            if isroutine(function):  # not `torch.cpu`, which is a module
                yield (owner, name), (function, kind)


CPU_PLACES: dict[tuple[Any, str], tuple[Callable[..., Any], Kind]] = dict(_places())
"""Where torch keeps each listed function that the CPU's autocast does not cast by itself, and how it is cast."""

CPU_CASTS: dict[Callable[..., Any], Kind] = dict(CPU_PLACES.values())


def without_half_kernel() -> Iterator[tuple[Any, str]]:
    """Yields where torch keeps the functions that have no half kernel on some device, or none that is complete."""
    for name in _NO_HALF_KERNEL.split():
        for owner in (torch, F, Tensor):
            if hasattr(owner, name):
                yield owner, name
    for owner, left_out in ((torch.linalg, _HALF_KERNEL_IN_LINALG), (torch.fft, _NO_ARITHMETIC_IN_FFT)):
        for name in dir(owner):
            if not name.startswith("_") and name not in left_out and isroutine(getattr(owner, name)):
                yield owner, name
