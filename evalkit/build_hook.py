"""What the build adds to pyproject.toml: model entry points and data rooms; knows only folders, is in no wheel."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class ModelNames(MetadataHookInterface):
    """Declares an entry point for each file of the policies folder, so that the folder is the only list of them."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the entry points to the project's metadata."""
        # By path: the package being built cannot be imported yet.
        hook = runpy.run_path(str(Path(self.root, "evalkit", "hook.py")))
        metadata["entry-points"] = {"lm_eval.models": hook["models"]()}


class DataRooms(BuildHookInterface[Any]):
    """Puts the data rooms into a real wheel; a copy in an editable one would go stale."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add each room that exists to the files of a `standard` build."""
        if version == "standard":
            rooms = [name for name in self.config["rooms"] if Path(self.root, name).is_dir()]
            build_data["force_include"].update({name: f"evalkit/_rooms/{name}" for name in rooms})
