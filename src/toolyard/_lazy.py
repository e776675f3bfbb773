"""Lazy exports: a package imports what it exports on first use, so importing it stays cheap and needs no extras."""

from __future__ import annotations

TYPE_CHECKING = False  # as in `toolyard`
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def exports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package's `__init__`. `homes` maps each module to the names that the
    package exports from it, separated by spaces."""
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        import sys
        from importlib import import_module

        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted(home_of)

    return get, listed
