"""Atomic files and folders, locked folders, checksums, JSON and JSON lines."""

import errno
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from multicls.errors import UserError, did_you_mean

REPOSITORY = Path(__file__).resolve().parents[1]
LOCK = ".lock"
NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


@contextmanager
def atomic_write(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Opens a temporary file, which becomes `path` with all bytes on disk when the block succeeds, and not before.

    Raises:
        UserError: There is a folder of that name, or the file cannot be made.
    """
    path = Path(path)
    with _write_errors_named(path):
        if path.is_dir():
            raise UserError(f"{path}: is a folder; pass the name of a file.")
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


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Creates a temporary folder, which replaces `path` as a whole if the block succeeds. All may read its files.

    Raises:
        UserError: The folder cannot be made.
    """
    path = Path(path).absolute()
    fresh, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():  # a process was killed between the two renames below
        old.rename(path)
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    with _write_errors_named(path):
        fresh.mkdir(parents=True)
    try:
        yield fresh
        for file in fresh.rglob("*"):
            if file.is_file():
                file.chmod(0o644)
        if path.exists():
            path.rename(old)
        fresh.rename(path)
    finally:
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _write_errors_named(path: Path) -> Iterator[None]:
    """Names a place that can never be written; a full disk or a fault that passes stays an `OSError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_PLACE:
            raise
        raise UserError(f"{path}: cannot be written to: {error.strerror}.") from None


def write_json(path: str | Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    with atomic_write(path) as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def read_json(path: str | Path) -> Any:
    """Reads a JSON file; a missing or broken one is a `UserError`."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: not valid JSON: {error}.") from None


def append_jsonl(path: str | Path, record: dict[str, Any]) -> None:
    """Appends one record as one line in a single write; the lines of several writers never mix."""
    line = json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+", buffering=0) as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            line = b"\n" + line  # end the torn line of a killed writer: only that one is lost
        file.write(line)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Reads a JSON-lines file; skips lines that a killed writer left incomplete. A missing file has no records."""
    records = []
    for line in Path(path).read_bytes().splitlines() if Path(path).exists() else []:
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def sha256_of(path: str | Path) -> str:
    """Returns the SHA-256 of a file as hexadecimal text."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def missing_folder(name: str) -> str:
    """Returns why `name` is neither a folder nor a Hub id, with the nearest folder; "" if it may be either.

    A name such as runs/bsae is no Hub id if runs/ is here and holds a folder of a similar name.
    """
    path = Path(name)
    if path.is_dir() or "/" not in name:
        return ""
    near = did_you_mean(path.name, [folder.name for folder in path.parent.glob("*/")], listed=False)
    is_path = path.is_absolute() or name.startswith(".") or name.count("/") > 1
    return f"no such folder.{near}" if is_path or near else ""


class FolderInUse(UserError):
    """Another process holds the lock of a folder."""


@contextmanager
def locked(folder: str | Path, patience: float = 2.0) -> Iterator[None]:
    """Keeps a folder to this process inside the block, with filelock on FOLDER/.lock, which names its holder.

    The kernel releases the lock when the process ends. A missing folder is made, and removed if it stays empty.

    Raises:
        FolderInUse: another process still holds the lock after `patience` seconds.
        UserError: the folder cannot be written to.
    """
    path = Path(folder).resolve() / LOCK
    lock = FileLock(path, thread_local=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=patience)
        since = time.strftime("%F %T %z")
        path.write_text(f"process {os.getpid()} on host {socket.gethostname()} since {since}")
    except Timeout:
        raise FolderInUse(
            f"{path.parent}: in use by {lock_holder(folder) or 'another process'}. "
            "Wait for it, stop it, or pass another folder."
        ) from None
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be written to: {error.strerror}.") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):  # not empty, as a rule
            path.parent.rmdir()


def lock_holder(folder: str | Path) -> str | None:
    """Returns which process holds the lock of `folder` and since when, in words; None if no process does."""
    path = Path(folder).resolve() / LOCK
    try:
        if path.exists():
            FileLock(path).acquire(timeout=0).lock.release()
        return None
    except (Timeout, OSError):
        with suppress(OSError):  # released just now
            return path.read_text() or "another process"  # which has not written its name yet
        return "another process"
