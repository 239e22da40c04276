"""Encodes sentences as token ids, exactly as the tokenizer does, but tokenizes each distinct word only once."""

import json
import os
import re
from collections.abc import Sequence
from itertools import accumulate, chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from multicls.errors import UserError, first_line
from multicls.sample import SAMPLE, sample_model
from multicls.tokenization import load_tokenizer, with_roles_only

CONFIG = "tokenizer_config.json"
BERT = {"normalizer": "BertNormalizer", "pre_tokenizer": "BertPreTokenizer", "model": "WordPiece"}
TABLE_WORDS = 1 << 19  # words in the table before it is emptied: about 100 MB a process
_MARKS = r"([!-/:-@\[-`{-~\n])"  # ASCII punctuation, each always a word of its own, and the end of a sentence
_END, _STOP = "\n", "."
TEXT_SENTENCES = 256  # sentences of a document that are one text to the tokenizer
_CJK = "\u3001-\u30ff\u3400-\u9fff\uf900-\ufaff\uff01-\uff9f"  # punctuation, kana, Han, full and half width
# No space follows a Chinese or Japanese sentence that ends in a mark, perhaps one that other scripts share.
_NO_SPACE = re.compile(
    f"(?:[{_CJK}][!?.\u2026\u2014\u2019\u201d]+|[\u3001\u3002\u3009-\u3011\u3015\uff01\uff09\uff0c\uff1a\uff1b\uff1f])$"
)


def load_tokenizer_files(name: str) -> dict[str, bytes]:
    """Loads `tokenizer.json`, to which transformers converts other files, and `tokenizer_config.json` if there is one.

    Raises a UserError if `name` is neither a folder, file, model of the Hub with a fast tokenizer, nor "sample".
    """
    from tokenizers import Tokenizer

    path = sample_model() if name == SAMPLE else Path(name)
    with TemporaryDirectory() as converted:
        try:
            if not path.exists():
                from huggingface_hub import snapshot_download

                path = Path(snapshot_download(name, allow_patterns=["tokenizer.json", CONFIG]))
            main = path / "tokenizer.json" if path.is_dir() else path
            if path.is_dir() and not main.exists():  # a model of sentencepiece, say
                load_tokenizer(name).save_pretrained(converted)
                main = Path(converted, main.name)
            Tokenizer.from_file(str(main))
            described = main.with_name(CONFIG)
            config = json.loads(described.read_bytes()) if described.is_file() else {}
        except Exception as error:  # tokenizers raises plain Exception
            raise UserError(
                f"--tokenizer {name}: no fast tokenizer there or on the Hub, and none that becomes one "
                f'({first_line(error)}); "{SAMPLE}" is the embedded one.'
            ) from None
        files = {CONFIG: described.read_bytes()} if described.is_file() else {}
        text = with_roles_only(main.read_text(encoding="utf-8"), config)
        return {"tokenizer.json": text.encode("utf-8")} | files


def join_sentences(sentences: Sequence[str]) -> tuple[str, list[int]]:
    """Returns the text of consecutive sentences of a document, and the index in it at which each sentence ends.

    A space stands between sentences, but none after the full stop of a Chinese or Japanese one.
    """
    spaced = [s if _NO_SPACE.search(s, max(0, len(s) - 4)) else f"{s} " for s in sentences]
    begins = [0, *accumulate(map(len, spaced[:-1]))]
    ends = [begin + len(s) for begin, s in zip(begins, sentences, strict=True)]
    return "".join(spaced)[: ends[-1]], ends


class TextEncoder:
    """Encodes the sentences of documents as the token ids that the tokenizer gives for the whole document.

    A BERT tokenizer (BertNormalizer, BertPreTokenizer, WordPiece) looks at no more than a word at a time: it always
    splits at spaces and around ASCII punctuation, and its normalizer changes characters one by one. So the ids of a
    sentence are those of its words, and words repeat. Other tokenizers get the text of `join_sentences`, and a token
    belongs to the sentence in which it ends. So the first sentence of a document has the tokens that begin a text, and
    all others those that follow one: "The" and "\\u0120The" in byte-level BPE, also where a training example begins.

    Text never becomes [CLS] or another role: "[SEP]" in a sentence is split as any word. Words that a user added to the
    tokenizer are found.
    """

    def __init__(self, tokenizer_json: str, table_words: int = TABLE_WORDS) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes, not threads, share the work
        from tokenizers import Tokenizer

        self.tokenizer, self._table_words = Tokenizer.from_str(tokenizer_json), table_words
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.dtype = np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)
        parts = json.loads(tokenizer_json)
        kinds = [(parts[name] or {}).get("type") for name in BERT]
        only_roles = all(token["special"] for token in parts.get("added_tokens") or [])
        self.word_by_word = only_roles and kinds == list(BERT.values())
        self._lock = Lock()  # a worker of a cluster may have several threads
        self._clear_table()

    def _clear_table(self) -> None:
        # The table: entry e of `_entries` is the `_lengths[e]` tokens from `_starts[e]` on in `_tokens`.
        self._entries = {_END: 0, "": 1}
        self._lengths: np.ndarray = np.zeros(2, np.int64)
        self._starts: np.ndarray = np.zeros(2, np.int64)
        self._tokens: np.ndarray = np.zeros(0, self.dtype)

    def encode(self, documents: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of all documents' sentences, (N,), and each sentence's number of tokens, (S,) int64."""
        sentences = list(chain.from_iterable(documents))
        if not sentences:
            return self._tokenize(sentences)
        if not self.word_by_word:
            return self._encode_texts(documents)
        with self._lock:
            return self._encode_words(sentences)

    def _encode_words(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns what `encode` does, with the table of words."""
        # To the tokenizer, a line end in a sentence is a space.
        text = pa.array([_END.join(sentence.replace(_END, " ") for sentence in sentences)])
        words = pc.split_pattern(pc.replace_substring_regex(text, _MARKS, r" \1 "), " ").flatten()
        encoded = words.dictionary_encode()
        entries = self._look_up(encoded.dictionary.to_pylist())[encoded.indices.to_numpy()]
        lengths = self._lengths[entries]
        ends = np.cumsum(lengths)
        # Place of each token in the table: the start of its word's entry plus its place in the word.
        index = np.arange(ends[-1]) + np.repeat(self._starts[entries] - (ends - lengths), lengths)
        bounds = np.concatenate([ends[entries == 0], ends[-1:]])  # entry 0 is the end of a sentence
        return self._tokens[index], np.diff(bounds, prepend=0)

    def _encode_texts(self, documents: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
        """Returns what `encode` does. The sentence before is the context of a text within a document."""
        spans = [
            (sentences, first)
            for sentences in documents
            for first in range(0, len(sentences), TEXT_SENTENCES)
        ]
        joined = [join_sentences(d[max(0, i - 1) : i + TEXT_SENTENCES]) for d, i in spans]
        encodings = self.tokenizer.encode_batch(
            [text for text, _ in joined], add_special_tokens=False
        )
        tokens, lengths = list[np.ndarray](), list[np.ndarray]()
        for encoding, (_, stops), (_, first) in zip(encodings, joined, spans, strict=True):
            ends = np.array([end for _, end in encoding.offsets], np.int64)
            bounds = np.searchsorted(np.maximum.accumulate(ends), [-1, *stops[:-1]], side="right")
            bounds = np.append(bounds, len(ends))[int(first > 0) :]
            tokens.append(np.array(encoding.ids, self.dtype)[bounds[0] :])
            lengths.append(np.diff(bounds))
        return np.concatenate(tokens), np.concatenate(lengths)

    def _look_up(self, words: list[str]) -> np.ndarray:
        """Returns the table entries of distinct words, (W,), and adds the new ones to the table."""
        if len(self._entries) > self._table_words:
            self._clear_table()
        for group in ([_STOP], words):  # `_tokenize_words` takes the full stop alone
            if new := [word for word in group if word not in self._entries]:
                tokens, lengths = self._tokenize_words(new)
                starts = len(self._tokens) + np.cumsum(lengths) - lengths
                self._entries.update(zip(new, count(len(self._entries))))
                self._lengths = np.concatenate([self._lengths, lengths])
                self._starts = np.concatenate([self._starts, starts])
                self._tokens = np.concatenate([self._tokens, tokens])
        return np.fromiter(map(self._entries.__getitem__, words), np.int64, count=len(words))

    def _tokenize_words(self, words: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns what `_tokenize` returns, in half the time: many words are one text, with full stops between."""
        texts = [f" {_STOP} ".join([*words[i : i + 1000], ""]) for i in range(0, len(words), 1000)]
        tokens, _ = self._tokenize(texts)
        ends = np.flatnonzero(tokens == tokens[-1])
        if len(ends) != len(words):  # a stop is a word, or an unknown token like others
            return self._tokenize(words)
        return np.delete(tokens, ends), np.diff(ends, prepend=-1) - 1

    def _tokenize(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of all texts, concatenated, and each text's number of tokens."""
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        lengths = np.fromiter(map(len, ids), np.int64, count=len(ids))
        return np.fromiter(chain.from_iterable(ids), self.dtype, count=int(lengths.sum())), lengths
