"""Records of evaluated systems, from which pages and figures are made.

A record holds which scored rows a system got right in each draw of training rows. So any two systems can be compared
later, without their models.
"""

import base64
import lzma
import os
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from benchmarks.harness import machine, without_folders
from multicls.environment import environment_record
from multicls.errors import UserError
from multicls.evaluation import Difference, Scores, average, compare
from multicls.files import read_json, write_json
from multicls.measures import Array
from multicls.settings import Settings

RESULTS = Path(__file__).with_name("results")
TRAINED = 2  # mark of a row that the draw trains on


class Origin(Settings):
    """The command, machine and commit that made a record."""

    command: str
    machine: str
    threads: str
    date: str
    commit: str

    @classmethod
    def of_this_process(cls) -> "Origin":
        """Returns the origin of what this command measures; its folders are cut to their names."""
        script = f"benchmarks/{Path(sys.argv[0]).name}"
        return cls(
            command=shlex.join(["python", script, *map(without_folders, sys.argv[1:])]),
            machine=machine(),
            threads=os.environ.get("OMP_NUM_THREADS", "all"),
            date=time.strftime("%Y-%m-%d"),
            commit=str(environment_record()["git_commit"])[:10],
        )


class Outcome(Settings):
    """The accuracy of a view with its 95 % interval; `rows` is what `pack` made of its draws, or ""."""

    accuracy: float
    low: float
    high: float
    rows: str = ""


class Record(Settings):
    """One system on one domain; a system that was trained with several seeds has a record for each.

    Attributes:
        model: Hash of the model's files, or the package and version of a peer.
        data: Hash of the domain's rows and documents.
        results: Outcomes by number of labels and by view, such as `mean+topics`.
    """

    domain: str
    system: str
    seed: int
    model: str
    data: str
    max_length: int
    results: dict[int, dict[str, Outcome]]
    training_minutes: float | None = Field(None, description="CPU or GPU minutes of its training")
    origin: Origin


def pack(draws: Array) -> str:
    """Returns values of 1, 0 or NaN, (J, N), as text of about 1.5 bits per value."""
    marks = np.where(np.isnan(draws), TRAINED, draws).astype(np.uint8)
    packed = lzma.compress(len(draws).to_bytes(4, "big") + marks.T.tobytes())
    return base64.b85encode(packed).decode("ascii")


def unpack(text: str) -> Array:
    """Returns the values (J, N) that `pack` has packed."""
    packed = lzma.decompress(base64.b85decode(text))
    marks = np.frombuffer(packed[4:], np.uint8).reshape(-1, int.from_bytes(packed[:4], "big")).T
    return np.where(marks == TRAINED, np.nan, marks.astype(float))


def outcome(scores: Scores, keep_rows: bool = True) -> Outcome:
    """Returns what a record keeps of a system's scores."""
    found = compare(scores)
    mean, low, high = (round(value, 5) for value in (found.mean, found.low, found.high))
    rows = pack(scores.draws) if keep_rows else ""
    return Outcome(accuracy=mean, low=low, high=high, rows=rows)


class Records:
    """The records of a file, or of all files of a folder."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = list(records)
        keys = [(record.domain, record.system, record.seed) for record in self.records]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise UserError(f"records that are there twice, and would count as seeds: {twice}.")

    @classmethod
    def read(cls, path: Path) -> "Records":
        """Reads a file, which may be missing, or all files of a folder."""
        files = sorted(path.glob("*.json")) if path.is_dir() else [path] * path.exists()
        return cls(Record.model_validate(value) for file in files for value in read_json(file))

    def write(self, path: Path) -> None:
        """Writes all records to a file."""
        write_json(path, [record.model_dump(mode="json") for record in self.records])

    def find(self, domain: str, system: str, seed: int) -> Record | None:
        """Returns a record, or None."""
        key = (domain, system, seed)
        return next((r for r in self.records if (r.domain, r.system, r.seed) == key), None)

    def scores(self, domain: str, system: str, view: str, labels: int) -> list[Scores]:
        """Returns the scores of a system's view, one entry per seed; [] if no record has its rows."""
        found = list[Scores]()
        for record in self.records:
            if (record.domain, record.system) != (domain, system):
                continue
            kept = record.results.get(labels, {}).get(view)
            if kept and kept.rows:
                draws = unpack(kept.rows)
                none, units = np.zeros((0, draws.shape[1])), np.arange(draws.shape[1])
                found.append(Scores(none, draws, units, labels))
        return found

    def differences(
        self,
        domains: Sequence[str],
        first: tuple[str, str],
        second: tuple[str, str] | None = None,
        labels: int = 100,
    ) -> list[Difference | None]:
        """Returns the difference of two systems, each a name and a view, on each domain, and last their average.

        It is None where a record is missing. Without a second system it is the first one's score.
        """
        found = list[Difference | None]()
        for domain in domains:
            sides = [self.scores(domain, *side, labels) for side in (first, second) if side]
            found.append(compare(*sides) if all(sides) else None)
        known = [change for change in found if change is not None]
        return [*found, average(known) if len(known) == len(domains) else None]


def check_same(record: Record, **wanted: object) -> None:
    """Raises UserError if a record was made with other settings than these."""
    different = [name for name, value in wanted.items() if getattr(record, name) != value]
    if different:
        raise UserError(
            f"{record.domain}, {record.system}, seed {record.seed}: its record has another "
            f"{', '.join(different)}. Delete the record or pass another --output."
        )
