"""What is said to a user whose input cannot be honoured; knows nothing of what was asked for."""

from collections.abc import Iterable
from difflib import get_close_matches


class UsageError(ValueError):
    """One line: what was given, what is allowed, what to do."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known name closest to `word`, or nothing when none is close."""
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
