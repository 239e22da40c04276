"""Prepares a corpus folder: lists the input, builds the missing units, merges them, writes the manifest.

OUTPUT/work/KEY/    a built unit; KEY changes with its files, their dates and the settings
OUTPUT/...          the corpus; manifest.json comes last, then work/ is removed
"""

import errno
import hashlib
import json
import math
import re
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from tokenizers import Tokenizer
from tqdm import tqdm

from data_prep import merge
from data_prep.build import DROPPED_TEXT, SHARD_TOKENS, Unit, build_unit
from data_prep.encode import load_tokenizer_files
from data_prep.formats import FORMATS
from data_prep.formats.base import Skipped, SourceFile
from data_prep.ledger import remedies
from data_prep.overlap import SHORTEST_GRAM, read_evaluation_rows
from data_prep.pool import Pool, count_cores, open_pool, run_all
from data_prep.settings import BuildOptions
from data_prep.sources import list_inputs
from multicls.console import count, print_line, progress_bar
from multicls.corpus import FORMAT_VERSION, MANIFEST, Corpus, tokenizer_fingerprint
from multicls.errors import UserError
from multicls.files import LOCK, atomic_write, locked, write_json

DROPPED = "dropped.json"  # samples of what was dropped, by reason, and all paths that were skipped
SMALL_UNIT = 12 << 20  # bytes of small files together: progress is seen, and all workers have some
LARGE_UNIT = 64 << 20  # bytes of a share of a file that can be cut
CHANGES = 3  # of the input while it is read, after which a run ends
LEAST_WEIGHT = 1 << 12  # bytes that take as long to read as a file takes to open
UNITS_VERSION = 9  # of the files of a unit
PACKAGES = ("mwparserfromhell", "numpy", "pyarrow", "sentencex", "tokenizers")
ARRAYS = ("numpy", "pyarrow")
MINHASH = "datasketch"
# A key holds the files themselves instead.
NOT_IN_KEY = {"input", "validation_input", "include", "exclude", "tokenizer", "decontaminate"}
_OURS = re.compile(r"\.?[0-9a-f]{24}(\..*)?|\.?(tokenizer|evaluation)-[0-9a-f]{12}\.(json|npy).*")


class Job(NamedTuple):
    """Everything that decides a corpus."""

    units: list[Unit]
    skipped: list[Skipped]
    tokenizer_files: dict[str, bytes]
    evaluation: np.ndarray  # of `read_evaluation_rows`
    made_from: dict[str, Any]  # of the manifest


def prepare(
    options: BuildOptions,
    *,
    small_unit: int = SMALL_UNIT,
    shard_tokens: int = SHARD_TOKENS,
    shard_bytes: int = merge.SHARD_BYTES,
) -> Corpus:
    """Prepares the corpus in the folder `options.output` and opens it; continues a run that was stopped.

    The bytes depend on the input, the settings and the versions of packages, never on the workers or on interruptions.
    Small files together are a unit of up to `small_unit` bytes; a unit's file ends after `shard_tokens` tokens, and a
    shard takes files until it has `shard_bytes` bytes.

    Raises:
        UserError: The input or the tokenizer is bad, the folder holds something else or another
            process writes it, or the disk is full.
        SystemExit: The scheduler is gone; the same command continues.
    """
    output = Path(options.output).absolute()
    work, started = output / "work", time.monotonic()
    job = _describe_job(options, small_unit)
    with locked(output):
        if _is_finished(output, job.made_from):
            _remove_work(work)  # if a run was killed right after it wrote the manifest
            print_line(f"already finished: {output}")
            return Corpus(output)
        try:
            workers = min(options.workers or count_cores(), len(job.units))
            with open_pool(workers, options.scheduler) as pool:
                for _ in range(CHANGES):
                    changed = _build(job, options, work, shard_tokens, pool)
                    if not changed:
                        break
                    print_line(f"{changed}: changed while it was read; reading it again")
                    job = _describe_job(options, small_unit)
                else:
                    raise UserError(f"{changed}: keeps changing; wait for the end of its writer.")
                folders = [work / unit.key for unit in job.units]
                is_dropped = "duplicate_documents" in options.rules
                copies = merge.find_copies(folders, is_dropped, options.near_duplicates, pool)
                tokenizer = Tokenizer.from_str(job.tokenizer_files["tokenizer.json"].decode())
                size = tokenizer.get_vocab_size(with_added_tokens=True)
                merged = merge.merge(folders, copies, output, size, shard_bytes, pool)
            _finish(output, job, merged)
            _remove_work(work)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"--output {output}: the disk is full; what is written is safe: free some room and run it again."
            ) from None
        finally:
            if not (output / MANIFEST).exists() and not any(work.glob("*/*.arrow")):
                _remove_work(work)  # nothing to continue from
    print_line(f"done in {tqdm.format_interval(time.monotonic() - started)}: {output}")
    return Corpus(output)


def _build(job: Job, options: BuildOptions, work: Path, shard_tokens: int, pool: Pool) -> str:
    """Builds the units that are missing, the largest first: then the workers end together.

    Returns the path of a file that has changed since it was listed, or "".
    """
    missing = [unit for unit in job.units if not (work / unit.key).exists()]
    if not missing:
        return ""
    settings, evaluation = job.made_from["settings"], None
    tokenizer = work / f"tokenizer-{settings['tokenizer'][:12]}.json"
    with atomic_write(tokenizer, "wb") as file:
        file.write(job.tokenizer_files["tokenizer.json"])
    if job.evaluation.size:
        evaluation = work / f"evaluation-{settings['decontaminate'][:12]}.npy"
        with atomic_write(evaluation, "wb") as file:
            np.save(file, job.evaluation)
    missing.sort(key=lambda unit: -sum(file.size for file in unit.files))
    calls = [(unit, options, work, tokenizer, shard_tokens, evaluation) for unit in missing]
    changed, done = "", len(job.units) - len(missing)
    with progress_bar(len(job.units), "unit", "build", initial=done) as progress:
        for _, path in run_all(build_unit, calls, pool):
            changed = changed or path
            progress.update()
    return changed


def _describe_job(options: BuildOptions, small_unit: int) -> Job:
    """Lists the input and groups it into units; writes nothing."""
    files, skipped = list_inputs(options)
    validation, others = list_inputs(options, "validation_input")
    held_out = {file.source for file in validation}
    if both := held_out & {file.source for file in files}:
        raise UserError(
            f"--validation_input: {min(both)} is also a source of --input; name it: NAME=PATH."
        )
    # First, so that copies of held-out documents are dropped from the training text.
    files, skipped = [*validation, *files], [*others, *skipped]
    tokenizer_files = load_tokenizer_files(options.tokenizer)
    settings = options.model_dump(exclude=NOT_IN_KEY)
    settings["tokenizer"] = hashlib.sha256(tokenizer_files["tokenizer.json"]).hexdigest()
    evaluation, rows, short = read_evaluation_rows(options.decontaminate)
    settings["decontaminate"] = hashlib.sha256(evaluation.tobytes()).hexdigest() if rows else ""
    if rows:
        print_line(
            f"decontaminate: {count(rows, 'row')}; {short:,} have no cell of {SHORTEST_GRAM} words "
            "and are not sought"
        )
    identity: dict[str, Any] = {"format_version": FORMAT_VERSION, "units": UNITS_VERSION}
    names = [*PACKAGES, *([MINHASH] if options.near_duplicates != "keep" else [])]
    try:
        packages = {name: metadata.version(name) for name in names}
    except metadata.PackageNotFoundError as error:
        raise UserError(f"a package is missing: pip install {error.name}.") from None
    for name in ARRAYS:  # whose patch releases change no byte
        packages[name] = ".".join(packages[name].split(".")[:2])
    identity |= {"settings": settings, "packages": packages}
    # A trial is one unit, which counts the documents of each source.
    units = group_units(files, identity, math.inf if options.limit else small_unit)
    listing = hashlib.sha256()
    for file in files:
        listing.update(json.dumps(file[1:]).encode("utf-8"))
    size = sum(file.size for file in files)
    described = {"files": len(files), "bytes": size, "sha256": listing.hexdigest()}
    described["validation_sources"] = sorted(held_out)
    formats = Counter(file.format for file in files).most_common()
    listed = ", ".join(f"{number:,} {name}" for name, number in formats)
    shape = f"{count(len(files), 'file')} ({listed}), {size / 1e6:,.1f} MB"
    more = f"; {count(len(skipped), 'path')} skipped" if skipped else ""
    print_line(f"input: {shape} in {count(len(units), 'unit')}{more}")
    made_from = identity | {"input": described}
    return Job(units, skipped, tokenizer_files, evaluation, made_from)


def group_units(
    files: Sequence[SourceFile], identity: dict[str, Any], small: float, large: int = LARGE_UNIT
) -> list[Unit]:
    """Returns the units of the input, in its order; `identity` is all else that decides their bytes.

    A unit is a file, small files together (up to `small` bytes), or a share of `large` bytes of a file that can be cut.
    It depends on no other input, except that a small file moves the groups near it: a group also ends before a file
    whose name has a small hash, so groups of other input begin at the same files.
    """
    shares = list(chain.from_iterable(_shares(file, large) for file in files))
    alike = Counter(file[1:] for file in set(shares))
    prefix = json.dumps(identity, sort_keys=True)
    groups, weight = list[list[SourceFile]](), 0.0
    for file in shares:
        added = max(file.size or small, LEAST_WEIGHT)  # 0: not known
        begins = xxhash.xxh3_64_intdigest(file.name.encode()) < added / small * 2.0**64
        if not groups or begins or weight + added > small:
            groups.append([])
            weight = 0
        groups[-1].append(file)
        weight += added
    # Files of one name, size and date differ by their paths.
    named = ([file if alike[file[1:]] > 1 else file[1:] for file in group] for group in groups)
    texts = (json.dumps([prefix, files]) for files in named)
    keys = (hashlib.blake2b(text.encode("utf-8"), digest_size=12).hexdigest() for text in texts)
    return list(map(Unit, keys, groups))


def _shares(file: SourceFile, large: int) -> Iterator[SourceFile]:
    """Yields a file, or the shares of a large one that can be cut."""
    is_text = file.encoding == "utf-8" and not file.packed
    can_be_cut = FORMATS[file.format].can_cut and is_text
    if file.format == "text":  # only rows that are sentences
        can_be_cut &= file.layout == "sentences"
    if file.format == "mediawiki" and file.packed == "bz2":
        can_be_cut = "multistream" in file.name
    if not can_be_cut or file.size <= large:
        yield file
        return
    for start in range(0, file.size, large):
        stop = min(start + large, file.size)
        yield file._replace(start=start, stop=stop, size=stop - start)


def _is_finished(output: Path, made_from: dict[str, Any]) -> bool:
    """Returns whether the folder holds this corpus; raises an error if it holds something else."""
    if (output / MANIFEST).exists():
        both = Corpus(output).manifest["made_from"], made_from
        old, new = (made["settings"] | {"input": made["input"]} for made in both)
        if differing := [name for name, value in new.items() if old.get(name) != value]:
            raise UserError(
                f"{output}: holds a corpus of other settings or input ({', '.join(differing)}); set another --output."
            )
        return True
    names = sorted(path.name for path in output.iterdir() if path.name != LOCK)
    work = [path.name for path in output.glob("work/*")]
    is_ours = any(map(_OURS.fullmatch, work)) or (names == ["work"] and not work)
    if names and not is_ours:
        raise UserError(
            f"{output}: holds something else ({', '.join(names[:3])}); pass a new or empty --output."
        )
    return False


def _finish(output: Path, job: Job, merged: merge.Merged) -> None:
    """Writes frequencies, samples and tokenizer files and, last, the manifest."""
    skipped = Counter(entry.reason for entry in job.skipped)
    drops = merged.ledger.by_reason()
    if not merged.shards:
        reasons = skipped + Counter(drops)
        listed = ", ".join(f"{reason} {n}" for reason, n in sorted(reasons.items()))
        advice = remedies(reasons)
        raise UserError(
            f"no document of {job.made_from['settings']['min_sentences']} sentences in the input (left out: "
            f"{listed or 'nothing'})" + (f"; {advice}." if advice else ".")
        )
    size, held_out = len(merged.frequency), job.made_from["input"]["validation_sources"]
    named = set(chain.from_iterable(entry["sources"] for entry in merged.shards))
    if held_out and not (named & set(held_out) and named - set(held_out)):
        side = "training" if named & set(held_out) else "held-out"
        raise UserError(
            f"--validation_input: no {side} document is left: too short, or copies; --min_sentences and "
            "--without duplicate_documents keep more."
        )
    paths = [entry._asdict() for entry in sorted(job.skipped)]
    write_json(output / DROPPED, merged.ledger.to_json() | {"skipped": paths})
    with atomic_write(output / merge.FREQUENCY, "wb") as file:
        np.save(file, merged.frequency)
    for name, data in job.tokenizer_files.items():
        with atomic_write(output / name, "wb") as file:
            file.write(data)
    names = [merge.FREQUENCY, DROPPED, *job.tokenizer_files]
    if job.made_from["settings"]["keep_dropped"]:
        names.append(DROPPED_TEXT)
        with atomic_write(output / DROPPED_TEXT, "wb") as file:
            for path in merged.dropped:
                with path.open("rb") as part:
                    shutil.copyfileobj(part, file)
    for path in chain(*(output.glob(f".{name}.????????") for name in (*names, MANIFEST))):
        path.unlink()  # of a run that was killed
    sources: dict[str, Counter[str]] = defaultdict(Counter)
    for name, counts in chain(*(entry.pop("sources").items() for entry in merged.shards)):
        sources[name].update(counts)
    tokenizer = Tokenizer.from_file(str(output / "tokenizer.json"))
    files = chain.from_iterable(unit.files for unit in job.units)
    manifest = {
        "format_version": FORMAT_VERSION,
        **sum(sources.values(), Counter[str]()),
        "sources": dict(sorted(sources.items())),
        "passage_tokens": merge.PASSAGE,  # a document of the document frequencies has about as many
        "hub_datasets": {file.source: file.hub for file in files if file.hub},
        "dropped": drops,
        "skipped": dict(sorted(skipped.items())),
        "tokenizer": {
            "fingerprint": tokenizer_fingerprint(tokenizer.to_str()),
            "vocabulary_size": size,
            "dtype": "uint16" if size <= 1 << 16 else "uint32",
        },
        "made_from": job.made_from,
        "files": {name: merge.file_entry(output / name) for name in names},
        "shards": merged.shards,
    }
    write_json(output / MANIFEST, manifest)


def _remove_work(work: Path) -> None:
    """Removes what this program has written into the work folder, and the folder if it is empty then."""
    for path in work.iterdir() if work.is_dir() else ():
        if _OURS.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
    with suppress(OSError):  # over NFS, open files may keep it until the next start
        work.rmdir()
