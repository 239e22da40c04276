"""Counts everything that is left out, by source and reason, keeps samples, and reports it."""

import heapq
import json
from collections import Counter, defaultdict
from typing import IO, Any, NamedTuple

import xxhash

from data_prep.read import RawDocument
from multicls.console import count
from multicls.corpus import Corpus, ShardRow
from multicls.files import read_json

SAMPLES = 8  # of everything that is dropped, by reason
SAMPLE_LENGTH = 200
WARNING_SHARE = 0.2  # of the characters or documents of a source
REPORTED_SHARE = 0.001  # reasons that take less are left to `stats`


class Reason(NamedTuple):
    """A reason for a drop: what it counts, and how to keep what it drops."""

    unit: str  # documents, if each count is a whole document
    remedy: str = ""
    is_loss: bool = True


REASONS = {
    "documents_too_short": Reason(
        "documents", "--short_documents join joins them; --min_sentences takes shorter ones"
    ),
    "documents_duplicate": Reason("documents", "--without duplicate_documents"),
    "documents_empty": Reason("documents"),
    "documents_without_sentences": Reason("documents"),
    "documents_failed": Reason("documents"),
    "records_without_text": Reason("documents", "--text_field names the field with the text"),
    "records_not_json": Reason("documents"),
    "records_not_xml": Reason("documents"),
    "records_not_a_row": Reason("documents", "give each row as many cells as the header has"),
    "records_doc_not_closed": Reason("documents"),
    "records_file_damaged": Reason("documents", "get the file again; what could be read is kept"),
    "lines_heading": Reason("lines", "--without headings"),
    "lines_end_matter": Reason("lines", "--without end_matter"),
    "lines_markup": Reason("lines", "--without markup"),
    "characters_of_markup": Reason("characters", "--without markup"),
    "lines_of_pages": Reason("lines", "--without markup"),
    "sentences_with_holes": Reason("sentences", "--without holes"),
    "sentences_without_letter": Reason("sentences", "--without sentences_without_letter"),
    "sentences_without_tokens": Reason("sentences"),
    "sentences_too_long": Reason("sentences", "--without long_sentences"),
    "sentences_of_too_many_tokens": Reason("sentences", "end sentences with full stops"),
    "sentences_not_utf8": Reason("sentences", "convert the file to UTF-8 (iconv -f ENCODING)"),
    "characters_control": Reason("characters", is_loss=False),
    "pages_redirects": Reason("pages", is_loss=False),
    "pages_not_articles": Reason("pages", is_loss=False),
    "joined_documents": Reason("joined", is_loss=False),
}

Sample = tuple[int, str, str, str]  # hash, source, document and text


class DropLog:
    """Counts what is read, joined and dropped, and keeps a fair sample of each reason.

    The samples are those with the smallest hashes, whatever the order in which drops come.

    `record` is another log's `to_json`; `file` gets all that is left out, a JSON object a line.
    """

    def __init__(self, record: dict[str, Any] | None = None, file: IO[str] | None = None) -> None:
        self._file = file
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)  # drops by source and reason
        self.characters: dict[str, Counter[str]] = defaultdict(Counter)  # that these have lost
        self.documents: Counter[str] = Counter()  # read, by source, bad records included
        self.text: Counter[str] = Counter()  # characters, with an estimate of the unreadable ones
        self.samples: dict[str, list[Sample]] = {}  # by reason, ascending
        self.merge(record or {})

    def add(
        self, reason: str, raw: RawDocument | ShardRow, text: str, characters: int, count: int = 1
    ) -> None:
        """Counts `count` drops of a document that lose `characters` of it; `text` shows one."""
        self.counts[raw.source][reason] += count
        self.characters[raw.source][reason] += characters
        if self._file and REASONS[reason].unit != "joined":
            line = {"reason": reason, "source": raw.source, "id": raw.id, "text": text}
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        sample = raw.source, raw.id, " ".join(text[:SAMPLE_LENGTH].split())
        key = xxhash.xxh3_64_intdigest("\0".join(sample).encode("utf-8", "replace"))
        self._keep(reason, (key, *sample))

    def merge(self, record: dict[str, Any]) -> None:
        """Adds everything that another log has counted, from its `to_json`."""
        for name in ("counts", "characters"):
            for source, values in record.get(name, {}).items():
                getattr(self, name)[source].update(values)
        self.documents.update(record.get("documents", {}))
        self.text.update(record.get("text", {}))
        for reason, entries in record.get("samples", {}).items():
            for entry in entries:
                self._keep(reason, tuple(entry))

    def _keep(self, reason: str, sample: Sample) -> None:
        kept = self.samples.setdefault(reason, [])
        if len(kept) < SAMPLES or sample < kept[-1]:
            self.samples[reason] = heapq.nsmallest(SAMPLES, {*kept, sample})

    def to_json(self) -> dict[str, Any]:
        """Returns all that it holds as JSON values, sorted by their keys."""
        values = {name: value for name, value in vars(self).items() if name != "_file"}
        return json.loads(json.dumps(values, sort_keys=True))

    def totals(self, *sources: str) -> tuple[Counter[str], Counter[str]]:
        """Returns `counts` and `characters` by reason, over some sources or over all."""
        tables = self.counts, self.characters
        numbers, characters = (sum((t[s] for s in sources or t), Counter[str]()) for t in tables)
        return numbers, characters

    def by_reason(self) -> dict[str, int]:
        """Returns how often something was dropped, by reason, over all sources."""
        return dict(sorted(self.totals()[0].items()))

    def kept(self) -> str:
        """Returns, in words, the number of documents and the share of the text that are kept."""
        numbers, characters = self.totals()
        whole = sum(numbers[reason] for reason in numbers if REASONS[reason].unit == "documents")
        given = self.documents.total()
        share = 1 - characters.total() / max(self.text.total(), 1)
        return f"{given - whole:,} of {count(given, 'document')}, {share:.1%} of the text"

    def report(self) -> list[tuple[str, str]]:
        """Returns a line for each reason, and a warning where one takes over a fifth of a source."""
        lines = list[tuple[str, str]]()
        for source in ("", *sorted(self.counts)):  # first all sources together
            numbers, characters = self.totals(source) if source else self.totals()
            given = self.documents[source] if source else self.documents.total()
            text_given = self.text[source] if source else self.text.total()
            for reason in sorted(sorted(numbers), key=characters.__getitem__, reverse=True):
                unit, remedy, _ = REASONS[reason]
                documents = numbers[reason] / max(given, 1) if unit == "documents" else 0.0
                share = characters[reason] / max(text_given, 1)
                if max(documents, share) > (WARNING_SHARE if source else REPORTED_SHARE):
                    text = f"{documents:.1%} of the documents, {share:.1%} of the text: "
                    text += f"{numbers[reason]:,} {reason}."
                    text += f" To keep them: {remedy}." if remedy else ""
                    lines.append(("warning", f"{source}: {text}") if source else ("left out", text))
        return lines


def last_lines(corpus: Corpus) -> list[tuple[str, str]]:
    """Returns the last lines of a run: what is kept, what is left out and why, and warnings."""
    drops = DropLog(read_json(corpus.path / "dropped.json"))
    lines = [("kept", drops.kept()), *drops.report()]
    if joined := corpus.manifest["dropped"].get("joined_documents"):
        note = "MCQT and sentence order teach less across documents; masked-LM and TF-IDF do not"
        lines.append(("joined", f"{joined:,} short documents to others. {note}."))
    if skipped := corpus.manifest["skipped"]:
        reasons = sorted(skipped.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{number:,} x {reason}" for reason, number in reasons[:5])
        lines.append(("skipped", f"{count(sum(skipped.values()), 'file')}: {listed}"))
    return [*lines, ("samples", f"{corpus.path}/dropped.json")]
