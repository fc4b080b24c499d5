"""CallableFolder: a folder of modules that can be called."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any


class CallableFolder(ModuleType):
    """A folder of modules that is also a function of api.py: mrb.bench(...) measures, mrb.bench.runner is a
    module. Without this, importing a module of the folder would hide the function."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._function(*given, **named)

    @property
    def _function(self) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module("moe_routing_bench.api"), name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self._function.__doc__
