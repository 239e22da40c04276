"""Reports what a corpus keeps of the text, and what is left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from data_prep.drops import DropLog
from multicls.console import count
from multicls.corpus import Corpus

WARNING_SHARE = 0.2  # of the characters or documents of a source
REPORTED_SHARE = 0.001  # reasons that take less are left to `stats`
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
JOINED_NOTE = (
    "Passages of an example can come from different documents, so MCQT and sentence order (SO) "
    "teach less; masked-LM and TF-IDF are as before."
)


def _shares(
    documents: int, characters: int, counts: Counter[str], lost: Counter[str]
) -> Iterator[tuple[str, float, float]]:
    """Yields each reason, the largest first, with its share of the documents and of the characters."""
    for reason in sorted(counts, key=lambda reason: (-lost[reason], reason)):
        whole = counts[reason] / max(documents, 1) if _is_whole(reason) else 0.0
        yield reason, whole, lost[reason] / max(characters, 1)


def _is_whole(reason: str) -> bool:
    """Returns whether a reason drops whole documents."""
    return reason.startswith(("documents_", "records_"))


def _remedy(reason: str) -> str:
    return f" To keep them: {REMEDIES[reason]}." if reason in REMEDIES else ""


def warnings(drops: DropLog) -> list[str]:
    """Returns a sentence for each source and reason that takes more than a fifth of it."""
    found = []
    for source, counts in sorted(drops.counts.items()):
        size, lost = drops.documents[source], drops.dropped_characters[source]
        shares = _shares(size, drops.characters[source], counts, lost)
        for reason, whole, share in sorted(shares):
            if max(whole, share) > WARNING_SHARE:
                of = f"{whole:.0%} of its documents, " * bool(whole) + f"{share:.0%} of its text"
                found.append(f"{source}: {reason} left out {of}.{_remedy(reason)}")
    return found


def report(drops: DropLog) -> list[tuple[str, str]]:
    """Returns what is kept, and a line for each reason to leave out text or documents."""
    documents, characters = drops.documents.total(), drops.characters.total()
    lost: Counter[str] = sum(drops.dropped_characters.values(), Counter())
    counts = Counter(drops.by_reason())
    kept = documents - sum(number for reason, number in counts.items() if _is_whole(reason))
    share = 1 - lost.total() / max(characters, 1)
    lines = [("kept", f"{kept:,} of {count(documents, 'document')}, {share:.1%} of the text")]
    for reason, whole, share in _shares(documents, characters, counts, lost):
        if max(whole, share) >= REPORTED_SHARE:
            text = f"{share:.1%} of the text: {counts[reason]:,} {reason}.{_remedy(reason)}"
            lines.append(("left out", text))
    return lines


def last_lines(corpus: Corpus) -> list[tuple[str, str]]:
    """Returns the last lines of a run: what is kept and left out, notes and warnings."""
    drops = DropLog(corpus.manifest["drops"])
    lines = report(drops)
    joined = corpus.manifest["joined_documents"]
    if joined["short"]:
        made = f"{joined['short']:,} short documents became {joined['joined']:,}"
        lines.append(("joined", f"{made}. {JOINED_NOTE}"))
    if skipped := sum(corpus.manifest["skipped"].values()):
        lines.append(("skipped", count(skipped, "file")))
    lines.append(("samples", f"{corpus.path}/dropped.json"))
    return lines + [("warning", text) for text in warnings(drops)[:20]]
