"""The ledger: what was taken from the input, what of it is left out and why, and what is kept.

For each source of each unit, taken = kept + left, in characters other than white space. `Ledger.close` raises an
error if that does not hold, so that no step can lose text in silence.
"""

import heapq
import json
import re
from collections import Counter, defaultdict
from typing import IO, Any, NamedTuple, Protocol

import xxhash

from multicls.console import count
from multicls.corpus import Corpus
from multicls.files import read_json

SAMPLES = 8  # of everything that is left out, by reason
SAMPLE_LENGTH = 200
WARNING_SHARE = 0.2  # of the characters or documents of a source
REPORTED_SHARE = 0.001  # reasons that take less are left to `stats`
HOLE = "\ufdd0"  # marks where something that is no text stood; a noncharacter, so no text has it

_BLANKS = b" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f"
_ASCII = bytes(range(128))
_WIDE_BLANK = re.compile(  # in UTF-8: the other white space of Unicode, and `HOLE`
    rb"\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2(?:\x80[\x80-\x8a\xa8\xa9\xaf]|\x81\x9f)|\xe3\x80\x80|\xef\xb7\x90"
)


def size(text: str) -> int:
    """Returns the number of characters of a text without white space and `HOLE`."""
    data = text.encode("utf-8", "surrogatepass")
    number = len(text) - len(data) + len(data.translate(None, _BLANKS))
    if len(data) > len(text):
        number -= len(_WIDE_BLANK.findall(data.translate(None, _ASCII)))
    return number


class Reason(NamedTuple):
    """Why something is left out: what happened, and how to keep it."""

    unit: str  # documents or files, if each count is a whole one; else a part of a document
    what: str
    remedy: str = ""
    is_loss: bool = True  # False: it is no text, or it stands elsewhere
    has_example: bool = False  # the report shows one


_UNPACK = "unpack it, or save it in a format that is read"
REASONS = {
    "documents_too_short": Reason("documents", "fewer sentences than `--min_sentences`",
        "--short_documents join joins them; --min_sentences takes shorter ones"),
    "documents_duplicate": Reason("documents", "the sentences of an earlier document", "--without duplicate_documents"),
    "documents_near_duplicate": Reason("documents", "most of the text of an earlier document", "--near_duplicates keep",
        has_example=True),
    "documents_similar": Reason("similar", "most of the text of an earlier document, but kept", is_loss=False),
    "documents_empty": Reason("documents", "no character but white space"),
    "documents_without_sentences": Reason("documents", "other rules left no sentence"),
    "documents_failed": Reason("documents", "an unexpected error", "report it with the sample's text"),
    "records_without_text": Reason("documents", "a row has no text in its fields",
        "--text_field names the field with the text"),
    "fields_not_text": Reason("fields", "a text field holds a number or an object",
        "--text_field takes paths, such as body.text", has_example=True),
    "records_not_json": Reason("documents", "a line is no JSON"),
    "records_not_xml": Reason("documents", "a page is no XML"),
    "records_not_a_row": Reason("documents", "a row has more or fewer cells than the header",
        "double the quotation marks inside quoted cells"),
    "records_doc_not_closed": Reason("documents", "text outside <doc ...> and </doc>"),
    "records_file_damaged": Reason("documents", "a file is damaged or cut off", "get the file again", has_example=True),
    "records_not_read": Reason("documents", "a member of an archive, or a record, is no text that is read", _UNPACK,
        has_example=True),
    "lines_heading": Reason("lines", "a short line without final punctuation", "--without headings"),
    "lines_end_matter": Reason("lines", "references and other lists at the end", "--without end_matter"),
    "lines_markup": Reason("lines", "code, tables and comments of Markdown", "--without markup"),
    "lines_of_tables": Reason("lines", "rows of a table in plain text", "--without markup"),
    "lines_quoted": Reason("lines", "text that a mail quotes", "--without markup"),
    "lines_repeated": Reason("lines", "a caption that repeats the one before it", is_loss=False),
    "lines_outside_main_text": Reason("lines", "navigation and other text around the main text of a page",
        "--without main_text"),
    "attachments": Reason("attachments", "a file that is attached to a mail", "save it as a file of its own",
        has_example=True),
    "parts_not_read": Reason("parts", "headers, footers and comments of a document", "copy them into its text"),
    "characters_of_html": Reason("characters", "tags, scripts and comments of HTML", "--without html"),
    "characters_of_markup": Reason("characters", "tags, and targets of links", "--without markup"),
    "characters_of_wikitext": Reason("characters", "templates, tables, references and tags of MediaWiki",
        is_loss=False),
    "characters_of_layout": Reason("characters", "marks of headings and items, hyphens at line ends", is_loss=False),
    "characters_control": Reason("characters", "control characters", "--without unicode", is_loss=False),
    "characters_composed": Reason("characters", "NFC composes marks, and ligatures are written out",
        "--without unicode", is_loss=False),
    "sentences_with_holes": Reason("sentences", "a formula or template is missing", "--without holes"),
    "sentences_of_evaluation": Reason("sentences", "words of a row of --decontaminate", has_example=True),
    "sentences_without_letter": Reason("sentences", "no letter", "--without sentences_without_letter"),
    "sentences_without_tokens": Reason("sentences", "the tokenizer gives no token"),
    "sentences_too_long": Reason("sentences", "over 10,000 characters without a blank", "--without long_sentences"),
    "sentences_of_too_many_tokens": Reason("sentences", "over 8,191 tokens", "end sentences with full stops"),
    "sentences_not_utf8": Reason("sentences", "bytes of another encoding", "--encoding names the file's"),
    "sentences_cut": Reason("sentences", "text without full stops is cut at blanks", is_loss=False),
    "lines_without_stops": Reason("lines", "text without full stops: each line is a sentence",
        is_loss=False),
    "pages_redirects": Reason("pages", "a redirect", is_loss=False),
    "pages_not_articles": Reason("pages", "a page outside the articles", is_loss=False),
    "pages_older_revisions": Reason("pages", "an older revision of a page", is_loss=False),
    "pages_not_text": Reason("documents", "a record of a Web archive that is neither HTML nor plain text",
        is_loss=False, has_example=True),
    "joined_documents": Reason("joined", "short documents that are joined", is_loss=False),
    # Files that are not read.
    "hidden": Reason("files", "its name begins with a dot", is_loss=False),
    "excluded": Reason("files", "--include or --exclude leave it out", is_loss=False),
    "empty": Reason("files", "it has no bytes", is_loss=False),
    "unreadable": Reason("files", "it cannot be opened"),
    "link": Reason("files", "a link to a folder", "pass the folder itself"),
    "no_file": Reason("files", "a pipe, socket or device"),
    "damaged": Reason("files", "its first bytes cannot be read", "get the file again"),
    "lfs_pointer": Reason("files", "a Git LFS pointer, not the file", "git lfs pull"),
    "not_utf8": Reason("files", "text of another encoding", "--encoding names it, such as cp1252"),
    "utf16": Reason("files", "text in UTF-16", "--encoding utf-16"),
    "missing_field": Reason("files", "no field of that name", "--text_field names the field with the text"),
    "not_installed": Reason("files", "a package is missing", "install it, or --format text"),
    "archive": Reason("files", "an archive of a kind that is not read", "unpack it"),
    "office": Reason("files", "a document of an office program", "save it as .docx or text"),
    "media": Reason("files", "an image, sound or film", "leave it out with --exclude", is_loss=False),
    "binary": Reason("files", "neither text nor a known format", "leave it out with --exclude"),
    "other_xml": Reason("files", "XML that is not MediaWiki", "--format text reads its tags, too"),
    "not_prose": Reason("files", "the suffix is one of code or data", "--format text reads it as text"),
}  # fmt: skip


class Left(NamedTuple):
    """Text that a step leaves out: the reason, what is shown of it, its size and the number of cases."""

    reason: str
    text: str
    characters: int
    cases: int = 1


def left(reason: str, text: str, cases: int = 1) -> Left:
    """Returns the entry of a text that is left out as a whole."""
    return Left(reason, text, size(text), cases)


class Record(Protocol):
    """A document or row, by its source and its name."""

    @property
    def source(self) -> str:
        """Name of its input."""

    @property
    def id(self) -> str:
        """Name in its source."""


Sample = tuple[int, str, str, str]  # hash, source, document and text


class Ledger:
    """Counts what is taken, kept, joined and left out, and keeps a fair sample of each reason.

    The samples are those with the smallest hashes, whatever the order in which entries come.

    `record` is another ledger's `to_json`; `file` gets all that is left out, a JSON object a line.
    """

    def __init__(self, record: dict[str, Any] | None = None, file: IO[str] | None = None) -> None:
        self._file = file
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)  # by source and reason
        self.characters: dict[str, Counter[str]] = defaultdict(Counter)  # left out, likewise
        self.documents: Counter[str] = Counter()  # taken, by source, bad records included
        self.text: Counter[str] = Counter()  # characters taken, by source
        self.kept: Counter[str] = Counter()  # characters kept, by source
        self.samples: dict[str, list[Sample]] = {}  # by reason, ascending
        self.merge(record or {})

    def take(self, source: str, characters: int, documents: int = 1) -> None:
        """Counts text of the input."""
        self.documents[source] += documents
        self.text[source] += characters

    def keep(self, source: str, characters: int) -> None:
        """Counts text that the corpus holds; less than 0 if it is left out later."""
        self.kept[source] += characters

    def add(self, reason: str, record: Record, text: str, characters: int, count: int = 1) -> None:
        """Counts `count` cases that leave out `characters` of a document; `text` shows one."""
        self.counts[record.source][reason] += count
        self.characters[record.source][reason] += characters
        if self._file and REASONS[reason].unit != "joined":
            line = {"reason": reason, "source": record.source, "id": record.id, "text": text}
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        sample = record.source, record.id, " ".join(text[:SAMPLE_LENGTH].split())
        key = xxhash.xxh3_64_intdigest("\0".join(sample).encode("utf-8", "replace"))
        self._keep_sample(reason, (key, *sample))

    def close(self, name: object) -> None:
        """Raises a RuntimeError if text of a source is neither kept nor left out; `name` is that of the unit."""
        for source, taken in self.text.items():
            out = sum(self.characters.get(source, {}).values())
            if taken != self.kept[source] + out:
                raise RuntimeError(
                    f"internal error: {name}: of {taken:,} characters of {source}, {self.kept[source]:,} are kept "
                    f"and {out:,} left out; {taken - self.kept[source] - out:,} are not counted. Please report it."
                )

    def merge(self, record: dict[str, Any]) -> None:
        """Adds everything that another ledger has counted, from its `to_json`."""
        for name in ("counts", "characters"):
            for source, values in record.get(name, {}).items():
                getattr(self, name)[source].update(values)
        for name in ("documents", "text", "kept"):
            getattr(self, name).update(record.get(name, {}))
        for reason, entries in record.get("samples", {}).items():
            for entry in entries:
                self._keep_sample(reason, tuple(entry))

    def _keep_sample(self, reason: str, sample: Sample) -> None:
        kept = self.samples.setdefault(reason, [])
        if len(kept) < SAMPLES or sample < kept[-1]:
            self.samples[reason] = heapq.nsmallest(SAMPLES, {*kept, sample})

    def to_json(self) -> dict[str, Any]:
        """Returns all that it holds as JSON values, sorted by their keys."""
        values = {name: value for name, value in vars(self).items() if name != "_file"}
        return json.loads(json.dumps(values, sort_keys=True))

    def totals(self, *sources: str) -> tuple[Counter[str], Counter[str]]:
        """Returns `counts` and `characters` by reason, over some sources or over all."""
        numbers, characters = Counter[str](), Counter[str]()
        for source in sources or list(self.counts):
            numbers.update(self.counts.get(source, {}))
            characters.update(self.characters.get(source, {}))
        return numbers, characters

    def by_reason(self) -> dict[str, int]:
        """Returns how often something was left out, by reason, over all sources."""
        return dict(sorted(self.totals()[0].items()))

    def text_taken(self, *sources: str) -> int:
        """Returns the characters taken of some sources or of all, without those that are no text."""
        no_text = sum(
            n for reason, n in self.totals(*sources)[1].items() if not REASONS[reason].is_loss
        )
        return sum(self.text[source] for source in sources or self.text) - no_text

    def share(self, bytes_read: int = 1, bytes_skipped: int = 0) -> float:
        """Returns the share of the text that is kept; skipped files count as if they held as much text a byte."""
        share = self.kept.total() / max(self.text_taken(), 1)
        return share * bytes_read / max(bytes_read + bytes_skipped, 1)

    def whole(self) -> int:
        """Returns the number of documents that are not left out."""
        numbers = self.totals()[0].items()
        return self.documents.total() - sum(
            n for reason, n in numbers if REASONS[reason].unit == "documents"
        )

    def report(self) -> list[tuple[str, str]]:
        """Returns a line for each reason, and a warning where one takes over a fifth of a source."""
        lines = list[tuple[str, str]]()
        for source in ("", *sorted(self.counts)):  # first all sources together
            chosen = [source] if source else list(self.text)
            numbers, characters = self.totals(*chosen)
            documents = max(sum(self.documents[name] for name in chosen), 1)
            text, taken = self.text_taken(*chosen), sum(self.text[name] for name in chosen)
            for reason in sorted(sorted(numbers), key=characters.__getitem__, reverse=True):
                entry, number = REASONS[reason], numbers[reason]
                of_documents = number / documents if entry.unit == "documents" else 0.0
                share = characters[reason] / max(text if entry.is_loss else taken, 1)
                is_warned = entry.is_loss and max(of_documents, share) > WARNING_SHARE
                is_large = max(of_documents, share) > REPORTED_SHARE
                is_shown_elsewhere = not is_warned if source else is_warned and len(self.text) == 1
                if is_shown_elsewhere:
                    continue
                line = f"{number:,} {reason}{self._example(reason)}."
                if not entry.is_loss and (is_large or entry.has_example):
                    lines.append(("no text", f"{share:.1%} of what was read: {line} {entry.what}"))
                elif is_large or entry.has_example:
                    line = f"{of_documents:.1%} of the documents, {share:.1%} of the text: {line}"
                    line += f" To keep them: {entry.remedy}." if entry.remedy else ""
                    lines.append(("warning", f"{source}: {line}") if source else ("left out", line))
        return lines

    def _example(self, reason: str) -> str:
        if not REASONS[reason].has_example:
            return ""
        _, _, record, text = self.samples[reason][0]
        return f" (such as {record}: {text[:80]})"


def reasons_table() -> str:
    """Returns the table of all reasons in Markdown."""
    rows = ["| code | what happened | what to do |", "|---|---|---|"]
    for code, reason in REASONS.items():
        what = reason.what if reason.is_loss else f"{reason.what} (no loss)"
        rows.append(f"| `{code}` | {what} | {reason.remedy} |".replace("<doc ...>", "`<doc>`"))
    return "\n".join(rows).replace("</doc>", "`</doc>`")


def remedies(reasons: Counter[str]) -> str:
    """Returns the remedies of the most frequent reasons of a total loss, in words."""
    named = [REASONS[reason].remedy for reason, _ in reasons.most_common()]
    return "; ".join(list(dict.fromkeys(filter(None, named)))[:3])


def last_lines(corpus: Corpus) -> list[tuple[str, str]]:
    """Returns the last lines of a run: what is kept, what is left out and why, and warnings."""
    record = read_json(corpus.path / "dropped.json")
    ledger, skipped = Ledger(record), record["skipped"]
    lost = [entry for entry in skipped if REASONS[entry["reason"]].is_loss]
    bytes_lost = sum(entry["bytes"] for entry in lost)
    damaged = ledger.by_reason().get("records_file_damaged", 0)
    share = ledger.share(corpus.manifest["made_from"]["input"]["bytes"], bytes_lost)
    documents = f"{ledger.whole():,} of {count(ledger.documents.total(), 'document')}"
    at_most = "at most " if damaged else ""
    lines = [("kept", f"{documents}, {at_most}{share:.1%} of the text"), *ledger.report()]
    if damaged:
        least = ledger.totals()[1]["records_file_damaged"]
        names = ", ".join(sample[2] for sample in ledger.samples["records_file_damaged"][:3])
        are = "file is" if damaged == 1 else "files are"
        text = f"{damaged:,} {are} damaged ({names}): how much is lost is unknown"
        text += f"; the bytes that are left hold about {least:,} characters" if least else ""
        lines.append(("warning", f"{text}; get it again"))
    if similar := corpus.manifest["dropped"].get("documents_similar"):
        note = "have most of the text of an earlier one; --near_duplicates drop leaves them out"
        lines.append(("similar", f"{count(similar, 'document')} {note}"))
    if joined := corpus.manifest["dropped"].get("joined_documents"):
        note = "MCQT and sentence order teach less across documents; masked-LM and TF-IDF do not"
        lines.append(("joined", f"{joined:,} short documents to others. {note}."))
    if corpus.num_documents == 1:
        note = "pretraining needs two documents; --documents blank_line makes one of each block of text"
        lines.append(("warning", note))
    if skipped:
        reasons = Counter(entry["reason"] for entry in skipped).most_common()
        listed = ", ".join(f"{number:,} x {skip_text(reason)}" for reason, number in reasons)
        held = f", {bytes_lost / 1e6:,.1f} MB of text that is not read" if bytes_lost else ""
        lines.append(("skipped", f"{count(len(skipped), 'file')}{held}: {listed}"))
    return [*lines, ("samples", f"{corpus.path}/dropped.json")]


def skip_text(reason: str, detail: str = "") -> str:
    """Returns what happened to a file that is not read, and what to do about it."""
    entry = REASONS[reason]
    what = f"{entry.what} ({detail})" if detail else entry.what
    return f"{what}; {entry.remedy}" if entry.remedy else what
