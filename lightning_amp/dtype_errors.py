"""Torch's errors where a half weight met another dtype, with the remedy."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_DTYPE_ERROR = re.compile(
    r"same dtype|type.*(Half|BFloat16|half|bfloat16)|(Half|BFloat16).*type|not implemented for '(Half|BFloat16)'"
)


_REMEDY = (
    "A half weight met a tensor of another dtype, or a function that knows no half. Weights are half at this opt "
    "level, and inputs are cast where a module is called: call the module instead of using its weight in a function, "
    "name it in keep_fp32, or set patch_torch_functions=True, which adds autocast."
)


@contextmanager
def explained_dtype_errors() -> Iterator[None]:
    """Adds the remedy to torch's error where a half weight met another dtype or a function that knows no half."""
    try:
        yield
    except RuntimeError as error:
        if not _DTYPE_ERROR.search(str(error)):
            raise
        raise type(error)(f"{error}\n{_REMEDY}") from error


def explain_failure(module: nn.Module, args: Any, output: Any) -> None:
    """As `explained_dtype_errors`, for a forward hook that is called also when ``forward`` raised."""
    error = sys.exc_info()[1] if output is None else None
    if isinstance(error, RuntimeError) and _DTYPE_ERROR.search(str(error)) and _REMEDY not in str(error):
        error.args = (f"{error}\n{_REMEDY}",)
