"""A process in which nothing has run: autograd refuses to work in a fork of one that has seen a device, even a fake."""

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from torch import multiprocessing

SECONDS = 150

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["lightning.pytorch", "torch"])


def _answer(ends: Connection, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    try:
        function(*args, **kwargs)
        ends.send(None)
    except BaseException:
        ends.send(traceback.format_exc())
        raise


def in_clean_process(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Runs a function of a module in a clean process, to its end. What it finds, it leaves in files."""
    here, there = context.Pipe()
    process = context.Process(target=_answer, args=(there, function, args, kwargs))
    process.start()
    there.close()
    try:
        error = here.recv() if here.poll(SECONDS) else f"not done after {SECONDS} seconds"
    except EOFError:
        error = "the process died"
    if error:
        process.kill()
    process.join()
    assert not error, error
