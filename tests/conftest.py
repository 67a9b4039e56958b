"""What several test modules share: the folder of real data."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with `<task>/<split>.jsonl` files that EVALKIT_DATA names; without it the test is skipped."""
    folder = os.environ.get("EVALKIT_DATA")
    if not folder:
        pytest.skip("EVALKIT_DATA names no folder with the real data")
    return Path(folder)
