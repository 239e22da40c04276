"""The plan of a corpus: its settings, its input files and their division into work units. Every task reads it."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from data_prep.read import ReadOptions
from data_prep.settings import MIN_SENTENCES
from data_prep.sources import Hub, SourceFile
from data_prep.units import Piece, unit_bytes
from multicls.corpus import ShardRow
from multicls.errors import UserError
from multicls.files import atomic_write, read_json

PLAN = "plan.json"
BUCKET_BYTES = 2_000_000_000  # of input; the merge compares the hashes of about this much at a time
SAMPLED_UNITS = 3  # of the estimate, evenly spaced
SAMPLED_SECONDS = 2.0
SAMPLED_DOCUMENTS = 50  # of a unit, at most
SAMPLED_CHARACTERS = 50_000  # of a document, and of a unit
MARGIN = 1.1  # the free disk must hold the estimate times this


@dataclass(frozen=True)
class WorkSettings:
    """Settings that decide how a document becomes tokens.

    Attributes:
        rules: Names of the cleaning rules in force.
        language: Language of the sentence splitter, as ISO 639 code.
        min_sentences: A document with fewer sentences is dropped.
        near_duplicates: Whether documents nearly equal to an earlier one are dropped.
        read_options: How files are divided into documents.
    """

    rules: frozenset[str]
    language: str = "en"
    min_sentences: int = MIN_SENTENCES
    near_duplicates: bool = False
    read_options: ReadOptions = field(default_factory=ReadOptions)


@dataclass(frozen=True)
class WorkPlan:
    """The plan that all tasks of a corpus share; its file is `plan.json` in the work folder.

    Attributes:
        folder: The work folder.
        identity: Everything but the text that decides the bytes of the corpus.
        settings: How documents become tokens.
        tokenizer_json: Text of the tokenizer.json.
        files: The input.
        units: The pieces of files of each work unit.
    """

    folder: Path
    identity: dict[str, Any]
    settings: WorkSettings
    tokenizer_json: str
    files: list[SourceFile]
    units: list[list[Piece]]

    @property
    def buckets(self) -> int:
        """Number of tasks that share the hashes in the merge; only the input decides it."""
        return 1 + sum(self.unit_bytes) // BUCKET_BYTES

    @cached_property
    def unit_bytes(self) -> list[int]:
        """Bytes of text that each unit is taken to hold; 0 if the size of its input is not known."""
        return [unit_bytes(self.files, unit) for unit in self.units]

    @cached_property
    def unit_keys(self) -> list[str]:
        """A name for each unit that changes with its input, the settings and the tokenizer, added tokens included."""
        tokenizer = hashlib.sha256(self.tokenizer_json.encode("utf-8")).hexdigest()
        identity = json.dumps([self.identity, tokenizer], sort_keys=True)
        return [
            hashlib.blake2b(json.dumps([identity, self._described(unit)]).encode("utf-8"), digest_size=12).hexdigest()
            for unit in self.units
        ]

    def _described(self, unit: list[Piece]) -> list[Any]:
        files = [self.files[piece.file] for piece in unit]
        return [
            [file.source, file.name, file.format, file.size, file.version, piece.start, piece.stop]
            for file, piece in zip(files, unit, strict=True)
        ]

    def part(self, unit: int) -> Path:
        """Returns the folder of a unit's part."""
        return self.folder / "parts" / self.unit_keys[unit]

    def save(self) -> None:
        """Writes the plan for the tasks."""
        settings = asdict(self.settings) | {"rules": sorted(self.settings.rules)}
        record = {
            "identity": self.identity,
            "settings": settings,
            "tokenizer_json": self.tokenizer_json,
            "files": [asdict(file) for file in self.files],
            "units": self.units,
        }
        with atomic_write(self.folder / PLAN) as plan:
            json.dump(record, plan)  # as ASCII, because a path may have bytes that are not UTF-8

    @classmethod
    def load(cls, folder: str | Path) -> WorkPlan:
        """Reads the plan of a work folder; a process reads it once."""
        return _load(str(folder), (Path(folder) / PLAN).stat().st_mtime_ns)


@lru_cache(2)
def _load(folder: str, _changed: int) -> WorkPlan:
    record = read_json(Path(folder) / PLAN)
    settings = record["settings"]
    settings |= {"rules": frozenset(settings["rules"]), "read_options": ReadOptions(**settings["read_options"])}
    files = [SourceFile(**file | {"hub": Hub(*file["hub"]) if file["hub"] else None}) for file in record["files"]]
    units = [[Piece(*piece) for piece in unit] for unit in record["units"]]
    return WorkPlan(Path(folder), record["identity"], WorkSettings(**settings), record["tokenizer_json"], files, units)


@dataclass(frozen=True)
class Estimate:
    """An estimate of what preparing a corpus takes.

    Attributes:
        text_bytes: Bytes of text of the input.
        tokens: Number of tokens that the corpus will hold.
        disk_bytes: Bytes that it will take on disk.
        seconds: CPU seconds of one process.
    """

    text_bytes: int
    tokens: float
    disk_bytes: float
    seconds: float


def estimate(plan: WorkPlan) -> Estimate:
    """Prepares the beginnings of some units and extrapolates by their bytes; writes the plan, which the steps read."""
    from data_prep.build import CleanText, EncodeText
    from data_prep.read import RawDocument, read_piece

    plan.save()
    work = str(plan.folder)

    def prepared(sample: list[RawDocument]) -> list[ShardRow]:
        chunks = EncodeText(work).run(CleanText(work).run([sample]))
        return [row for documents, _ in chunks for document in documents for row in document.rows]

    prepared([RawDocument("", "", "", "Loads the tokenizer, the splitter and their data.", "blocks")])  # is not timed
    total = sum(plan.unit_bytes)
    read = tokens = sentences = rows = 0
    spent = 0.0
    step = max(1, len(plan.units) // SAMPLED_UNITS)
    for unit in plan.units[::step][:SAMPLED_UNITS]:
        if spent > SAMPLED_SECONDS:
            break
        sample, size = [], 0
        options = plan.settings.read_options
        documents = chain.from_iterable(read_piece(plan.files[piece.file], piece, options) for piece in unit)
        for document in islice(documents, SAMPLED_DOCUMENTS):
            sample.append(document._replace(text=document.text[:SAMPLED_CHARACTERS]))
            size += len(sample[-1].text.encode("utf-8", "replace"))
            if size > SAMPLED_CHARACTERS:
                break
        read += size
        prepared(sample)  # not timed: in a long run, most words are known
        started = time.process_time()
        found = prepared(sample)
        rows += len(found)
        tokens += sum(len(row.tokens) for row in found)
        sentences += sum(len(row.offsets) for row in found)
        spent += time.process_time() - started
    factor = total / max(read, 1)
    disk = tokens * 4 + sentences * 4 + rows * 120
    return Estimate(total, tokens * factor, disk * factor, spent * factor)


def free_disk(folder: Path, needed: float) -> int:
    """Returns the free bytes where `folder` is or will be.

    Raises:
        UserError: Fewer are free than `needed`, with a margin.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed * MARGIN:
        raise UserError(
            f"--output {folder}: the corpus needs about {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free there; "
            "free some or choose another --output."
        )
    return free
