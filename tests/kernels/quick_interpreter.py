"""A pytest plugin that makes Triton's interpreter several times quicker, so that whole files of tests can run in it.

The interpreter puts its own functions in place of the language's at each call of a device function, and for that looks
through all that the language has. Once a launch for each module is as good.
"""

from typing import Any

from triton.runtime import interpreter


def pytest_configure() -> None:
    """Installs it; a Triton whose interpreter is built differently runs as it is."""
    executor, patch = interpreter.GridExecutor, getattr(interpreter, "_patch_lang", None)
    if patch is None:
        return
    launch = executor.__call__
    done: set[int] = set()

    def once(function: Any) -> Any:
        if id(function.__globals__) in done:
            return None  # nobody asks for it where a device function is called
        done.add(id(function.__globals__))
        return patch(function)

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang = once
    executor.__call__ = run  # type: ignore[method-assign]
