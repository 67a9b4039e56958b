"""Where a data room is looked for."""

import pytest

from evalkit import rooms
from evalkit.errors import UsageError


def test_a_checkout_has_its_rooms_beside_the_package(tmp_path, monkeypatch) -> None:
    (tmp_path / "tasks").mkdir()
    monkeypatch.setattr(rooms, "__file__", str(tmp_path / "evalkit" / "rooms.py"))
    assert rooms.room("tasks") == tmp_path / "tasks"


def test_an_installed_wheel_has_them_inside_whatever_lies_beside_the_package(tmp_path, monkeypatch) -> None:
    for folder in ("tasks", "evalkit/_rooms/tasks"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(rooms, "__file__", str(tmp_path / "evalkit" / "rooms.py"))
    assert rooms.room("tasks") == tmp_path / "evalkit" / "_rooms" / "tasks"


def test_a_missing_room_is_a_user_error_that_names_it() -> None:
    with pytest.raises(UsageError, match=r"no data room 'attic' at .*: reinstall kv-evalkit"):
        rooms.room("attic")
