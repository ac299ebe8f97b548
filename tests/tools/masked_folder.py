"""A pytest plugin that hides a folder of the package: `MASKED_FOLDER=server pytest -p tests.tools.masked_folder`."""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class MaskedFolder(MetaPathFinder):
    """A finder that reports the modules of one folder as missing, as if the folder were deleted."""

    def __init__(self, folder: str) -> None:
        self._name = f"specdec.{folder}"

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Raise ModuleNotFoundError for a module of the folder; else leave it to the other finders."""
        if name == self._name or name.startswith(f"{self._name}."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, MaskedFolder(os.environ["MASKED_FOLDER"]))
