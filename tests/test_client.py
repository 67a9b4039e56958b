"""Asking a chat server: what is asked again, what is said of what is not, and that no secret gets out."""

import json
import socket
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise

import pytest

from evalkit.errors import UsageError
from evalkit.retention import client
from evalkit.retention.address import Address, redacted
from evalkit.retention.client import Server
from tests.chatter import GO_ON, body, chatting, cut, dripping, dropped, message, reset, slow, status

HELLO = [{"role": "user", "content": "Hello"}]
SAID = f"{GO_ON} 1."
TOKEN = "sk-0123456789abcdef"


@pytest.fixture(autouse=True)
def no_tokens(monkeypatch):
    for name in ("EVALKIT_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def waits(monkeypatch):
    """The seconds that were to be waited, and are not."""
    seconds: list[float] = []
    monkeypatch.setattr(client, "sleep", seconds.append)
    return seconds


def server(url, timeout=5.0, patience=600.0, model="m"):
    return Server(Address.of(url), model, timeout, patience)


def refused(fault, **given):
    """The line on a request that is refused at once."""
    with chatting(fault) as chatter, pytest.raises(UsageError) as error:
        server(chatter.url, **given).chat(HELLO, 8)
    assert len(chatter.asked) == 1
    assert "\n" not in str(error.value) and str(error.value).startswith(f"{chatter.url} ")
    return str(error.value).removeprefix(f"{chatter.url} ")


def test_a_request_is_greedy_seeded_capped_and_not_streamed():
    with chatting() as chatter:
        answer = server(chatter.url).chat(HELLO, 8, seed=3)
    assert chatter.asked == [{"model": "m", "messages": HELLO, "max_tokens": 8, "temperature": 0, "seed": 3, "stream": False}]
    assert (answer.text, answer.prompt_tokens) == (SAID, 15) and answer.seconds > 0


# Asked again


@pytest.mark.parametrize(
    "fault",
    [status(429), status(500), status(503, "<h1>Loading</h1>"), status(408), dropped, reset, cut, slow(0.6), dripping],
    ids=["429", "500", "503", "408", "dropped", "reset", "cut", "slow", "dripping"],
)
def test_a_server_that_is_away_or_busy_is_asked_again(fault, waits):
    with chatting(fault, fault) as chatter:
        assert server(chatter.url, timeout=0.3).chat(HELLO, 8).text == SAID
    assert len(chatter.asked) == 3 and len(waits) == 2


def test_the_server_says_how_long_it_wants_to_be_left_alone(waits):
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    faults = [status(429, Retry_After="7"), status(503, Retry_After=later), status(503, Retry_After="soon")]
    with chatting(*faults) as chatter:
        server(chatter.url).chat(HELLO, 8)
    assert waits[0] == 7 and 50 < waits[1] <= 60 and waits[2] <= 4 * client.FIRST


def test_pauses_grow_to_their_limit_and_differ(monkeypatch):
    monkeypatch.setattr(client.random, "uniform", lambda low, high: high)
    pauses = [client.pause(tries) for tries in range(1, 100)]
    assert pauses[:3] == [client.FIRST, 2 * client.FIRST, 4 * client.FIRST] and max(pauses) == client.LONGEST
    assert all(one <= other for one, other in pairwise(pauses))
    monkeypatch.undo()
    assert len({client.pause(1) for _ in range(10)}) == 10


def test_patience_ends_with_a_line_that_says_how_to_go_on(monkeypatch, capsys):
    monkeypatch.setattr(client, "FIRST", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UsageError) as error:
        server(f"http://localhost:{port}/v1", patience=0.3).chat(HELLO, 8)
    assert "cannot be reached" in str(error.value) and "--patience 0.3" in str(error.value)
    assert str(error.value).endswith("what was recorded is kept, and the same command goes on from there")
    assert capsys.readouterr().err.count("it is asked again, for 0.3 s at most") == 1


def test_a_server_that_wants_more_than_all_patience_is_not_waited_for(waits):
    told = refused(status(429, {"error": {"message": "Quota."}}, Retry_After="9999"))
    assert told.startswith("has no answer now (429: Quota.) (tries: 1 in 0 s, asked to wait 9999 s, --patience 600)")
    assert waits == []


# Not asked again


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (status(401, {"error": {"message": "No key."}}), "wants a token (401: No key.): set EVALKIT_API_KEY or OPENAI_API_KEY"),
        (status(404, {"detail": "Not Found"}), "has no model 'm' or no chat (404: Not Found): give --model a name that http"),
        (status(400, {"error": "maximum context length is 10"}), "has no room for the conversation (400: maximum context length"),
        (status(413, {"message": "request too large"}), "has no room for the conversation (413: request too large): give shorter"),
        (status(400, {"error": {"message": "no such role"}}), "refuses the request (400: no such role): see what it says"),
        (
            status(422, {"detail": [{"loc": ["body", "x"], "msg": "No such field.", "input": "what was said"}]}),
            'refuses the request (422: [{"loc": ["body", "x"], "msg": "No such field."}]): see what it says',
        ),
        (status(501), "refuses the request (501): "),
        (status(307, Location="http://elsewhere/"), "sends on to another address (307): give that one as --endpoint"),
        (body("<html>Welcome</html>", kind="text/html"), "answers no JSON (<html>Welcome</html>): give an --endpoint that"),
        (body(""), "answers no JSON (nothing): "),
        (body('data: {"choices": []}', kind="text/event-stream"), "streams its answer, which was not asked for: "),
        (body('{"choices": []}'), 'answers without a choice and its message ({"choices": []}): give an --endpoint'),
        (body("[1]"), "answers without a choice and its message ([1]): "),
        (body('{"error": {"message": "Broken."}}'), 'answers without a choice and its message ({"error": {"message": "Broken."}})'),
        (message(content=None), 'answers without a text ({"role": "assistant", "content": null}): if the model thinks first'),
        (message(content="", reasoning_content="Well"), "answers without a text ("),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_no_other_try_can_mend_is_said_at_once(fault, told):
    assert refused(fault).startswith(told)


def test_an_answer_of_no_words_is_an_answer():
    with chatting(message(content="")) as chatter:
        assert server(chatter.url).chat(HELLO, 8).text == ""


def test_an_answer_without_end_is_none(monkeypatch):
    monkeypatch.setattr(client, "MOST", 1000)
    assert refused(body(" " * 5000)).startswith("answers no JSON (nothing)")


def test_http_where_https_is_wanted_is_named():
    with chatting() as chatter, pytest.raises(UsageError, match="speaks another protocol: give http:// or https://"):
        server(chatter.url.replace("http:", "https:")).chat(HELLO, 8)


def test_a_host_that_nobody_knows_is_named(monkeypatch):
    def unknown(*given, **more):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UsageError, match=r"http://nowhere.invalid/v1 is at a host that nobody knows"):
        server("http://nowhere.invalid/v1", patience=0).chat(HELLO, 8)


# Addresses


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("localhost:8000/v1", "it begins with neither http:// nor https://"),
        ("ftp://host/v1", "it begins with neither http:// nor https://"),
        ("http:///v1", "its host or port is none"),
        ("http://host:99999/v1", "its host or port is none"),
        ("http://[::1/v1", "its host or port is none"),
        ("http://host:8000", "its path does not end in /v1"),
        ("http://host/v1/chat/completions", "its path does not end in /v1"),
        ("http://host/v1?key=1", "it goes on after its path"),
        ("http://ho st/v1", "it has blanks"),
        ("http://h\u00f6st/v1", "it has blanks, or letters beyond ASCII"),
    ],
)
def test_what_is_no_address_is_said_before_anything_is_sent(given, told):
    with pytest.raises(UsageError) as error:
        Address.of(given)
    assert str(error.value).startswith(f"--endpoint {given} is no chat server's address ({told}")
    assert str(error.value).endswith("give http://HOST:PORT/v1")


@pytest.mark.parametrize("given", ["http://localhost:8000/v1", "https://host/api/v1/", "http://[::1]:80/v1"])
def test_addresses_are_kept_without_their_last_slash(given):
    assert Address.of(given).url == given.rstrip("/")


# Positions


@pytest.mark.parametrize(
    ("models", "positions"),
    [
        ([{"id": "other", "max_model_len": 7}, {"id": "m", "max_model_len": 4096}], 4096),
        ([{"id": "m"}], None),
        ([{"id": "m", "max_model_len": "many"}], None),
        (["m"], None),
        ({}, None),
        (404, None),
        (500, None),
    ],
)
def test_the_server_may_say_how_many_positions_its_model_has(models, positions):
    with chatting(models=models) as chatter:
        assert server(chatter.url).positions() == positions


def test_a_server_that_is_not_there_says_nothing_of_positions():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    with pytest.raises(UsageError, match="cannot be reached"):
        server(url, patience=0).positions()


# Secrets


def test_a_token_in_the_environment_is_sent(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "other-token")
    with chatting() as chatter:
        server(chatter.url).chat(HELLO, 8)
        monkeypatch.setenv("EVALKIT_API_KEY", f"{TOKEN}\n")
        server(chatter.url).chat(HELLO, 8)
    assert chatter.authorized == ["Bearer other-token", f"Bearer {TOKEN}"]


def test_a_user_and_password_in_the_address_are_sent(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", TOKEN)
    with chatting() as chatter:
        server(chatter.url.replace("//", "//me:se%40cret@")).chat(HELLO, 8)
    assert chatter.authorized == [f"Basic {b64encode(b'me:se@cret').decode()}"]


@pytest.mark.parametrize("padding", [0, 150])
def test_a_token_that_the_server_repeats_is_hidden(padding, monkeypatch, waits):
    monkeypatch.setenv("EVALKIT_API_KEY", TOKEN)
    echo = "x" * padding + f" your token {TOKEN} "
    for fault in (
        status(401, {"error": {"message": echo}}),
        status(400, echo),
        body(echo),
        body(json.dumps([echo])),
        message(text=echo),
    ):
        told = refused(fault)
        assert TOKEN[:8] not in told and ("***" in told or padding)
    assert TOKEN[:8] not in refused(status(500, echo), patience=0)
    with chatting(message(content=echo)) as chatter:
        assert server(chatter.url).chat(HELLO, 8).text == echo.replace(TOKEN, "***")


def test_a_password_that_the_server_repeats_is_hidden():
    coded = b64encode(b"me:se@cret").decode()
    with chatting(status(400, f"se@cret se%40cret {coded}")) as chatter, pytest.raises(UsageError) as error:
        server(chatter.url.replace("//", "//me:se%40cret@")).chat(HELLO, 8)
    assert not any(secret in str(error.value) for secret in ("se@cret", "se%40cret", coded))


def test_a_token_that_no_header_can_carry_is_named_and_not_shown(monkeypatch):
    monkeypatch.setenv("EVALKIT_API_KEY", "geheim\nX-Other: 1")
    with pytest.raises(UsageError, match="EVALKIT_API_KEY holds letters that no header can carry") as error:
        Address.of("http://localhost/v1")
    assert "geheim" not in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        "http://me:geheim@host/v2",
        "me:geheim@host/v1",
        "http://me:ge/heim@host/v1",
        "http://me:ge heim@h/v1",
        "http://me:2024/geheim@h/v1",
    ],
)
def test_a_refused_address_is_shown_without_its_password(given):
    with pytest.raises(UsageError) as error:
        Address.of(given)
    assert "heim" not in str(error.value) and "--endpoint ***@h" in str(error.value)


def test_what_is_shown_of_a_server_has_no_secret(monkeypatch):
    monkeypatch.setenv("EVALKIT_API_KEY", TOKEN)
    assert TOKEN not in repr(server("http://localhost/v1"))
    assert "geheim" not in repr(server("http://me:geheim@localhost/v1"))
    assert redacted("evalkit retention --endpoint http://me:ge@heim@host/v1 --label a@b") == (
        "evalkit retention --endpoint http://***@host/v1 --label a@b"
    )
