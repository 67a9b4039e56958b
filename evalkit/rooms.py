"""Where the data rooms lie (tasks, retention, budgets); knows nothing of what is in them."""

from pathlib import Path

from evalkit.errors import UsageError


def room(name: str) -> Path:
    """Return the folder of a data room: inside an installed wheel, or in the checkout of an editable install.

    Raises UsageError where this installation has no such room.
    """
    package = Path(__file__).parent
    shipped = package / "_rooms"
    folder = (shipped if shipped.is_dir() else package.parent) / name
    if not folder.is_dir():
        raise UsageError(f"no data room {name!r} at {folder}: reinstall kv-evalkit")
    return folder
