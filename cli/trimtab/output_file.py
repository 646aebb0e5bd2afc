"""Files that a flag names to be written at the end of a long run.

Its one rule: whatever can be known before the start is found out then, by opening the file; a file that is there keeps
its content, and one that is not does not come to be.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from trimtab.errors import UsageError


def check_output_file(flag: str, path: Path, *, suffixes: Collection[str] = ()) -> None:
    """Raises UsageError with the flag and the remedy. `suffixes`: the kinds of file that there can be; none: any."""
    where = path.absolute()
    if not where.parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {where.parent}. Make it, or name another file")
    if where.is_dir():
        raise UsageError(f"{flag} {path} is a folder: name a file, such as {path / 'demo'}{_first(suffixes)}")
    if suffixes and path.suffix.lower() not in suffixes:
        raise UsageError(f"{flag} {path}: the name has to end with one of {', '.join(suffixes)}")
    is_there = where.exists() or where.is_symlink()
    if is_there and not where.is_file():
        return  # A pipe or a terminal: opening it and closing it again would be noticed at the other end.
    try:
        where.open("ab").close()
    except OSError as error:
        raise cannot_be_written(flag, path, error) from error
    if not is_there:
        where.unlink(missing_ok=True)


def cannot_be_written(flag: str, path: Path, error: OSError) -> UsageError:
    """The error to raise where writing failed."""
    return UsageError(f"{flag} {path} cannot be written: {error.strerror or error}. Name a file in a folder of yours")


def _first(suffixes: Collection[str]) -> str:
    return next(iter(suffixes), ".json")
