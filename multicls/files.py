"""Atomic files and folders, locked folders, checksums, JSON and JSON lines."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

from multicls.errors import UserError, did_you_mean, print_stderr

REPOSITORY = Path(__file__).resolve().parents[1]
LOCK = ".lock"
LOCK_PATIENCE = 2.0  # seconds, for a process that is about to end and for one that only asks who holds the lock
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # the file system has none, e.g. Lustre without `-o flock`
_held: dict[Path, int] = {}  # locks of this process: the file and the process id


@contextmanager
def atomic_write(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Opens a temporary file beside `path` and renames it to `path` when the block succeeds.

    The bytes are on disk before the rename: a crash leaves either the old file or the whole new one.
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


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Creates a temporary folder beside `path` and renames it to `path` when the block succeeds.

    An existing folder is replaced as a whole. If the block fails, it stays and the temporary folder is removed.
    Everybody may read the files; safetensors leaves them to their owner.
    """
    path = Path(path).absolute()
    fresh, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():  # a process was killed between the two renames below
        old.rename(path)
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
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
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def find_shipped(path: str | Path) -> Path:
    """Returns the absolute `path` if it exists, else the file with that relative path in this repository.

    Raises:
        UserError: neither file exists.
    """
    path = Path(path)
    for candidate in (path, REPOSITORY / path):
        if candidate.exists():
            return candidate.resolve()
    shipped = sorted(str(p.relative_to(REPOSITORY)) for p in (REPOSITORY / path.parent).glob(f"*{path.suffix}"))
    raise UserError(f"{path}: no such file.{did_you_mean(str(path), shipped)}")


def nearest_folder(path: Path) -> str:
    """Returns `" Did you mean 'x'?"` with the folder that differs from `path` by a misspelt part, "" if none does."""
    parent = next(parent for parent in path.parents if parent.is_dir())
    wrong, *rest = path.relative_to(parent).parts
    try:
        near = get_close_matches(wrong, [one.name for one in parent.iterdir()])
        found = [folder for name in near if (folder := Path(parent, name, *rest)).is_dir()]
    except PermissionError:  # as /home of a cluster
        return ""
    return f" Did you mean '{found[0]}'?" if found else ""


def missing_folder(name: str) -> str:
    """Returns why `name` is neither a folder nor a Hub id, with the nearest folder; "" if it may be either.

    A name such as runs/bsae is no Hub id if runs/ is here and holds a folder of a similar name.
    """
    path = Path(name)
    is_path = path.is_absolute() or name.startswith(".") or name.count("/") > 1
    if path.is_dir() or not (is_path or ("/" in name and path.parent.is_dir())):
        return ""
    near = nearest_folder(path)
    return f"no such folder.{near}" if is_path or near else ""


class FolderInUse(UserError):
    """Another process holds the lock of a folder."""


class FolderLock:
    """Keeps a folder to one process, with a lock on FOLDER/.lock that the kernel releases when the process ends.

    It is a POSIX record lock, not `flock`. A POSIX lock belongs to the process and a fork does not inherit it, so a
    loader worker that outlives a killed rank does not keep the folder locked. Over NFS both kinds become the same lock
    on the server. The process loses a POSIX lock when it closes any descriptor of the file: use `lock_holder` to look
    at the lock, never open the file. The file tells who holds the lock; it is gone when the folder is free, unless its
    holder was killed. A missing folder is made, and removed by `release` if it is empty then.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder).resolve() / LOCK
        self._descriptor: int | None = None

    def acquire(self, patience: float = LOCK_PATIENCE) -> None:
        """Takes the lock; waits `patience` seconds for another process.

        Raises:
            FolderInUse: another process, or another part of this one, holds the lock.
            UserError: the folder is not writable.
        """
        began, told = time.monotonic(), False
        while not self._try():
            waited = time.monotonic() - began
            if waited > LOCK_PATIENCE and not told:
                print(f"{self.path.parent}: waiting for {lock_holder(self.path.parent)}", flush=True)
                told = True
            if waited >= patience:
                raise FolderInUse(
                    f"{self.path.parent}: in use by {lock_holder(self.path.parent) or 'another process'}. Wait for it, "
                    f"stop it, or give another folder. If that host is down and will not come back, remove {self.path}."
                )
            time.sleep(0.05)

    def release(self) -> None:
        """Gives the folder free; does nothing in a process that does not hold the lock."""
        if self._descriptor is None or _held.get(self.path) != os.getpid():
            return
        if _is_file_of(self.path, self._descriptor):
            self.path.unlink()
        os.close(self._descriptor)
        self._descriptor = None
        del _held[self.path]
        with suppress(OSError):  # not empty, as a rule
            self.path.parent.rmdir()

    def clear_folder(self) -> None:
        """Removes everything in the folder but the lock."""
        for path in self.path.parent.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != self.path:
                path.unlink()

    def _try(self) -> bool:
        if _held.get(self.path) == os.getpid():
            return False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # its last holder has removed the folder since
            return False
        except FileExistsError as error:
            if self.path.parent.exists() and not self.path.parent.is_dir():
                raise UserError(f"{self.path.parent}: cannot be written to: {error.strerror}.") from None
            return False  # removed in the middle of mkdir
        except OSError as error:
            raise UserError(f"{self.path.parent}: cannot be written to: {error.strerror}.") from None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(descriptor)
                return False
            text = f"warning: {self.path.parent}: its file system has no locks, so nothing keeps a second process out"
            print_stderr(f"{text} ({error.strerror})")
        if not _is_file_of(self.path, descriptor):  # its last holder has removed the file since
            os.close(descriptor)
            return False
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        self._descriptor = descriptor
        _held[self.path] = os.getpid()
        return True


@contextmanager
def locked(folder: str | Path, patience: float = LOCK_PATIENCE) -> Iterator[FolderLock]:
    """Keeps a folder to this process inside the block. Arguments and errors are those of `FolderLock`."""
    lock = FolderLock(folder)
    lock.acquire(patience)
    try:
        yield lock
    finally:
        lock.release()


def lock_holder(folder: str | Path) -> str | None:
    """Returns which process holds the `FolderLock` of `folder` and since when, in words; None if no process does."""
    path = Path(folder).resolve() / LOCK
    if _held.get(path) == os.getpid():
        return f"this process ({os.getpid()})"
    try:
        with open(path, "rb") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            except OSError as error:
                if error.errno in NO_LOCKS:
                    return None
            holder = json.loads(file.read())
            return f"process {holder['pid']} on host {holder['host']} since {holder['since']}"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:  # the holder is just writing
        return "another process"


def _is_file_of(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
