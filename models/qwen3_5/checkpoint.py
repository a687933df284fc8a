# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint: which there are, and what their headers say. Reads no weights."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmoe.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# A header larger than this is no header; the format's own limit.
_HEADER_LIMIT_BYTES = 100_000_000
_ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2,
    "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class TensorHeader:
    """One stored tensor; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class CheckpointFiles:
    """All tensors of a directory by their stored name, and what was left out on purpose."""

    directory: Path
    tensors: dict[str, TensorHeader]
    notices: tuple[str, ...]
    header_bytes: int


def listing(names: Iterable[str], limit: int = 12) -> str:
    """Names for a message, sorted; a long list is cut with a count."""
    items = sorted(names)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def read_headers(directory: Path | str) -> CheckpointFiles:
    """Reads the headers of all files that belong to the checkpoint.

    Args:
        directory: holds `model.safetensors`, or shards named by `model.safetensors.index.json`.

    Returns:
        Every stored tensor. Files that the index does not name are left out with one notice.

    Raises:
        CheckpointError: a file is absent or truncated, a header is damaged, a tensor is stored
            twice, or the index and the files do not fit.
    """
    root = Path(directory)
    if not root.is_dir():
        raise CheckpointError(
            f"{root} is not a directory; a model directory is needed; check the path"
        )
    present = {path.name for path in root.glob("*.safetensors")}
    index_file = root / INDEX
    weight_map: dict[str, str] | None = None
    if index_file.exists():
        weight_map = _read_index(index_file)
        files = sorted(set(weight_map.values()))
        absent = [name for name in files if name not in present]
        if absent:
            raise CheckpointError(
                f"{index_file} names {listing(absent)}, which {root} does not hold; all indexed "
                "files are needed; incomplete download? Fetch the missing files"
            )
    elif SINGLE in present:
        files = [SINGLE]
    else:
        raise CheckpointError(
            f"{root} holds neither {SINGLE} nor {INDEX} (found: {listing(present) or 'nothing'}); "
            "one of them is needed; incomplete download?"
        )
    stray = present - set(files)
    notices = (f"ignored, not part of the checkpoint: {listing(stray)}",) if stray else ()
    tensors: dict[str, TensorHeader] = {}
    twice: set[str] = set()
    header_bytes = 0
    for name in files:
        found, size = _read_header(root / name)
        header_bytes += size
        for tensor in found:
            if tensor.name in tensors:
                twice.add(f"{tensor.name} ({tensors[tensor.name].file.name} and {name})")
            tensors[tensor.name] = tensor
    if twice:
        raise CheckpointError(
            f"tensors stored twice in {root}: {listing(twice)}; each name is allowed once; "
            "save the checkpoint again"
        )
    if weight_map is not None:
        _compare_index(index_file, weight_map, tensors)
    return CheckpointFiles(root, tensors, notices, header_bytes)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """json keeps the last of two equal keys; here that is an error."""
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise CheckpointError(key)
        value[key] = item
    return value


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except CheckpointError as error:
        raise CheckpointError(
            f"{file.name} holds {error} twice; each name is allowed once; save the checkpoint again"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} has no readable JSON ({error}); a JSON object is needed; download it again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{file} holds a {type(value).__name__}; a JSON object is needed; download it again"
        )
    return value


def _read_index(file: Path) -> dict[str, str]:
    weight_map = _parse(file, file.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{file} has weight_map {weight_map!r}; tensor names with file names are needed; "
            "download the file again"
        )
    for tensor, name in weight_map.items():
        # A path in the index could lead out of the directory.
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(
                f"{file} maps {tensor} to {name!r}; the name of a file in the same directory is "
                "allowed; download the file again"
            )
    return weight_map


def _compare_index(
    index_file: Path, weight_map: dict[str, str], tensors: dict[str, TensorHeader]
) -> None:
    wrong = []
    for name, file in weight_map.items():
        tensor = tensors.get(name)
        if tensor is None:
            wrong.append(f"{name} (not in {file})")
        elif tensor.file.name != file:
            wrong.append(f"{name} (in {tensor.file.name}, not in {file})")
    wrong += [f"{name} (stored, not in the index)" for name in tensors.keys() - weight_map.keys()]
    if wrong:
        raise CheckpointError(
            f"{index_file} does not fit the files: {listing(wrong)}; index and shards of one "
            "checkpoint are needed; the index of another model? Fetch it again"
        )


def _read_header(file: Path) -> tuple[list[TensorHeader], int]:
    """The tensors of one file and the bytes read; the file's size must match to the byte."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_HEADER_LIMIT_BYTES, size - 8):
            raise CheckpointError(
                f"{file.name} is no complete safetensors file ({size} bytes, header of {length} "
                "bytes); incomplete download? Fetch the file again"
            )
        header = _parse(file, stream.read(length))
    start = 8 + length
    tensors = list(_entries(file, header, start))
    end = start
    for tensor in sorted(tensors, key=lambda item: (item.offset, item.size_bytes)):
        if tensor.offset != end:
            raise CheckpointError(
                f"{tensor.name} in {file.name} starts at byte {tensor.offset}; {end} is allowed "
                "(no gap, no overlap); download the file again"
            )
        end += tensor.size_bytes
    if end != size:
        word = "truncated" if end > size else "too long"
        raise CheckpointError(
            f"{file.name} is {word}: {size} bytes, its header says {end}; "
            "incomplete download? Fetch the file again"
        )
    return tensors, start


def _entries(file: Path, header: dict[str, Any], start: int) -> Iterator[TensorHeader]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            first, last = entry["data_offsets"]
            good = all(type(n) is int and n >= 0 for n in (*shape, first, last))
        except (TypeError, KeyError, ValueError):
            good = False
        if not good or dtype not in _ITEM_BYTES:
            raise CheckpointError(
                f"{name} in {file.name} has the header {entry!r}; dtype (one of "
                f"{', '.join(_ITEM_BYTES)}), shape and data_offsets are needed; "
                "download the file again"
            )
        if last - first != math.prod(shape) * _ITEM_BYTES[dtype]:
            raise CheckpointError(
                f"{name} in {file.name} has {last - first} bytes for {dtype} {list(shape)}; "
                f"{math.prod(shape) * _ITEM_BYTES[dtype]} are needed; download the file again"
            )
        yield TensorHeader(name, dtype, shape, file, start + first, last - first)
