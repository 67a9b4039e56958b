"""Reads the address of a chat server, and the token that it gets; sends nothing, and shows no secret."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from ..errors import UsageError

KEYS = ("EVALKIT_API_KEY", "OPENAI_API_KEY")


@dataclass(frozen=True)
class Address:
    """Where a server is, what it is told of who asks, and what of that must never be shown."""

    url: str  # without user and password
    authorization: str | None = field(default=None, repr=False)
    secrets: Sequence[str] = field(default=(), repr=False)

    @classmethod
    def of(cls, endpoint: str) -> Address:
        """Read an address such as http://localhost:8000/v1.

        A user and password in it are the authorization, else the token in EVALKIT_API_KEY or OPENAI_API_KEY.
        Raises UsageError for what is no such address, and for a token that no header can carry.
        """
        parts = _checked(endpoint)
        user, _, host = parts.netloc.rpartition("@")
        return cls(f"{parts.scheme}://{host}{parts.path.rstrip('/')}", *(_basic(user) if user else _bearer()))

    def hidden(self, text: str, least: int = 1) -> str:
        """Return a text in which nothing secret of `least` letters or more is left, should a server have repeated it."""
        for secret in self.secrets:
            text = text.replace(secret, "***") if len(secret) >= least else text
        return text


def redacted(text: str) -> str:
    """Return a text in which addresses have lost their user and password."""
    return re.sub(r"(?<=://)\S*@|^\S*@", "***@", text)


def _checked(endpoint: str) -> SplitResult:
    """The parts of an address. Raises UsageError for one that is no chat server's."""
    try:
        parts = urlsplit(endpoint)
        host, _ = parts.hostname, parts.port  # both may be refused
    except ValueError:
        parts, host = urlsplit(endpoint.partition("://")[0] + "://"), None
    problems = {
        "it has blanks, or letters beyond ASCII": not (endpoint.isascii() and endpoint.isprintable()) or " " in endpoint,
        "it begins with neither http:// nor https://": parts.scheme not in ("http", "https"),
        "its host or port is none": not host,
        "it has an @ after its host: write a / in a password as %2F": "@" in parts.path,
        "it goes on after its path": bool(parts.query or parts.fragment),
        "its path does not end in /v1": not parts.path.rstrip("/").endswith("/v1"),
    }
    for problem, found in problems.items():
        if found:
            shown = re.sub(r".*@", "***@", endpoint, flags=re.DOTALL)
            raise UsageError(f"--endpoint {shown} is no chat server's address ({problem}): give http://HOST:PORT/v1")
    return parts


def _basic(userinfo: str) -> tuple[str, Sequence[str]]:
    """The authorization of a user and password, and what is secret of it."""
    user, _, password = userinfo.partition(":")
    plain = f"{unquote(user)}:{unquote(password)}"
    coded = b64encode(plain.encode()).decode()
    return f"Basic {coded}", [secret for secret in (userinfo, plain, coded, password, unquote(password)) if secret]


def _bearer() -> tuple[str | None, Sequence[str]]:
    """The authorization of the token in the environment, and what is secret of it."""
    for name in KEYS:
        if token := os.environ.get(name, "").strip():
            if not (token.isascii() and token.isprintable()):
                raise UsageError(f"{name} holds letters that no header can carry: set it to the token alone")
            return f"Bearer {token}", [token]
    return None, ()
