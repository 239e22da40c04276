"""What every process does to a chunk of documents: clean, split, tokenize; and how many processes share the chunks."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from typing import NamedTuple

import numpy as np
import xxhash

from data_prep.cleaning import RULES, Drops, clean
from data_prep.duplicates import LINE_LENGTH, minhash_bands
from data_prep.encode import TextEncoder
from data_prep.readers import RawDocument
from multicls.corpus import MAX_TOKENS, ShardRow, occurrences
from multicls.errors import UserError

LONGEST_SENTENCE = MAX_TOKENS // 8  # pieces; so that every row of a long document holds enough sentences
MIN_SENTENCES = 6  # a document needs two sentences for each of three parts


@dataclass(frozen=True)
class WorkSettings:
    """What decides how a document becomes pieces.

    Attributes:
        tokenizer_json: the text of a tokenizer.json.
        rules: cleaning rules in force, names out of `cleaning.RULES`.
        language: of the sentence splitter, as ISO 639 code.
        min_sentences: a document with fewer is dropped.
        near_duplicates: whether MinHash bands are wanted.
    """

    tokenizer_json: str
    rules: frozenset[str] = frozenset(RULES)
    language: str = "en"
    min_sentences: int = MIN_SENTENCES
    near_duplicates: bool = False


class Text(NamedTuple):
    """A document after cleaning.

    Attributes:
        rows: what the corpus holds of it; more than one where it is longer than `MAX_TOKENS`.
        keys: (1,) uint64, hash of the text; with near-duplicates (1 + BANDS,), its MinHash bands, too.
        lines: (M, 3) uint64: hash, first sentence and end of every line that could be boilerplate.
    """

    rows: list[ShardRow]
    keys: np.ndarray
    lines: np.ndarray


class Prepared(NamedTuple):
    """A chunk after cleaning: the documents that are kept so far, and what was dropped."""

    texts: list[Text]
    drops: Drops


class Worker:
    """Cleans and tokenizes documents; every process has one."""

    def __init__(self, settings: WorkSettings) -> None:
        self.settings = settings
        self.encoder = TextEncoder(settings.tokenizer_json)

    def prepare(self, chunk: list[RawDocument]) -> Prepared:
        """Cleans, splits and tokenizes the documents of a chunk, in order."""
        drops = Drops()
        cleaned: list[tuple[RawDocument, list[list[str]]]] = []
        for raw in chunk:
            if raw.dropped:
                drops.add(raw.dropped, raw, raw.title)
                continue
            lines = clean(raw, self.settings.rules, self.settings.language, drops)
            if sum(map(len, lines)) < self.settings.min_sentences:
                drops.add("documents_too_short" if raw.text.strip() else "documents_empty", raw, _shown(raw, lines))
            else:
                cleaned.append((raw, lines))
        sentences = [sentence for _, lines in cleaned for line in lines for sentence in line]
        pieces, lengths = self.encoder.encode(sentences)
        texts, sentence, piece = [], 0, 0
        for raw, lines in cleaned:
            own = lengths[sentence : sentence + sum(map(len, lines))]
            sentence, end = sentence + len(own), piece + int(own.sum())
            if text := self._text(raw, lines, pieces[piece:end], own, drops):
                texts.append(text)
            piece = end
        return Prepared(texts, drops)

    def _text(
        self, raw: RawDocument, lines: list[list[str]], pieces: np.ndarray, lengths: np.ndarray, drops: Drops
    ) -> Text | None:
        table = self._watched(lines)
        if not lengths.all():
            drops.add("sentences_without_pieces", raw, _shown(raw, lines), int((lengths == 0).sum()))
            kept = np.cumsum([0, *(lengths > 0)]).astype(np.uint64)
            table[:, 1:] = kept[table[:, 1:].astype(np.int64)]  # number the sentences without those
            lengths = lengths[lengths > 0]
        if len(lengths) < self.settings.min_sentences:
            drops.add("documents_too_short", raw, _shown(raw, lines))
            return None
        if lengths.max() > LONGEST_SENTENCE:
            drops.add("documents_with_endless_sentence", raw, _shown(raw, lines))
            return None
        text = "\n".join(sentence for line in lines for sentence in line)
        keys = np.frombuffer(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "<u8")
        if self.settings.near_duplicates:
            keys = np.concatenate([keys, minhash_bands(text)])
        return Text(rows_of(raw.source, raw.id, raw.title, int(keys[0]), pieces, lengths), keys, table)

    def _watched(self, lines: list[list[str]]) -> np.ndarray:
        table = []
        first = 0
        for line in lines if "repeated_lines" in self.settings.rules else ():
            text = " ".join(line)
            if len(text) >= LINE_LENGTH:
                table.append((xxhash.xxh3_64_intdigest(text.encode("utf-8")), first, first + len(line)))
            first += len(line)
        return np.array(table, np.uint64).reshape(-1, 3)


def rows_of(source: str, name: str, title: str, key: int, pieces: np.ndarray, lengths: np.ndarray) -> list[ShardRow]:
    """The rows of a document: one, or several of about equal length where it is longer than `MAX_TOKENS`."""
    ends = np.cumsum(lengths, dtype=np.int64)
    count = -(-len(pieces) // (MAX_TOKENS - int(lengths.max()))) if len(pieces) > MAX_TOKENS else 1
    cuts = [0, *(np.searchsorted(ends, len(pieces) * np.arange(1, count) / count) + 1).tolist(), len(lengths)]
    offsets = np.concatenate([[0], ends])
    rows = []
    for first, end in zip(cuts, cuts[1:], strict=False):
        own = offsets[first : end + 1]
        part = pieces[own[0] : own[-1]]
        rows.append(ShardRow(source, name, title, key, part, (own - own[0]).astype(np.int32), occurrences(part)))
    return rows


def _shown(raw: RawDocument, lines: list[list[str]]) -> str:
    return " ".join(sentence for line in lines for sentence in line) or raw.text.strip() or raw.title


_worker: Worker | None = None


def _start(settings: WorkSettings) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and ends the pool
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _worker = Worker(settings)


def _end_with(sentinel: int) -> None:
    """Ends this process when its parent is gone, killed perhaps; otherwise it would wait for work for ever."""
    connection.wait([sentinel])
    os._exit(1)


def _work(chunk: list[RawDocument]) -> Prepared:
    assert _worker is not None
    return _worker.prepare(chunk)


def prepare_in_order(chunks: Iterable[list[RawDocument]], worker: Worker, processes: int) -> Iterator[Prepared]:
    """Results in the order of the chunks; never more than a few chunks a process under way, so memory is bounded.

    Raises:
        UserError: a process was killed.
    """
    if processes == 1:
        yield from map(worker.prepare, chunks)
        return
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_start, initargs=(worker.settings,))
    try:
        waiting: deque[Future[Prepared]] = deque()
        for chunk in chunks:
            waiting.append(pool.submit(_work, chunk))
            if len(waiting) > 3 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        # CPython issue 94777: older pools wait for ever for their pipe to take a chunk that nobody reads any more.
        pool._call_queue._reader.close()  # type: ignore[attr-defined]
        raise UserError(
            "a process of data preparation was killed, perhaps for want of memory; what is written is safe: give the "
            "same command again, with fewer --num_processes if need be."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
