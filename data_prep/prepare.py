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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.build import CleanText, EncodeText, ReadUnit, WritePart
from data_prep.clean import Drops, clean
from data_prep.encode import load_tokenizer_files
from data_prep.engine import Log, Stage, TasksFailed, check_no_jobs, run_stages
from data_prep.merge import UNITS_PER_TASK, FindDuplicates, WriteShards, gather
from data_prep.parts import COUNTED, rensa_version
from data_prep.plan import PLAN, WorkPlan
from data_prep.read import RawDocument, read_piece
from data_prep.sentences import LANGUAGES, splitter_name
from data_prep.settings import ExecutorOptions, InputSettings, PrepareSettings
from data_prep.sources import Skipped, find_files, printable
from data_prep.units import LARGEST_UNIT, cut_units, piece_hash, unit_bytes
from multicls.corpus import FORMAT, FORMAT_VERSION, MANIFEST, ShardRow, tokenizer_fingerprint, write_manifest
from multicls.errors import UserError
from multicls.files import LOCK, append_jsonl, atomic_write, locked, read_json, sha256_of, write_json
from multicls.words import counted, duration

DROPPED = "dropped.json"  # samples of what was dropped, by reason, and all input that was skipped
INPUTS = "inputs.json"  # the input files as they were; not part of the corpus
WORK = "work"
SAMPLED_UNITS = 3  # of the estimate, evenly spaced
SAMPLED_SECONDS = 2.0
SAMPLED_DOCUMENTS = 50  # of a unit, at most
SAMPLED_CHARACTERS = 50_000  # of a document, and of a unit
MARGIN = 1.1  # the free disk must hold the estimate times this
BYTES_PER_PROCESS = 4_000_000  # of input; for less, starting a process takes longer than the work
BAD = ("damaged:", "unreadable:")  # reasons to skip a file that are errors with `bad_records = stop`
MOST_PROBLEMS = 20  # that are printed
PACKAGES = ("mwparserfromhell", "numpy", "pyarrow", "sentencex", "tokenizers", "xxhash")


def prepare(
    settings: PrepareSettings, output: str | Path, executor: ExecutorOptions | None = None, log: Log = print
) -> Path:
    """Prepares the corpus folder `output` and returns it; a run that was stopped goes on.

    The bytes depend on the input, the settings and the package versions, never on the executor or on interruptions.

    Args:
        settings: What decides the corpus.
        output: The folder.
        executor: Where the work is done; default: in this process.
        log: Called with each line of progress.

    Raises:
        UserError: The input or the tokenizer is bad, the folder holds something else or another run writes it, or the
            disk has too little room.
    """
    output = Path(output)
    executor = executor or ExecutorOptions(workers=1)
    plan, skipped, tokenizer_files = _plan(settings, output, log)
    started = time.monotonic()
    with locked(output), _named_disk_errors(output):
        if (output / MANIFEST).exists():
            shutil.rmtree(plan.folder, ignore_errors=True)  # if the run was killed right after it wrote the manifest
            _check_finished(output, plan)
            log(f"already finished: {output}")
            return output
        _check_unfinished(output, plan)
        if executor.executor != "slurm" or _stale(plan):
            check_no_jobs(plan.folder)
        executor = _fitting(executor, plan)
        if not plan.folder.exists():
            _log_estimate(plan, output, executor, log)
        try:
            _save(plan, tokenizer_files, output)
            run_stages(_stages(plan), plan.folder, executor, log)
            _finish(output, plan, skipped, sorted(tokenizer_files), log)
        except UserError as error:
            kept = isinstance(error, TasksFailed) or any((plan.folder / "parts").glob("*/rows-0.arrow"))
            if not kept:  # nothing to go on from
                _clear(output, [*tokenizer_files, WORK])
            raise
        seconds = time.monotonic() - started
        given = settings.model_dump() | {"input": [printable(what) for what in settings.input]}
        where = executor.model_dump(include=set(ExecutorOptions.model_fields))
        append_jsonl(output / "log.jsonl", {"seconds": round(seconds, 2)} | where | given)
    log(f"done in {duration(seconds)}: {output}")
    return output


def print_plan(settings: PrepareSettings, output: str | Path, executor: ExecutorOptions, log: Log) -> None:
    """Logs what preparing the corpus would take; writes nothing. Raises the errors that a look at the input tells."""
    plan, _, _ = _plan(settings, Path(output), log)
    _log_estimate(plan, Path(output), _fitting(executor, plan), log)


def tell_language(language: str, log: Log) -> None:
    """Logs that the sentence splitter has no rules of its own for a language, unless it has."""
    if language not in LANGUAGES.split():
        log(
            f"language {language}: the sentence splitter has no rules of its own for it and takes those of a related "
            "language or, if it knows none, of English"
        )


def sentences_of(settings: InputSettings, megabytes: float) -> Iterator[str]:
    """Yields cleaned sentences of at most `megabytes` of text; of more, from the beginning of each work unit."""
    files = find_files(settings.input, settings.format, settings.include, settings.exclude).files
    units = cut_units(files)
    drops = Drops()
    sizes = [unit_bytes(files, unit) or LARGEST_UNIT for unit in units]
    for unit, size in zip(units, sizes, strict=True):
        left = megabytes * 1e6 * size / sum(sizes)
        for piece in unit:
            for raw in read_piece(files[piece.file], piece, settings):
                if left < 0:
                    break
                left -= len(raw.text)
                if not raw.dropped:
                    for line in clean(raw, settings.rules, settings.language, drops):
                        yield from line


def _plan(settings: PrepareSettings, output: Path, log: Log) -> tuple[WorkPlan, list[Skipped], dict[str, bytes]]:
    """Returns the plan of a corpus, the paths that are not read, and the files of its tokenizer."""
    files, skipped = find_files(settings.input, settings.format, settings.include, settings.exclude)
    own = os.path.join(os.path.abspath(output), "")  # which may lie in the input

    def is_other(path: str) -> bool:
        return "://" in path or not os.path.abspath(path).startswith(own)

    files = [file for file in files if is_other(file.path)]
    skipped = [entry for entry in skipped if is_other(entry.path)]
    if not files:
        raise UserError(f"{output}: is no corpus, and all of the input lies in it; give a new or empty --output.")
    if settings.bad_records == "stop" and (bad := [entry for entry in skipped if entry.reason.startswith(BAD)]):
        raise UserError(*(f"{path}: {reason}." for path, reason in bad[:MOST_PROBLEMS]))
    for path, reason in skipped[:MOST_PROBLEMS]:
        log(f"skipped: {path}: {reason}")
    if len(skipped) > MOST_PROBLEMS:
        log(f"skipped: {len(skipped) - MOST_PROBLEMS} more; {DROPPED} will list them")
    tell_language(settings.language, log)
    tokenizer_files = load_tokenizer_files(settings.tokenizer)
    tokenizer_json = tokenizer_files["tokenizer.json"].decode("utf-8")
    identity, units = _identity(settings, tokenizer_json), cut_units(files)
    files = [  # tasks may run in another working directory
        file if file.hub or "://" in file.path else replace(file, path=os.path.abspath(file.path)) for file in files
    ]
    plan = WorkPlan((output / WORK).absolute(), identity, settings, tokenizer_json, files, units)
    return plan, skipped, tokenizer_files


def _identity(settings: PrepareSettings, tokenizer_json: str) -> dict[str, Any]:
    """Returns everything but the text that decides the bytes of a corpus."""
    from tokenizers import Tokenizer

    return {
        "format_version": FORMAT_VERSION,
        "tokenizer_fingerprint": tokenizer_fingerprint(Tokenizer.from_str(tokenizer_json)),
        "splitter": splitter_name(settings.language),
        "rules": sorted(settings.rules),
        "min_sentences": settings.min_sentences,
        "near_duplicates": {"rensa": rensa_version()} if settings.near_duplicates else None,
        "documents": settings.documents,
        "text_field": settings.text_field,
        "packages": {name: metadata.version(name) for name in PACKAGES},
    }


def _check_finished(output: Path, plan: WorkPlan) -> None:
    """Raises an error that names what differs if a finished corpus has other settings or input; packages may differ."""
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
    """Raises an error unless the folder is new or holds what a stopped run of the same settings left."""
    if (plan.folder / PLAN).exists():
        before, wanted = WorkPlan.load(plan.folder).identity, json.loads(json.dumps(plan.identity))
        if differing := [key for key in wanted if before.get(key) != wanted[key]]:
            raise UserError(
                f"{output}: holds an unfinished corpus of other settings ({', '.join(differing)}); remove it or give "
                "another --output."
            )
    elif any(path.name not in (LOCK, WORK) for path in output.iterdir()):
        raise UserError(f"{output}: exists and is no corpus; give an --output that is new or empty.")


def _stale(plan: WorkPlan) -> list[str]:
    """Returns what cannot be used of a stopped run with other input or less strict records, as names in its folder."""
    if not (plan.folder / PLAN).exists():
        return []
    before = WorkPlan.load(plan.folder)
    stricter = [before.settings.bad_records, plan.settings.bad_records] == ["drop", "stop"]
    if before.unit_keys == plan.unit_keys and not stricter:
        return []
    parts = ["parts"] if stricter else []  # they may lack bad records
    return ["logs", "duplicates", "shards", "slurm.json", *parts]


def _save(plan: WorkPlan, tokenizer_files: dict[str, bytes], output: Path) -> None:
    """Writes the plan. If the input differs from that of a stopped run, only the parts of equal units are kept."""
    if stale := _stale(plan):
        _clear(plan.folder, stale)
        _clear(output, [path.name for path in output.glob("shard-*.arrow")])
    plan.save()
    _clear(output, sorted({"tokenizer_config.json"} - tokenizer_files.keys()))
    for unit in range(len(plan.units)):
        if not plan.part(unit).exists():  # then its task is not whole, whatever its log says
            (plan.folder / "logs" / "build" / "completions" / f"{unit:05d}").unlink(missing_ok=True)
    for name, data in tokenizer_files.items():
        with atomic_write(output / name, "wb") as file:
            file.write(data)


def _stages(plan: WorkPlan) -> list[Stage]:
    work, sizes = str(plan.folder), [size + 1 for size in plan.unit_bytes]
    return [
        Stage("build", [step(work) for step in (ReadUnit, CleanText, EncodeText, WritePart)], sizes),
        Stage("duplicates", [FindDuplicates(work)], [1] * plan.buckets),
        Stage("shards", [WriteShards(work)], [1] * -(-len(plan.units) // UNITS_PER_TASK)),
    ]


def _fitting(executor: ExecutorOptions, plan: WorkPlan) -> ExecutorOptions:
    """Returns the options with as many local workers as the amount of work needs, or fewer."""
    if executor.executor != "local":
        return executor
    most = 1 + sum(plan.unit_bytes) // BYTES_PER_PROCESS if all(plan.unit_bytes) else len(plan.units)
    return executor.model_copy(update={"workers": max(1, min(executor.workers, most, len(plan.units)))})


def _log_estimate(plan: WorkPlan, output: Path, executor: ExecutorOptions, log: Log) -> None:
    """Logs the amount of work and how long it will take; raises an error if the disk has too little room."""
    with tempfile.TemporaryDirectory() as folder:
        tokens, disk, seconds = _estimate(replace(plan, folder=Path(folder)))
    existing = next(parent for parent in (output, *output.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < disk * MARGIN:
        raise UserError(
            f"--output {output}: the corpus needs about {disk / 1e9:.2f} GB, {free / 1e9:.2f} GB are free there; "
            "free some or choose another --output."
        )
    if not (size := sum(plan.unit_bytes)):
        log(f"plan: {counted(len(plan.files), 'data set')} of unknown size; {free / 1e9:,.1f} GB free on the disk")
        return
    log(
        f"plan: {counted(len(plan.files), 'file')}, {size / 1e6:,.1f} MB of text in "
        f"{counted(len(plan.units), 'work unit')} -> about {tokens / 1e6:,.1f} M tokens, {disk / 1e6:,.1f} MB on disk "
        f"({free / 1e9:,.1f} GB free), {duration(seconds / executor.workers + 1)} with "
        f"{counted(executor.workers, 'worker')}"
    )


def _estimate(plan: WorkPlan) -> tuple[float, float, float]:
    """Returns the tokens, bytes on disk and seconds of one CPU, from the beginnings of some units; writes the plan."""
    plan.save()
    work = str(plan.folder)

    def prepared(sample: list[RawDocument]) -> list[ShardRow]:
        chunks = EncodeText(work).run(CleanText(work).run([sample]))
        return [row for documents, _ in chunks for document in documents for row in document.rows]

    prepared([RawDocument("", "", "", "Loads the tokenizer, the splitter and their data.", "blocks")])  # is not timed
    size, spent = 0, 0.0
    rows: list[ShardRow] = []
    for unit in plan.units[:: max(1, len(plan.units) // SAMPLED_UNITS)][:SAMPLED_UNITS]:
        if spent > SAMPLED_SECONDS:
            break
        sample, left = list[RawDocument](), SAMPLED_CHARACTERS
        documents = chain.from_iterable(read_piece(plan.files[piece.file], piece, plan.settings) for piece in unit)
        for document in islice(documents, SAMPLED_DOCUMENTS):
            sample.append(document._replace(text=document.text[:SAMPLED_CHARACTERS]))
            left -= len(sample[-1].text.encode("utf-8", "replace"))
            if left < 0:
                break
        size += SAMPLED_CHARACTERS - left
        prepared(sample)  # not timed: in a long run, most words are known
        started = time.process_time()
        rows += prepared(sample)
        spent += time.process_time() - started
    factor = sum(plan.unit_bytes) / max(size, 1)
    tokens, sentences = sum(len(row.tokens) for row in rows), sum(len(row.offsets) for row in rows)
    return tokens * factor, (tokens * 4 + sentences * 4 + len(rows) * 120) * factor, spent * factor


def _finish(output: Path, plan: WorkPlan, not_read: list[Skipped], copied: list[str], log: Log) -> None:
    """Writes document frequencies, samples of what was dropped and, last, the manifest; removes the work folder."""
    shards, sources, drops, frequency, hashes = gather(plan)
    skipped = Counter(reason for _, reason in not_read)
    if not shards:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted({**drops.counts, **skipped}.items()))
        raise UserError(f"no document of enough sentences in the input (dropped: {reasons or 'none'}).")
    for line in (warnings := drops.warnings())[:MOST_PROBLEMS]:
        log(f"warning: {line}")
    _clear(output, [path.name for path in output.glob(".*") if path.name != LOCK])  # temporary files of killed tasks
    with atomic_write(output / "document_frequency.npy", "wb") as file:
        np.save(file, frequency)
    samples: dict[str, Any] = {name: [s._asdict() for _, s in kept] for name, kept in sorted(drops.samples.items())}
    write_json(output / DROPPED, samples | {"skipped": sorted(not_read)})
    write_json(output / INPUTS, {"versions": [file.version for file in plan.files], "hashes": hashes})
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
            "command": _command(plan.settings, list(sources)),
            "made_from": plan.identity | _described(plan),
            "files": {
                name: {"bytes": (output / name).stat().st_size, "sha256": sha256_of(output / name)}
                for name in ("document_frequency.npy", DROPPED, *copied)
            },
            "shards": shards,
        },
    )
    shutil.rmtree(plan.folder, ignore_errors=True)  # over NFS, open files may keep it until the next start


def _clear(folder: Path, names: list[str]) -> None:
    for name in names:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _command(settings: PrepareSettings, sources: list[str]) -> str:
    """Returns the command that prepares the corpus, without paths."""
    words = ["data_prep/run.py", "--input", *sources, "--tokenizer", Path(settings.tokenizer).name]
    for name, value in settings.model_dump(exclude_defaults=True, exclude={"input", "tokenizer"}).items():
        words += [f"--{name}", *(value if isinstance(value, tuple) else [] if value is True else [str(value)])]
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
