"""What several test modules share: the folder of real data, a cache of their own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


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
