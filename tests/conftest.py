"""What several test modules share: the folder of real data, a cache of their own, the command."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalkit import cli

LONG = ("test_real_sweep.py", "test_export.py", "test_packaging.py")  # files of few tests that take minutes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, then those of many tests: processes take whole files, and one begun last would run alone."""
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in LONG, -sizes[item.path], item.path))


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with `<task>/<split>.jsonl` files that EVALKIT_DATA names; without it the test is skipped."""
    folder = os.environ.get("EVALKIT_DATA")
    if not folder:
        pytest.skip("EVALKIT_DATA names no folder with the real data")
    return Path(folder)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what policies prepare out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVALKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `evalkit WORDS` in this process; give the exit code, standard output and standard error."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["evalkit", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, *capsys.readouterr()

    return run
