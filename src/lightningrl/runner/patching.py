"""Patches libraries that user code may or may not import: now if they are imported, or right after their import."""

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeAlias

Patches: TypeAlias = Mapping[str, Callable[[ModuleType], None]]
"""Name of a module → what patches it."""


def patch(patches: Patches) -> None:
    """Patch these modules, now or when they are imported. Idempotent, if the patches use `wrap`."""
    for name, apply in patches.items():
        if name in sys.modules:
            apply(importlib.import_module(name))  # waits for a thread that is importing it right now
    if not any(isinstance(finder, _OnImport) and finder.patches is patches for finder in sys.meta_path):
        sys.meta_path.insert(0, _OnImport(patches))


def wrap(owner: type | ModuleType, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace the function `name` of a class or module by `wrapper(function)`. Wraps it only once."""
    original = owner.__dict__[name]
    static = isinstance(original, staticmethod)
    function: Any = original.__func__ if static else original
    if "__lightningrl__" not in function.__dict__:
        wrapped = functools.wraps(function)(wrapper(function))
        wrapped.__dict__["__lightningrl__"] = True
        setattr(owner, name, staticmethod(wrapped) if static else wrapped)


class _OnImport(MetaPathFinder):
    """Patches a module right after its import; the module's own finder and loader do the importing."""

    def __init__(self, patches: Patches) -> None:
        self.patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.patches:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_patch(module: ModuleType) -> None:
                load(module)
                if module.__name__ == fullname:  # a loader may serve more than one module
                    self.patches[fullname](module)

            spec.loader.exec_module = load_and_patch
        return spec
