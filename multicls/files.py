"""Files that are either whole or absent: atomic writes, checksums, JSON lines."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from multicls.errors import UserError, did_you_mean

REPOSITORY = Path(__file__).resolve().parents[1]


@contextmanager
def atomic_write(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Opens a temporary file beside `path` that takes its name only when the block ends well.

    The bytes are on disk before the rename, so a crash leaves the old file or the new one, never a torn one.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: str | Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    with atomic_write(path) as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def read_json(path: str | Path) -> Any:
    """Reads a JSON file.

    Raises:
        UserError: the file is missing or not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: not valid JSON: {error}.") from None


def append_jsonl(path: str | Path, record: dict[str, Any]) -> None:
    """Appends one record as one line, in a single write, so that lines of several writers never mix."""
    line = json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+", buffering=0) as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            line = b"\n" + line  # a killed writer left a torn line: end it, so that only it is lost
        file.write(line)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """All whole records of a JSON-lines file, none if it is missing; a line torn by a killed writer is left out."""
    path = Path(path)
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def sha256_of(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def find_shipped(path: str | Path) -> Path:
    """`path` as given if it exists, else the file of that relative path in this repository.

    So `ds_configs/zero2.json` works from any working directory.

    Raises:
        UserError: neither exists.
    """
    path = Path(path)
    for candidate in (path, REPOSITORY / path):
        if candidate.exists():
            return candidate.resolve()
    shipped = sorted(str(p.relative_to(REPOSITORY)) for p in (REPOSITORY / path.parent).glob(f"*{path.suffix}"))
    raise UserError(f"{path}: no such file.{did_you_mean(str(path), shipped)}")
