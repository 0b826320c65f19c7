"""What autocast does to each operation on CUDA and not on the CPU, and how to find functions without a half kernel.

The names are the dispatcher's, with the overload behind the dot
(https://docs.pytorch.org/docs/stable/amp.html, and ``ATen/autocast_mode.h`` in torch itself).
"""

from collections.abc import Iterator
from inspect import isroutine
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Kind = Literal["half", "float", "promote"]
"""How a function's floating tensors are cast: to half, to float32, or to the widest dtype among them."""

# The last three lines: recurrent layers. On CUDA their kernels are cast, on the CPU they have none.
_HALF = """addmv addr chain_matmul einsum linalg_multi_dot mv
gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell
gru.data gru.input lstm.data lstm.input
rnn_relu.data rnn_relu.input rnn_tanh.data rnn_tanh.input"""

_FLOAT = """_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d acos asin cosh cosine_similarity cumprod cumsum dist erfinv exp expm1 frobenius_norm.dim
group_norm layer_norm linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log log10 log1p log2
log_softmax.int logsumexp native_layer_norm norm.Scalar norm.ScalarOpt_dim nuclear_norm nuclear_norm.dim pdist
pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh softmax.int softplus sum
sum.dim_IntList tan upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
upsample_nearest3d upsample_trilinear3d"""

_PROMOTE = "addcdiv addcmul atan2 bilinear cross dot index_put scatter_add tensordot vdot"

CPU_CASTS: dict[str, Kind] = {
    **dict.fromkeys(_HALF.split(), "half"),
    **dict.fromkeys(_FLOAT.split(), "float"),
    **dict.fromkeys(_PROMOTE.split(), "promote"),
}
"""How each operation is cast that CUDA's autocast casts and the CPU's does not."""

_NO_HALF_KERNEL = """cholesky cholesky_inverse cholesky_solve ctc_loss det geqrf inverse istft logdet lu lu_solve
matrix_exp matrix_power orgqr ormqr pinverse qr slogdet stft svd"""
_HALF_KERNEL_IN_LINALG = {"cross", "diagonal", "matmul", "matrix_norm", "multi_dot", "norm", "vecdot", "vector_norm"}
_NO_ARITHMETIC_IN_FFT = {"fftfreq", "fftshift", "ifftshift", "rfftfreq"}


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
