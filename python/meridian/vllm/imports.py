"""Changes to modules of vLLM that most of its processes never import."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

logger = logging.getLogger("vllm.meridian")

Change = Callable[[ModuleType], None]


def when_imported(name: str, change: Change, without: str) -> None:
    """Change a module now, or as soon as it is imported. `change` may be called again; if it raises, the log says
    `without`."""

    def changed(module: ModuleType) -> None:
        try:
            change(module)
        except Exception:
            logger.warning("meridian: %s", without, exc_info=True)

    module = sys.modules.get(name)
    if module is not None:
        changed(module)
        return
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.changes.setdefault(name, {})[without] = changed


class _Finder:
    """Changes a module after its import."""

    def __init__(self) -> None:
        # By module, and by what is said without the change.
        self.changes: dict[str, dict[str, Change]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of the other finders, with a loader that changes the module."""
        changes = self.changes.get(name)
        if changes is None:
            return None
        spec = None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                break
        loader = None if spec is None else spec.loader
        if loader is None:
            return spec
        run = loader.exec_module

        def executed(module: ModuleType) -> None:
            run(module)
            for change in changes.values():
                change(module)

        vars(loader)["exec_module"] = executed
        return spec
