# SPDX-License-Identifier: Apache-2.0
"""Looking at files that somebody else put there.

A folder may be closed to this user, a name too long for the file system, a "file" a pipe that never
ends. None of that may raise from a question, or stop the search behind it.
"""

from __future__ import annotations

import codecs
import os
import stat
from pathlib import Path

_MOST_BYTES = 64 << 20


def is_dir(path: Path) -> bool:
    """Whether it is a folder that can be looked at. `Path.is_dir` raises for a closed parent."""
    return os.path.isdir(path)


def exists(path: Path) -> bool:
    """Whether something is there that can be looked at."""
    return os.path.exists(path)


def why_no_folder(path: Path) -> str:
    """Why `is_dir` says no, as a sentence part."""
    try:
        state = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    return "is a file" if not stat.S_ISDIR(state.st_mode) else "is a folder"


def read_bytes(path: Path) -> bytes:
    """The content of a regular file of at most 64 MiB. Raises OSError, also for anything else."""
    state = os.stat(path)
    if not stat.S_ISREG(state.st_mode):
        # A pipe would be waited for without end.
        raise OSError("not a regular file")
    if state.st_size > _MOST_BYTES:
        raise OSError(f"{state.st_size} bytes, more than {_MOST_BYTES}")
    with open(path, "rb") as file:
        return file.read(_MOST_BYTES)


def read_text(path: Path) -> str:
    """As `read_bytes`, decoded as the system decodes file names, which such files may hold."""
    return os.fsdecode(read_bytes(path).removeprefix(codecs.BOM_UTF8))


def describe(folder: Path, limit: int = 8) -> str:
    """What a folder holds, for messages about a file that is not in it."""
    if not exists(folder):
        nearest = folder.parent
        while not exists(nearest) and nearest != nearest.parent:
            nearest = nearest.parent
        return f"folder {why_no_folder(folder)}; {nearest} is the nearest that does"
    if not is_dir(folder):
        return "it is a file"
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f"folder cannot be listed: {error}"
    if not names:
        return "folder is empty"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"folder holds {', '.join(names[:limit])}{more}"
