"""Asks a chat server that speaks OpenAI's API, patiently; knows no conversation and no fact.

A server that is away or busy is asked again; what it refuses is said at once, in one line.
"""

from __future__ import annotations

import json
import random
import re
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from http.client import BadStatusLine, HTTPException, HTTPResponse, IncompleteRead
from time import monotonic, perf_counter, sleep
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from .. import __version__
from ..errors import UsageError
from .address import KEYS, Address
from .sources import sound

TIMEOUT, PATIENCE = 300.0, 600.0  # seconds, unless given
FIRST, LONGEST = 0.5, 30.0  # seconds from one try to the next, at first and at most
TOLD = 3  # tries after which it is said that the server is waited for
MOST = 1 << 24  # bytes of a body
LONG_SECRET = 8  # letters: shorter ones may stand in an answer by chance
NO_ROOM = re.compile(r"context|too long|too large|token.*(limit|exceed|maximum)|maximum.*token|max_model_len", re.IGNORECASE)
KEPT = "what was recorded is kept, and the same command goes on from there"

Message = Mapping[str, str]


class Busy(Exception):
    """Why a server has no answer now, how many seconds it asks to be left alone, and its status, if it had one."""

    def __init__(self, reason: str, wait: float = 0.0, status: int | None = None) -> None:
        super().__init__(reason)
        self.wait, self.status = wait, status


class Refused(UsageError):
    """A request that gets no other answer, however often it is sent."""


@dataclass(frozen=True)
class Answer:
    """What a model said, how many tokens it was given if the server tells, and the seconds it took."""

    text: str
    prompt_tokens: int | None
    seconds: float


@dataclass(frozen=True)
class Server:
    """A model behind a chat server, and how patiently it is asked."""

    address: Address
    model: str
    timeout: float = TIMEOUT  # seconds for one request
    patience: float = PATIENCE  # seconds from a request's first failure until it is given up

    def chat(self, messages: Sequence[Message], cap: int, seed: int = 0) -> Answer:
        """Return the model's next message, greedy and of `cap` tokens at most.

        Raises UsageError, in one line, for what the server refuses, and once it was away or busy for all of `patience`.
        """
        settings = {"max_tokens": cap, "temperature": 0, "seed": seed, "stream": False}
        found, seconds = self.ask("/chat/completions", {"model": self.model, "messages": list(messages), **settings})
        text = self.address.hidden(self.said(found), LONG_SECRET)
        usage = found.get("usage")
        tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        return Answer(text, tokens if isinstance(tokens, int) and tokens > 0 else None, seconds)

    def positions(self) -> int | None:
        """Return how many positions the server says that the model has; None where it does not say."""
        try:
            found, _ = self.ask("/models")
            told = [one.get("max_model_len") for one in found["data"] if one["id"] == self.model]
        except (Refused, KeyError, TypeError, AttributeError):  # not every server lists its models, nor alike
            return None
        return next((count for count in told if isinstance(count, int) and count > 0), None)

    def said(self, found: Any) -> str:
        """Return the text in what the server answered."""
        try:
            message = found["choices"][0]["message"]
            text, thought = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
        except (KeyError, IndexError, TypeError, AttributeError):
            what = f"answers without a choice and its message ({self.quoted(json.dumps(found))})"
            raise UsageError(self.line(what, "give an --endpoint that serves chat")) from None
        if not isinstance(text, str) or (thought and not text):
            remedy = "if the model thinks first, switch that off at the server, or raise --answer-cap and --reply-cap"
            raise UsageError(self.line(f"answers without a text ({self.quoted(json.dumps(message))})", remedy))
        return sound(text)

    # Requests

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[Any, float]:
        """Return the JSON that the server answers and the seconds it took, asking again while it is away or busy."""
        tries, since = 0, None
        while True:
            start = perf_counter()
            try:
                return self.once(path, body), perf_counter() - start
            except Busy as busy:
                if busy.status == 500 and body is None:  # some that chat well fail to list their models
                    raise Refused(self.line(str(busy), "see that it runs")) from None
                tries, now = tries + 1, monotonic()
                since = now if since is None else since
                wait = self.wait(busy, tries, now - since)
            sleep(wait)

    def wait(self, busy: Busy, tries: int, seconds: float) -> float:
        """Return the seconds until the next try, `seconds` after the first. Raises UsageError where patience does not last."""
        wait = max(busy.wait, pause(tries))
        if seconds + wait > self.patience:
            asked = f", asked to wait {busy.wait:.0f} s" if busy.wait else ""
            what = f"{busy} (tries: {tries} in {seconds:.0f} s{asked}, --patience {self.patience:g})"
            raise UsageError(self.line(what, f"see that it runs, or give more --patience; {KEPT}"))
        if tries == TOLD:
            print("evalkit:", self.line(str(busy), f"it is asked again, for {self.patience:g} s at most"), file=sys.stderr)
        return wait

    def once(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON that the server answers. Raises Busy where another try may help, Refused where none will."""
        headers = {"User-Agent": f"evalkit/{__version__}", "Accept": "application/json", "Content-Type": "application/json"}
        if self.address.authorization:
            headers["Authorization"] = self.address.authorization
        url = self.address.url + path
        request = Request(url, None if body is None else json.dumps(body).encode(), headers)
        try:
            with _opener(_near(url)).open(request, timeout=self.timeout) as response:
                return self.parsed(_read(response, monotonic() + self.timeout))
        except HTTPError as error:
            with error:
                raise self.refusal(error.code, _message(error), _wait(error.headers.get("Retry-After"))) from None
        except (OSError, HTTPException, UnicodeError) as error:
            raise self.unreached(error.reason if isinstance(error, URLError) else error) from None

    def parsed(self, body: bytes) -> Any:
        """Return the JSON of a body."""
        try:
            return json.loads(body)
        except ValueError:
            text = body[:MOST].decode(errors="replace").strip()
        if text.startswith(("data:", "event:", ":")):
            raise Refused(self.line("streams its answer, which was not asked for", "see that it honours `stream: false`"))
        raise Refused(self.line(f"answers no JSON ({self.quoted(text) or 'nothing'})", "give an --endpoint that serves chat"))

    # What failures mean

    def refusal(self, status: int, said: str, wait: float) -> Exception:
        """Return what an HTTP error means."""
        told = f"{status}: {self.quoted(said)}" if said else str(status)
        if status in (408, 425, 429) or (status >= 500 and status != 501):
            return Busy(f"has no answer now ({told})", wait, status)
        if status in (401, 403):
            what = "refuses the token" if self.address.authorization else "wants a token"
            return Refused(self.line(f"{what} ({told})", f"set {' or '.join(KEYS)} to one that may use {self.model}"))
        if status == 404:
            remedy = f"give --model a name that {self.address.url}/models lists, or another --endpoint"
            return Refused(self.line(f"has no model {self.model!r} or no chat ({told})", remedy))
        if status in (400, 413, 422) and NO_ROOM.search(said):
            remedy = "give shorter --bucket ranges or --reply-cap, or serve the model with more room"
            return Refused(self.line(f"has no room for the conversation ({told})", remedy))
        if 300 <= status < 400:
            return Refused(self.line(f"sends on to another address ({told})", "give that one as --endpoint"))
        return Refused(self.line(f"refuses the request ({told})", "see what it says, and which roles its chat template takes"))

    def unreached(self, error: Any) -> Exception:
        """Return what it means that no answer came."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return UsageError(self.line("shows a certificate that is not trusted", "set SSL_CERT_FILE to its authority's"))
        broken = isinstance(error, ConnectionError | ssl.SSLEOFError | ssl.SSLZeroReturnError)
        if isinstance(error, ssl.SSLError | BadStatusLine) and not broken:
            return UsageError(self.line("speaks another protocol", "give http:// or https:// as it is served, and its port"))
        unknown = isinstance(error, UnicodeError) or (isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN)
        if unknown:
            return UsageError(self.line("is at a host that nobody knows", "give an --endpoint that can be reached from here"))
        if isinstance(error, TimeoutError):
            return Busy(f"does not answer within {self.timeout:g} s (--timeout)")
        if isinstance(error, IncompleteRead):
            return Busy("breaks off in the middle of an answer")
        return Busy(f"cannot be reached ({self.quoted(str(error)) or type(error).__name__})")

    def line(self, what: str, remedy: str) -> str:
        return self.address.hidden(f"{self.address.url} {what}: {remedy}")

    def quoted(self, text: str) -> str:
        """Return the beginning of a text of the server's, in a line; secrets go first, as a half of one is still secret."""
        line = " ".join(self.address.hidden(text).split())
        return line if len(line) <= 160 else f"{line[:157]}..."


def pause(tries: int) -> float:
    """Return the seconds to wait after so many tries: twice as long after each, and never alike for two who wait."""
    return min(LONGEST, FIRST * 2.0 ** min(tries - 1, 16)) * random.uniform(0.5, 1.0)


class _Stay(HTTPRedirectHandler):
    """Follows no redirection, which would take the token to another host."""

    def redirect_request(self, *given: Any, **more: Any) -> None:
        return None


@cache
def _opener(near: bool) -> OpenerDirector:
    """What opens addresses: through the environment's proxy, but those near."""
    return build_opener(_Stay, *([ProxyHandler({})] if near else []))


def _near(url: str) -> bool:
    """Whether an address is on this machine."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _read(response: HTTPResponse, limit: float) -> bytes:
    """Read a body before `limit`, however slowly it comes. Raises TimeoutError, and IncompleteRead where it ends too early."""
    length, body = response.headers.get("Content-Length", ""), b""
    size = int(length) if length.isdecimal() else None
    while len(body) <= MOST and (size is None or len(body) < size) and (part := response.read1(1 << 16)):
        body += part
        if monotonic() > limit:
            raise TimeoutError
    if size is not None and len(body) < min(size, MOST):
        raise IncompleteRead(body, size - len(body))
    return body


def _message(error: HTTPError) -> str:
    """What the body of an HTTP error says."""
    try:
        text = error.read(1 << 16).decode(errors="replace")
        found = json.loads(text)
    except (OSError, HTTPException):
        return ""
    except ValueError:
        return re.sub(r"<[^>]*>", " ", text)
    for name in ("error", "message", "detail"):
        found = found.get(name, found) if isinstance(found, dict) else found
    if isinstance(found, list):  # of what is wrong with fields, which may repeat what was sent
        found = [{name: one[name] for name in ("loc", "msg") if name in one} if isinstance(one, dict) else one for one in found]
    return found if isinstance(found, str) else json.dumps(found)


def _wait(given: str | None) -> float:
    """The seconds that a Retry-After header asks for: a number or a date; 0 where it is neither."""
    try:
        if given is None or given.strip().isdecimal():
            return float(given or 0)
        moment = parsedate_to_datetime(given)
    except ValueError:
        return 0.0
    return max(0.0, (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
