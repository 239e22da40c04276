"""Sentences to piece ids, exactly the tokenizer's; each distinct word is tokenized once, then looked up."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from multicls.errors import UserError

TABLE_WORDS = 1 << 19  # words in the table before it starts anew: some 100 MB a process
_MARKS = r"([!-/:-@\[-`{-~\n])"  # ASCII punctuation, each always a word of its own, and the end of a sentence
_END = "\n"


class PieceEncoder:
    """Turns sentences into piece ids.

    A BERT tokenizer (BertNormalizer, BertPreTokenizer, WordPiece) looks at no more than a word at a time: it always
    splits at spaces and around ASCII punctuation, and its normalizer changes characters one by one. So the ids of a
    sentence are those of its words, and words repeat. Other tokenizers get whole sentences.

    Text never becomes a special token: "[SEP]" in a sentence is split like any other word.

    Args:
        tokenizer_json: the text of a tokenizer.json.

    Attributes:
        vocabulary_size: V, added tokens included.
        dtype: of the ids, uint16 where V allows it.
        word_by_word: whether the tokenizer is of the kind above.
    """

    # The table: entry e of `_entries` is the `_lengths[e]` pieces from `_starts[e]` on in `_pieces`.
    _entries: dict[str, int]
    _lengths: np.ndarray
    _starts: np.ndarray
    _pieces: np.ndarray

    def __init__(self, tokenizer_json: str) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes, not threads, share the work
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.vocabulary_size: int = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.dtype = np.dtype(np.uint16 if self.vocabulary_size <= 1 << 16 else np.uint32)
        self.word_by_word = _is_word_by_word(json.loads(tokenizer_json))
        self._clear_table()

    def encode(self, sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The pieces of all sentences one after another, (N,), and how many each sentence has, (S,) int64."""
        if not sentences:
            return np.zeros(0, self.dtype), np.zeros(0, np.int64)
        if not self.word_by_word:
            ids = self._encode_each(sentences)
            lengths = np.fromiter(map(len, ids), np.int64, count=len(ids))
            return np.fromiter(chain.from_iterable(ids), self.dtype, count=int(lengths.sum())), lengths
        text = _END.join(sentences)
        if text.count(_END) != len(sentences) - 1:  # to the tokenizer, a line's end is a space
            text = _END.join(sentence.replace(_END, " ") for sentence in sentences)
        words = pc.split_pattern(pc.replace_substring_regex(pa.array([text]), _MARKS, r" \1 "), " ").flatten()
        encoded = words.dictionary_encode()
        entries = self._look_up(encoded.dictionary.to_pylist())[encoded.indices.to_numpy()]
        lengths = self._lengths[entries]
        ends = np.cumsum(lengths)
        # Where each piece stands in the table: the start of its word's entry plus its place in the word.
        pieces = self._pieces[np.arange(ends[-1]) + np.repeat(self._starts[entries] - (ends - lengths), lengths)]
        bounds = np.concatenate([ends[entries == 0], ends[-1:]])  # entry 0 is the end of a sentence
        return pieces, np.diff(bounds, prepend=0)

    def _look_up(self, words: list[str]) -> np.ndarray:
        """(W,) entries of distinct words in the table, which grows by the new ones."""
        if len(self._entries) > TABLE_WORDS:
            self._clear_table()
        entries = list(map(self._entries.get, words))
        if None in entries:
            self._add([word for word, entry in zip(words, entries, strict=True) if entry is None])
            entries = list(map(self._entries.get, words))
        return np.array(entries, np.int64)

    def _add(self, new: list[str]) -> None:
        ids = self._encode_each(new)
        self._entries.update(zip(new, range(len(self._entries), len(self._entries) + len(new)), strict=True))
        lengths = np.fromiter(map(len, ids), np.int64, count=len(ids))
        starts = len(self._pieces) + np.cumsum(lengths) - lengths
        self._lengths = np.concatenate([self._lengths, lengths])
        self._starts = np.concatenate([self._starts, starts])
        self._pieces = np.concatenate([self._pieces, np.fromiter(chain.from_iterable(ids), self.dtype)])

    def _encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _clear_table(self) -> None:
        self._entries = {_END: 0, "": 1}
        self._lengths = np.zeros(2, np.int64)
        self._starts = np.zeros(2, np.int64)
        self._pieces = np.zeros(0, self.dtype)


def _is_word_by_word(parts: dict[str, Any]) -> bool:
    kinds = [(parts[name] or {}).get("type") for name in ("normalizer", "pre_tokenizer", "model")]
    added = parts.get("added_tokens") or []
    return kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"] and all(token["special"] for token in added)


def load_tokenizer_files(name: str) -> dict[str, bytes]:
    """`tokenizer.json` and, where there is one, `tokenizer_config.json`, as bytes.

    Args:
        name: a folder, a tokenizer.json or a model id of the Hugging Face hub.

    Raises:
        UserError: none of them, or not a fast tokenizer.
    """
    path = Path(name)
    if not path.exists():
        path = _from_hub(name)
    folder = path if path.is_dir() else path.parent
    main = path / "tokenizer.json" if path.is_dir() else path
    if not main.is_file():
        raise UserError(f"{path}: no tokenizer.json here; save a fast tokenizer with save_pretrained.")
    files = {"tokenizer.json": main.read_bytes()}
    if (folder / "tokenizer_config.json").is_file():
        files["tokenizer_config.json"] = (folder / "tokenizer_config.json").read_bytes()
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(files["tokenizer.json"].decode("utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{main}: not a fast tokenizer: {error}.") from None
    return files


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(hf_hub_download(name, "tokenizer.json"))
    except (HFValidationError, HfHubHTTPError, OSError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--tokenizer {name}: neither a path nor to be had from the hub ({reason}).") from None
    with suppress(EntryNotFoundError, OSError):
        hf_hub_download(name, "tokenizer_config.json")
    return path
