"""What is said to a user whose input cannot be honoured; knows nothing of what was asked for."""

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from types import TracebackType


class UsageError(ValueError):
    """One line: what was given, what is allowed, what to do."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known name closest to `word`, or nothing when none is close."""
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def say_errors_in_one_line() -> None:
    """Let a user's error that ends a program, such as lm-eval's command, end it with the one line the user needs."""
    if getattr(sys.excepthook, "evalkit", False):
        return
    before = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, UsageError):
            print(f"evalkit: error: {error}", file=sys.stderr)
        else:
            before(kind, error, trace)

    say.evalkit = True  # type: ignore[attr-defined]
    sys.excepthook = say
