"""Prepares a corpus: lists the input, plans work units, runs the stages build, duplicates and shards, and finishes.

DIR/work/              removed when the corpus is finished
  plan.json            settings, files and units; every task reads it
  parts/KEY/           the part of each unit; the key changes with the unit's input and the settings
  duplicates/, shards/ results of the two stages of the merge
  logs/STAGE/          completions, logs and statistics of the tasks
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.build import build_stage
from data_prep.clean import RULES, Drops, clean
from data_prep.encode import load_tokenizer_files
from data_prep.engine import ExecutorOptions, Stage, TasksFailed, check_no_jobs, run_stages
from data_prep.merge import UNITS_PER_TASK, FindDuplicates, WriteShards, gather
from data_prep.parts import COUNTED, rensa_version
from data_prep.plan import PLAN, WorkPlan, WorkSettings, estimate, free_disk
from data_prep.read import ReadOptions, read_piece
from data_prep.sentences import splitter_name
from data_prep.settings import InputSettings, PrepareSettings
from data_prep.sources import Listing, find_files, printable
from data_prep.units import LARGEST_UNIT, cut_units, piece_hash, unit_bytes
from multicls.corpus import FORMAT, FORMAT_VERSION, MANIFEST, tokenizer_fingerprint, write_manifest
from multicls.errors import UserError
from multicls.files import LOCK, append_jsonl, atomic_write, locked, read_json, sha256_of, write_json
from multicls.words import duration

DROPPED = "dropped.json"  # samples of what was dropped, by reason, and all input that was skipped
INPUTS = "inputs.json"  # the input files as they were; not part of the corpus
WORK = "work"
BYTES_PER_PROCESS = 4_000_000  # of input; for less, starting a process takes longer than the work
BAD = ("damaged:", "unreadable:")  # reasons to skip a file that are errors with `bad_records = stop`
MOST_PROBLEMS = 20  # that are printed
PACKAGES = ("mwparserfromhell", "numpy", "pyarrow", "sentencex", "tokenizers", "xxhash")


def read_options(settings: InputSettings) -> ReadOptions:
    """Returns the options that divide files into documents."""
    return ReadOptions(settings.documents, settings.text_field, settings.bad_records)


def rules_of(settings: InputSettings) -> frozenset[str]:
    """Returns the names of the cleaning rules in force."""
    return frozenset(RULES) - frozenset(settings.without)


def prepare(
    settings: PrepareSettings,
    output: str | Path,
    executor: ExecutorOptions | None = None,
    log: Callable[[str], object] = print,
) -> Path:
    """Prepares a corpus folder; a run that was stopped goes on.

    The bytes depend on the input, the settings and the package versions, never on the executor or on interruptions.

    Args:
        settings: The settings.
        output: The folder.
        executor: Where the work is done; default: in this process.
        log: Called with each line of progress.

    Returns:
        The folder.

    Raises:
        UserError: The input or the tokenizer is bad, the folder holds something else or another run writes it, or the
            disk has too little room.
    """
    output = Path(output)
    executor = executor or ExecutorOptions()
    listing = _listing(settings, output, log)
    tokenizer_files = load_tokenizer_files(settings.tokenizer)
    plan = _plan(settings, listing, tokenizer_files, output / WORK)
    started = time.monotonic()
    with locked(output), _named_disk_errors(output):
        if (output / MANIFEST).exists():
            shutil.rmtree(plan.folder, ignore_errors=True)  # if the run was killed right after it wrote the manifest
            _check_finished(output, plan)
            log(f"already finished: {output}")
            return output
        _check_unfinished(output, plan)
        if executor.kind != "slurm" or _outdated(plan):
            check_no_jobs(plan.folder)
        executor = _fitting(executor, plan)
        if not plan.folder.exists():
            _log_estimate(plan, output, executor, log)
        try:
            _save(plan, tokenizer_files, output)
            run_stages(_stages(plan, output), plan.folder, executor, log)
            _finish(output, plan, settings, listing, sorted(tokenizer_files), log)
        except TasksFailed:
            raise
        except UserError:
            if not any((plan.folder / "parts").glob("*/rows-0.arrow")):  # nothing to go on from
                _clear(output, [*tokenizer_files, WORK])
            raise
        seconds = time.monotonic() - started
        given = settings.model_dump() | {"input": [printable(what) for what in settings.input]}
        append_jsonl(output / "log.jsonl", {"seconds": round(seconds, 2)} | asdict(executor) | given)
    log(f"done in {duration(seconds)}: {output}")
    return output


def print_plan(
    settings: PrepareSettings, output: str | Path, executor: ExecutorOptions, log: Callable[[str], object] = print
) -> None:
    """Logs what preparing the corpus would take; writes nothing.

    Raises:
        UserError: As `prepare`, as far as a look at the input tells.
    """
    listing = _listing(settings, Path(output), log)
    plan = _plan(settings, listing, load_tokenizer_files(settings.tokenizer), Path(output) / WORK)
    _log_estimate(plan, Path(output), _fitting(executor, plan), log)


def sentences_of(settings: InputSettings, megabytes: float) -> Iterator[str]:
    """Yields cleaned sentences of at most `megabytes` of text; of a larger input, from the beginning of each work unit.

    Raises:
        UserError: The input is bad.
    """
    files = find_files(settings.input, settings.format, settings.include, settings.exclude).files
    units = cut_units(files)
    drops = Drops()
    sizes = [unit_bytes(files, unit) or LARGEST_UNIT for unit in units]
    for unit, size in zip(units, sizes, strict=True):
        left = megabytes * 1e6 * size / sum(sizes)
        for piece in unit:
            for raw in read_piece(files[piece.file], piece, read_options(settings)):
                if left < 0:
                    break
                left -= len(raw.text)
                if not raw.dropped:
                    for line in clean(raw, rules_of(settings), settings.language, drops):
                        yield from line


def _listing(settings: PrepareSettings, output: Path, log: Callable[[str], object]) -> Listing:
    """Lists the input, without the output folder if that lies in the input, and tells what is skipped.

    Raises:
        UserError: Nothing can be read, or with `bad_records = stop` something cannot.
    """
    listing = find_files(settings.input, settings.format, settings.include, settings.exclude)
    own = os.path.join(os.path.abspath(output), "")
    listing = Listing(
        [file for file in listing.files if not _is_below(file.path, own)],
        [entry for entry in listing.skipped if not _is_below(entry.path, own)],
    )
    if not listing.files:
        raise UserError(f"{output}: is no corpus, and all of the input lies in it; give a new or empty --output.")
    if settings.bad_records == "stop" and (bad := [entry for entry in listing.skipped if entry.reason.startswith(BAD)]):
        raise UserError(*(f"{path}: {reason}." for path, reason in bad[:MOST_PROBLEMS]))
    for path, reason in listing.skipped[:MOST_PROBLEMS]:
        log(f"skipped: {path}: {reason}")
    if len(listing.skipped) > MOST_PROBLEMS:
        log(f"skipped: {len(listing.skipped) - MOST_PROBLEMS} more; {DROPPED} will list them")
    return listing


def _is_below(path: str, folder: str) -> bool:
    return "://" not in path and os.path.abspath(path).startswith(folder)


def _plan(settings: PrepareSettings, listing: Listing, tokenizer_files: dict[str, bytes], folder: Path) -> WorkPlan:
    work = WorkSettings(
        rules=rules_of(settings),
        language=settings.language,
        min_sentences=settings.min_sentences,
        near_duplicates=settings.near_duplicates,
        read_options=read_options(settings),
    )
    tokenizer_json = tokenizer_files["tokenizer.json"].decode("utf-8")
    units = cut_units(listing.files)
    files = [  # tasks may run in another working directory
        file if file.hub or "://" in file.path else replace(file, path=os.path.abspath(file.path))
        for file in listing.files
    ]
    return WorkPlan(folder.absolute(), _identity(settings, tokenizer_json), work, tokenizer_json, files, units)


def _identity(settings: PrepareSettings, tokenizer_json: str) -> dict[str, Any]:
    """Returns everything but the text that decides the bytes of a corpus."""
    from tokenizers import Tokenizer

    return {
        "format_version": FORMAT_VERSION,
        "tokenizer_fingerprint": tokenizer_fingerprint(Tokenizer.from_str(tokenizer_json)),
        "splitter": splitter_name(settings.language),
        "rules": sorted(rules_of(settings)),
        "min_sentences": settings.min_sentences,
        "near_duplicates": {"rensa": rensa_version()} if settings.near_duplicates else None,
        "documents": settings.documents,
        "text_field": settings.text_field,
        "packages": {name: metadata.version(name) for name in PACKAGES},
    }


def _check_finished(output: Path, plan: WorkPlan) -> None:
    """Compares a finished corpus with the settings and the input; newer packages do not make it another.

    Raises:
        UserError: Something differs; the message names it.
    """
    made_from = read_json(output / MANIFEST).get("made_from", {})
    packages = ("packages", "splitter")
    wanted = plan.identity | _described(plan)
    differing = [key for key, value in wanted.items() if key not in packages and made_from.get(key) != value]
    if made_from.get("near_duplicates") and plan.settings.near_duplicates:
        differing = [key for key in differing if key != "near_duplicates"]  # they may differ in rensa's version
    if made_from.get("splitter", {}).get("language") != plan.identity["splitter"]["language"]:
        differing.append("language")
    if differing:
        raise UserError(
            f"{output}: holds a corpus made from other input or settings ({', '.join(differing)}); "
            "give another --output."
        )
    known = read_json(output / INPUTS) if (output / INPUTS).exists() else {}
    for piece, before in zip((piece for unit in plan.units for piece in unit), known.get("hashes", []), strict=False):
        file = plan.files[piece.file]
        same = known["versions"][piece.file] == file.version or file.hub  # a commit on the Hub may change other files
        if not same and not (before and piece_hash(file, piece) == before):
            raise UserError(
                f"{file}: has changed since {output} was prepared. Give another --output, or remove {output}."
            )


def _described(plan: WorkPlan) -> dict[str, Any]:
    """Returns the manifest's description of the input, without paths: the same text gives the same manifest."""
    listing = [[file.source, file.name, file.format, file.size] for file in plan.files]
    return {
        "sources": list(dict.fromkeys(file.source for file in plan.files)),
        "files": len(plan.files),
        "bytes": sum(file.size for file in plan.files),
        "listing_sha256": hashlib.sha256(json.dumps(listing).encode("utf-8")).hexdigest(),
    }


def _check_unfinished(output: Path, plan: WorkPlan) -> None:
    """Makes sure that the folder is new or holds what a stopped run of the same settings left.

    Raises:
        UserError: It holds something else.
    """
    if (plan.folder / PLAN).exists():
        before, wanted = read_json(plan.folder / PLAN)["identity"], json.loads(json.dumps(plan.identity))
        if differing := [key for key in wanted if before.get(key) != wanted[key]]:
            raise UserError(
                f"{output}: holds an unfinished corpus of other settings ({', '.join(differing)}); remove it or give "
                "another --output."
            )
    elif any(path.name not in (LOCK, WORK) for path in output.iterdir()):
        raise UserError(f"{output}: exists and is no corpus; give an --output that is new or empty.")


def _outdated(plan: WorkPlan) -> bool:
    """Returns True if the folder holds the plan of a stopped run with other input or stricter records."""
    if not (plan.folder / PLAN).exists():
        return False
    before = WorkPlan.load(plan.folder)
    return before.unit_keys != plan.unit_keys or _is_stricter(plan, before)


def _is_stricter(plan: WorkPlan, before: WorkPlan) -> bool:
    modes = [each.settings.read_options.bad_records for each in (before, plan)]
    return modes == ["drop", "stop"]


def _save(plan: WorkPlan, tokenizer_files: dict[str, bytes], output: Path) -> None:
    """Writes the plan. If the input differs from that of a stopped run, only the parts of equal units are kept."""
    if _outdated(plan):
        parts = ["parts"] if _is_stricter(plan, WorkPlan.load(plan.folder)) else []  # they may lack bad records
        _clear(plan.folder, ["logs", "duplicates", "shards", "slurm.json", *parts])
        for shard in output.glob("shard-*.arrow"):
            shard.unlink()
    plan.save()
    _clear(output, sorted({"tokenizer_config.json"} - tokenizer_files.keys()))
    for unit in range(len(plan.units)):
        if not plan.part(unit).exists():  # then its task is not whole, whatever its log says
            (plan.folder / "logs" / "build" / "completions" / f"{unit:05d}").unlink(missing_ok=True)
    for name, data in tokenizer_files.items():
        with atomic_write(output / name, "wb") as file:
            file.write(data)


def _stages(plan: WorkPlan, output: Path) -> list[Stage]:
    work = str(plan.folder)
    return [
        Stage("build", build_stage(plan.folder), [size + 1 for size in plan.unit_bytes]),
        Stage("duplicates", [FindDuplicates(work)], [1] * plan.buckets),
        Stage("shards", [WriteShards(work, str(output.absolute()))], [1] * -(-len(plan.units) // UNITS_PER_TASK)),
    ]


def _fitting(executor: ExecutorOptions, plan: WorkPlan) -> ExecutorOptions:
    """Returns the options with as many local workers as the amount of work needs, or fewer."""
    most = 1 + sum(plan.unit_bytes) // BYTES_PER_PROCESS if all(plan.unit_bytes) else len(plan.units)
    if executor.kind != "local":
        return executor
    return replace(executor, workers=max(1, min(executor.workers, most, len(plan.units))))


def _log_estimate(plan: WorkPlan, output: Path, executor: ExecutorOptions, log: Callable[[str], object]) -> None:
    """Logs the amount of work and how long it will take.

    Raises:
        UserError: The disk has too little room.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = estimate(replace(plan, folder=Path(folder)))
    free = free_disk(output, found.disk_bytes)
    if not found.text_bytes:
        log(f"plan: {len(plan.files)} data sets of unknown size; {free / 1e9:,.1f} GB free on the disk")
        return
    log(
        f"plan: {len(plan.files)} files, {found.text_bytes / 1e6:,.1f} MB of text in {len(plan.units)} work units -> "
        f"about {found.tokens / 1e6:,.1f} M tokens, {found.disk_bytes / 1e6:,.1f} MB on disk "
        f"({free / 1e9:,.1f} GB free), {duration(found.seconds / executor.workers + 1)} with {executor.workers} "
        f"worker{'s' if executor.workers > 1 else ''}"
    )


def _finish(
    output: Path,
    plan: WorkPlan,
    settings: PrepareSettings,
    listing: Listing,
    copied: list[str],
    log: Callable[[str], object],
) -> None:
    """Writes document frequencies, samples of what was dropped and, last, the manifest; removes the work folder.

    Raises:
        UserError: Nothing of the input can be kept.
    """
    shards, sources, drops, frequency, hashes = gather(plan)
    skipped = Counter(reason for _, reason in listing.skipped)
    if not shards:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted({**drops.counts, **skipped}.items()))
        raise UserError(f"no document of enough sentences in the input (dropped: {reasons or 'none'}).")
    for line in (warnings := drops.warnings())[:MOST_PROBLEMS]:
        log(f"warning: {line}")
    _clear(output, [path.name for path in output.glob(".*") if path.name != LOCK])  # temporary files of killed tasks
    with atomic_write(output / "document_frequency.npy", "wb") as file:
        np.save(file, frequency)
    samples: dict[str, Any] = {
        reason: [dropped._asdict() for _, dropped in kept] for reason, kept in sorted(drops.samples.items())
    }
    write_json(output / DROPPED, samples | {"skipped": [list(entry) for entry in sorted(listing.skipped)]})
    versions = [file.version for file in plan.files]
    write_json(output / INPUTS, {"versions": versions, "hashes": [entry for unit in hashes for entry in unit]})
    write_manifest(
        output,
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            **{key: sum(shard[key] for shard in shards) for key in COUNTED},
            "sources": sources,
            "hub_datasets": {file.source: file.hub.dataset for file in plan.files if file.hub},
            "dropped": dict(sorted(drops.counts.items())),
            "skipped": dict(sorted(skipped.items())),
            "warnings": warnings,
            "tokenizer": {
                "fingerprint": plan.identity["tokenizer_fingerprint"],
                "vocabulary_size": len(frequency),
                "dtype": "uint16" if len(frequency) <= 1 << 16 else "uint32",
            },
            "command": _command(settings, list(sources)),
            "made_from": plan.identity | _described(plan),
            "files": {name: _checksum(output / name) for name in ("document_frequency.npy", DROPPED, *copied)},
            "shards": shards,
        },
    )
    shutil.rmtree(plan.folder, ignore_errors=True)  # over NFS, open files may keep it until the next start


def _clear(folder: Path, names: list[str]) -> None:
    for name in names:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _checksum(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _command(settings: PrepareSettings, sources: list[str]) -> str:
    """Returns the command that prepares the corpus, without paths."""
    words = ["data_prep/run.py", "--input", *sources, "--tokenizer", Path(settings.tokenizer).name]
    for name in ("format", "documents", "text_field", "bad_records", "language", "min_sentences"):
        if getattr(settings, name) != PrepareSettings.model_fields[name].default:
            words += [f"--{name}", str(getattr(settings, name))]
    for name in ("include", "exclude", "without"):
        words += [f"--{name}", *getattr(settings, name)] if getattr(settings, name) else []
    words += ["--near_duplicates"] if settings.near_duplicates else []
    return shlex.join(words)


@contextmanager
def _named_disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"--output {folder}: the disk is full; what is written is safe: free some room and give the same command "
            "again."
        ) from None
