"""Caches of tests of their own."""

from pathlib import Path

from bigdit.emulator import build

_LIBRARIES = build.cache_folder()
"""The user's, whatever a test says later of where its cache is."""


def empty_cache(folder: Path) -> Path:
    """A cache where nothing is kept but the emulated card's libraries, which are built once for all tests."""
    _LIBRARIES.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    (folder / _LIBRARIES.name).symlink_to(_LIBRARIES)
    return folder
