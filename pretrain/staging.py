"""The corpus on slow shared disks: a copy on each node's own disk, or one read of all files before the first step."""

from __future__ import annotations

import math
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from multicls.console import Progress, print_line
from multicls.corpus import MANIFEST, Corpus
from multicls.errors import UserError
from multicls.files import locked, sha256_of
from pretrain.turns import once_per_node

BLOCK = 16 << 20  # bytes
SPARE = 1 << 20  # bytes that the file system needs beside the files' own
Say = Callable[[str], None]


def stage(corpus: Path, local_copy: str | None, warm_up: bool, say: Say = print_line) -> Path:
    """Prepares the corpus on every node as the settings `data.local_copy` and `data.warm_up` ask; all ranks must call.

    Returns the folder to train from. The first rank of each node says how far it is.

    Raises:
        UserError: a node has no room for the copy, cannot write it, or the corpus is damaged; on all ranks.
    """
    if local_copy is not None:
        folder = copy_path(corpus, Path(local_copy))
        once_per_node(lambda: copy_corpus(corpus, folder, say))
        corpus = folder
    if warm_up:
        once_per_node(lambda: read_shards(corpus, say))
    return corpus


def copy_path(corpus: Path, parent: Path) -> Path:
    """Returns the folder of a corpus's copy in `parent`. Its name has the manifest's SHA-256, so corpora do not mix."""
    return parent / f"{corpus.resolve().name}-{sha256_of(corpus / MANIFEST)[:12]}"


def copy_corpus(corpus: Path, folder: Path, say: Say = print_line) -> None:
    """Copies a corpus folder to `folder`, which is complete or absent; does nothing if a whole copy is there.

    Processes that call it at the same time for the same folder wait for the one that copies.

    Raises:
        UserError: As in `stage`, but on this rank alone.
    """
    with locked(folder.with_name(f".{folder.name}"), patience=math.inf) as lock:
        if _is_whole(folder):
            say(f"corpus: found the copy {folder}")
            return
        lock.clear_folder()  # what a killed process left
        shutil.rmtree(folder, ignore_errors=True)  # a cleaner of temporary files may have removed some of it
        fresh = lock.path.with_name("copy")
        try:
            _copy_files(Corpus.open(corpus), fresh, say)
            Corpus.open(fresh)
            fresh.rename(folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        Corpus.open(folder)
        return True
    except UserError:
        return False


def _copy_files(corpus: Corpus, folder: Path, say: Say) -> None:
    folder.mkdir()
    sizes = {name: entry["bytes"] for name, entry in corpus.files.items()}
    sizes[MANIFEST] = (corpus.path / MANIFEST).stat().st_size
    needed, free = sum(sizes.values()) + SPARE, shutil.disk_usage(folder).free
    where = f"data.local_copy = {folder.parents[1]}"
    if needed > free:
        raise UserError(
            f"{where}: the corpus takes {needed / 1e9:.2f} GB and the disk of {socket.gethostname()} has "
            f"{free / 1e9:.2f} GB left; make room, give another folder, or leave the setting null."
        )
    with closing(Progress(f"corpus: copying to {folder.parents[1]}", needed - SPARE, unit="MB", say=say)) as progress:
        for name in sizes:
            try:
                with open(corpus.path / name, "rb") as source, open(folder / name, "wb") as target:
                    while block := source.read(BLOCK):
                        target.write(block)
                        progress.update(progress.done + len(block))
                    target.flush()
                    os.fsync(target.fileno())
            except OSError as error:
                raise UserError(
                    f"{where}: copying {name} on {socket.gethostname()} failed: {error.strerror}."
                ) from None
    progress.tell()


def read_shards(corpus: Path, say: Say = print_line) -> None:
    """Reads all shards once, in order, so that the operating system holds them in memory from then on."""
    opened = Corpus.open(corpus)
    paths = [corpus / shard["name"] for shard in opened.manifest["shards"]]
    total = sum(path.stat().st_size for path in paths)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if total > memory:
        say(
            f"corpus: its shards take {total / 1e9:.1f} GB and this node has {memory / 1e9:.1f} GB of memory: "
            "data.warm_up helps little here, data.local_copy would"
        )
    with closing(Progress(f"corpus: reading {corpus}", total, unit="MB", say=say)) as progress:
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                while block := file.read(BLOCK):
                    progress.update(progress.done + len(block))
    progress.tell()
