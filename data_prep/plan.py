"""The plan of a corpus: its settings, its input files and their division into work units. Every task reads it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from data_prep.settings import PrepareSettings
from data_prep.sources import Hub, SourceFile
from data_prep.units import Piece, unit_bytes
from multicls.errors import UserError
from multicls.files import atomic_write, read_json

PLAN = "plan.json"
BUCKET_BYTES = 2_000_000_000  # of input; the merge compares the hashes of about this much at a time


@dataclass(frozen=True)
class WorkPlan:
    """The plan that all tasks of a corpus share; its file is `plan.json` in the work folder."""

    folder: Path  # the work folder
    identity: dict[str, Any]  # everything but the text that decides the bytes of the corpus
    settings: PrepareSettings
    tokenizer_json: str  # text of the tokenizer.json
    files: list[SourceFile]
    units: list[list[Piece]]  # the pieces of files of each work unit

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

        def key(unit: list[Piece]) -> str:
            pieces = [(self.files[piece.file], piece.start, piece.stop) for piece in unit]
            inputs = [[f.source, f.name, f.format, f.size, f.version, start, stop] for f, start, stop in pieces]
            return hashlib.blake2b(json.dumps([identity, inputs]).encode("utf-8"), digest_size=12).hexdigest()

        return list(map(key, self.units))

    def part(self, unit: int) -> Path:
        """Returns the folder of a unit's part."""
        return self.folder / "parts" / self.unit_keys[unit]

    def save(self) -> None:
        """Writes the plan for the tasks."""
        record = {
            "identity": self.identity,
            "settings": self.settings.model_dump(),
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
    try:
        settings = PrepareSettings(**record["settings"])
        files = [SourceFile(**file | {"hub": Hub(*file["hub"]) if file["hub"] else None}) for file in record["files"]]
    except (TypeError, ValueError):  # other fields
        raise UserError(
            f"{Path(folder).parent}: holds an unfinished corpus of another version of this program; remove it or give "
            "another --output."
        ) from None
    units = [[Piece(*piece) for piece in unit] for unit in record["units"]]
    return WorkPlan(Path(folder), record["identity"], settings, record["tokenizer_json"], files, units)
