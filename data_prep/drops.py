"""Counts everything that is left out, by source and reason, keeps samples, and reports it."""

import heapq
import json
from collections import Counter, defaultdict
from typing import Any

import xxhash

from data_prep.read import RawDocument
from multicls.console import count
from multicls.corpus import Corpus, ShardRow
from multicls.files import read_json

SAMPLES = 8  # of everything that is dropped, by reason
SAMPLE_LENGTH = 200
WARNING_SHARE = 0.2  # of the characters or documents of a source
REPORTED_SHARE = 0.001  # reasons that take less are left to `stats`
READ = "read"  # the reason under which all that was read is counted
REMEDIES = {  # how to keep what was dropped for a reason
    "documents_too_short": "--short_documents join joins them; --min_sentences takes shorter ones",
    "lines_heading": "--without headings",
    "lines_end_matter": "--without end_matter",
    "sentences_with_holes": "--without holes",
    "sentences_without_letter": "--without sentences_without_letter",
    "sentences_too_long": "--without long_sentences",
    "sentences_not_utf8": "convert the file to UTF-8 (iconv)",
    "documents_duplicate": "--without duplicate_documents",
    "records_without_text": "--text_field names the field with the text",
}

Sample = tuple[int, str, str, str]  # hash, source, document and text


class DropLog:
    """Counts what is read, joined and dropped, and keeps a fair sample of each reason.

    The samples are those with the smallest hashes, whatever the order in which drops come.

    Args:
        record: JSON values of a log, as `to_json` returns them.

    Attributes:
        counts: By source and reason, how often something was dropped; READ: documents, bad records included.
        characters: By source and reason, the characters dropped; READ: all.
        samples: By reason, ascending.
    """

    def __init__(self, record: dict[str, Any] | None = None) -> None:
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.characters: dict[str, Counter[str]] = defaultdict(Counter)
        self.samples: dict[str, list[Sample]] = {}
        self.merge(record or {})

    def add(
        self, reason: str, raw: RawDocument | ShardRow, text: str, characters: int, count: int = 1
    ) -> None:
        """Counts `count` drops of a document that lose `characters` of it; `text` shows one.

        A reason to drop whole documents begins with "documents_" or "records_".
        """
        self.counts[raw.source][reason] += count
        self.characters[raw.source][reason] += characters
        sample = raw.source, raw.id, text[:SAMPLE_LENGTH]
        key = xxhash.xxh3_64_intdigest("\0".join(sample).encode("utf-8", "replace"))
        self._keep(reason, (key, *sample))

    def merge(self, record: dict[str, Any]) -> None:
        """Adds everything that another log has counted, from its `to_json`."""
        for name in ("counts", "characters"):
            for source, values in record.get(name, {}).items():
                getattr(self, name)[source].update(values)
        for reason, entries in record.get("samples", {}).items():
            for entry in entries:
                self._keep(reason, tuple(entry))

    def _keep(self, reason: str, sample: Sample) -> None:
        kept = self.samples.setdefault(reason, [])
        if len(kept) < SAMPLES or sample < kept[-1]:
            self.samples[reason] = heapq.nsmallest(SAMPLES, {*kept, sample})

    def to_json(self) -> dict[str, Any]:
        """Returns all that it holds as JSON values, sorted by their keys."""
        return json.loads(json.dumps(vars(self), sort_keys=True))

    def totals(self, *sources: str) -> tuple[Counter[str], Counter[str]]:
        """Returns `counts` and `characters` by reason, over some sources or over all."""
        tables = self.counts, self.characters
        numbers, characters = (sum((t[s] for s in sources or t), Counter[str]()) for t in tables)
        return numbers, characters

    def by_reason(self) -> dict[str, int]:
        """Returns how often something was dropped, by reason, over all sources."""
        return {reason: n for reason, n in sorted(self.totals()[0].items()) if reason != READ}

    def kept(self) -> str:
        """Returns, in words, the number of documents and the share of the text that are kept."""
        numbers, characters = self.totals()
        whole = sum(number for reason, number in numbers.items() if _is_whole(reason))
        share = 2 - characters.total() / max(characters[READ], 1)  # READ is in the total, too
        return f"{numbers[READ] - whole:,} of {count(numbers[READ], 'document')}, {share:.1%} of the text"

    def report(self) -> list[tuple[str, str]]:
        """Returns a line for each reason, and a warning where one takes over a fifth of a source."""
        lines = list[tuple[str, str]]()
        for source in ("", *sorted(self.counts)):  # first all sources together
            numbers, characters = self.totals(source) if source else self.totals()
            reasons = sorted(numbers.keys() - {READ})
            for reason in sorted(reasons, key=characters.__getitem__, reverse=True):
                documents = numbers[reason] / max(numbers[READ], 1) * _is_whole(reason)
                share = characters[reason] / max(characters[READ], 1)
                if max(documents, share) > (WARNING_SHARE if source else REPORTED_SHARE):
                    text = f"{documents:.1%} of the documents, {share:.1%} of the text: "
                    text += f"{numbers[reason]:,} {reason}."
                    text += f" To keep them: {REMEDIES[reason]}." if reason in REMEDIES else ""
                    lines.append(("warning", f"{source}: {text}") if source else ("left out", text))
        return lines


def _is_whole(reason: str) -> bool:
    """Returns whether a reason drops whole documents."""
    return reason.startswith(("documents_", "records_"))


def last_lines(corpus: Corpus) -> list[tuple[str, str]]:
    """Returns the last lines of a run: what is kept, what is left out and why, and warnings."""
    drops = DropLog(read_json(corpus.path / "dropped.json"))
    lines = [("kept", drops.kept()), *drops.report()]
    if joined := corpus.manifest["dropped"].get("joined_documents"):
        note = "MCQT and sentence order teach less across documents; masked-LM and TF-IDF do not"
        lines.append(("joined", f"{joined:,} short documents to others. {note}."))
    if skipped := sum(corpus.manifest["skipped"].values()):
        lines.append(("skipped", count(skipped, "file")))
    return [*lines, ("samples", f"{corpus.path}/dropped.json")]
