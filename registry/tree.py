"""Named leaves of nested arguments: one way to walk tuples, mappings and bundles of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Bundle(Mapping[str, Any]):
    """An immutable mapping whose entries are also attributes.

    Keys may be dotted state-dict names: ``bundle["attn.w_qkv"]`` and ``bundle.attn.w_qkv`` are the same
    entry, ``bundle.attn`` is the bundle of all names below ``attn.``.
    """

    __slots__ = ("_entries",)
    _entries: dict[str, Any]

    def __init__(self, entries: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_entries", dict(entries))

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        entries = self._entries
        if name in entries:
            return entries[name]
        below = {key[len(name) + 1 :]: value for key, value in entries.items() if key.startswith(name + ".")}
        if below:
            return Bundle(below)
        raise AttributeError(f"no entry {name!r}; there are: {', '.join(sorted(entries))}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a bundle is immutable: cannot set {name!r}; build another with replace()")

    def __reduce__(self) -> tuple[type[Bundle], tuple[dict[str, Any]]]:
        return Bundle, (self._entries,)

    def __repr__(self) -> str:
        return f"Bundle({', '.join(self._entries)})"

    def replace(self, **entries: Any) -> Bundle:
        """The same bundle with some entries exchanged."""
        return Bundle({**self._entries, **entries})


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted name, leaf)`` in order: tuples and lists by index, mappings by key."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{prefix}.{index}" if prefix else str(index))
    else:
        yield prefix, value


def map_leaves(function: Callable[[str, Any], Any], value: Any, prefix: str = "") -> Any:
    """Rebuild ``value`` with every leaf replaced by ``function(name, leaf)``."""
    if isinstance(value, Mapping):
        entries = {
            key: map_leaves(function, item, f"{prefix}.{key}" if prefix else str(key)) for key, item in value.items()
        }
        return Bundle(entries) if isinstance(value, Bundle) else entries
    if isinstance(value, (tuple, list)):
        items = [map_leaves(function, item, f"{prefix}.{i}" if prefix else str(i)) for i, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return function(prefix, value)
