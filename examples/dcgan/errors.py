"""The error that the command line shows as a sentence, without a traceback."""


class InputError(ValueError):
    """Something given that cannot be used; the message says what was given, what is allowed and what to try."""


def reason(error: BaseException) -> str:
    """Returns another library's message on one line, to stand inside a sentence."""
    return " ".join(str(error).split()).rstrip(".") + "."
