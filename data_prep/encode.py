"""Encodes sentences as token ids, exactly as the tokenizer does, but tokenizes each distinct word only once."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from multicls.errors import UserError, first_line
from multicls.sample import SAMPLE, sample_model

TABLE_WORDS = 1 << 19  # words in the table before it is emptied: about 100 MB a process
_MARKS = r"([!-/:-@\[-`{-~\n])"  # ASCII punctuation, each always a word of its own, and the end of a sentence
_END = "\n"


class TextEncoder:
    """Encodes sentences as token ids.

    A BERT tokenizer (BertNormalizer, BertPreTokenizer, WordPiece) looks at no more than a word at a time: it always
    splits at spaces and around ASCII punctuation, and its normalizer changes characters one by one. So the ids of a
    sentence are those of its words, and words repeat. Other tokenizers get whole sentences.

    Text never becomes a special token: "[SEP]" in a sentence is split like any other word.

    Args:
        tokenizer_json: the text of a tokenizer.json.

    Attributes:
        tokenizer: the `tokenizers.Tokenizer`.
        vocabulary_size: V, added tokens included.
        dtype: type of the ids: uint16 if V allows it, else uint32.
        word_by_word: True if the tokenizer is a BERT tokenizer as above.
    """

    # The table: entry e of `_entries` is the `_lengths[e]` tokens from `_starts[e]` on in `_tokens`.
    _entries: dict[str, int]
    _lengths: np.ndarray
    _starts: np.ndarray
    _tokens: np.ndarray

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
        """Returns the tokens of all sentences, concatenated, (N,), and the number of each sentence, (S,) int64."""
        if not sentences:
            return np.zeros(0, self.dtype), np.zeros(0, np.int64)
        if not self.word_by_word:
            return self._flatten(self._encode_each(sentences))
        text = _END.join(sentences)
        if text.count(_END) != len(sentences) - 1:  # to the tokenizer, a line end in a sentence is a space
            text = _END.join(sentence.replace(_END, " ") for sentence in sentences)
        words = pc.split_pattern(pc.replace_substring_regex(pa.array([text]), _MARKS, r" \1 "), " ").flatten()
        encoded = words.dictionary_encode()
        entries = self._look_up(encoded.dictionary.to_pylist())[encoded.indices.to_numpy()]
        lengths = self._lengths[entries]
        ends = np.cumsum(lengths)
        # Place of each token in the table: the start of its word's entry plus its place in the word.
        tokens = self._tokens[np.arange(ends[-1]) + np.repeat(self._starts[entries] - (ends - lengths), lengths)]
        bounds = np.concatenate([ends[entries == 0], ends[-1:]])  # entry 0 is the end of a sentence
        return tokens, np.diff(bounds, prepend=0)

    def _look_up(self, words: list[str]) -> np.ndarray:
        """Returns the table entries of distinct words, (W,), and adds the new ones to the table."""
        if len(self._entries) > TABLE_WORDS:
            self._clear_table()
        entries = list(map(self._entries.get, words))
        if None in entries:
            self._add([word for word, entry in zip(words, entries, strict=True) if entry is None])
            entries = list(map(self._entries.get, words))
        return np.array(entries, np.int64)

    def _add(self, new: list[str]) -> None:
        tokens, lengths = self._flatten(self._encode_each(new))
        self._entries.update(zip(new, range(len(self._entries), len(self._entries) + len(new)), strict=True))
        starts = len(self._tokens) + np.cumsum(lengths) - lengths
        self._lengths = np.concatenate([self._lengths, lengths])
        self._starts = np.concatenate([self._starts, starts])
        self._tokens = np.concatenate([self._tokens, tokens])

    def _encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _flatten(self, ids: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Returns all ids, concatenated, and the length of each list."""
        lengths = np.fromiter(map(len, ids), np.int64, count=len(ids))
        return np.fromiter(chain.from_iterable(ids), self.dtype, count=int(lengths.sum())), lengths

    def _clear_table(self) -> None:
        self._entries = {_END: 0, "": 1}
        self._lengths = np.zeros(2, np.int64)
        self._starts = np.zeros(2, np.int64)
        self._tokens = np.zeros(0, self.dtype)


@lru_cache(2)
def encoder_for(tokenizer_json: str) -> TextEncoder:
    """Returns the encoder of this process for a tokenizer; it keeps the words that it has met."""
    return TextEncoder(tokenizer_json)


def _is_word_by_word(parts: dict[str, Any]) -> bool:
    kinds = [(parts[name] or {}).get("type") for name in ("normalizer", "pre_tokenizer", "model")]
    added = parts.get("added_tokens") or []
    return kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"] and all(token["special"] for token in added)


def load_tokenizer_files(name: str) -> dict[str, bytes]:
    """Loads `tokenizer.json` and, if there is one, `tokenizer_config.json`.

    Args:
        name: a folder, a tokenizer.json, a model id of the Hugging Face Hub, or "sample" for the embedded sample's.

    Raises:
        UserError: there is no such tokenizer, or it is not a fast one.
    """
    path = sample_model() if name == SAMPLE else Path(name)
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
        raise UserError(f"{main}: not a fast tokenizer: {first_line(error)}.") from None
    return files


def _from_hub(name: str) -> Path:
    """Downloads the tokenizer of a model id, or finds it in the cache; returns the path of its tokenizer.json."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    why = ""
    try:
        if name.endswith(".json"):
            raise HFValidationError
        validate_repo_id(name)
        path = Path(hf_hub_download(name, "tokenizer.json"))
    except HFValidationError:
        why = "not a model id of the Hub (like bert-base-uncased)"
    except (HfHubHTTPError, OSError) as error:
        why = f"the Hub does not provide it ({first_line(error)})"
    if why:
        raise UserError(f'--tokenizer {name}: no such file or folder, and {why}; "{SAMPLE}" is the embedded tokenizer.')
    with suppress(EntryNotFoundError, OSError):
        hf_hub_download(name, "tokenizer_config.json")
    return path
