"""Trains a vocabulary, WordPiece as BERT's or a SentencePiece unigram, and writes it as a fast tokenizer.

Both kinds are trained on counts of words, so the text is never held in memory. The same text gives the same bytes on
any number of cores.
"""

from __future__ import annotations

import io
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from multicls.errors import UserError
from multicls.files import atomic_folder, write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Kind = Literal["wordpiece", "unigram"]
NAMES = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
SPECIALS = ["[PAD]", *(f"[unused{k}]" for k in range(16)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # ids 0..; facets: 1..
# The most frequent characters, which make up this share of the text, are entries. A word (WordPiece) or a sequence of
# characters (unigram) with a rarer one is [UNK]. Byte tokens instead would cost 256 entries, and three tokens for each
# character of a script that the vocabulary does not serve anyway; as masked-LM targets they would mean nothing.
COVERAGE = 0.9999
MIN_FREQUENCY = 2  # of a pair that WordPiece merges
LONGEST_WORD = 100  # characters; longer words are [UNK] in every BERT
MOST_WORDS = 1 << 20  # the most frequent distinct words are trained on; counting holds twice as many
MODEL_FILE = "sentencepiece.model"
NEVER = -1e6  # score of an entry that text must not become
NORMAL = 1  # type of an ordinary entry in SentencePiece's model


def train_vocabulary(
    sentences: Iterable[str],
    output: str | Path,
    *,
    kind: Kind = "wordpiece",
    size: int = 30_522,
    cased: bool = False,
    log: Callable[[str], object] = print,
) -> Path:
    """Trains a vocabulary; writes and returns a folder that `AutoTokenizer.from_pretrained` and data preparation read.

    The folder holds tokenizer.json and tokenizer_config.json, and for "unigram" SentencePiece's own
    sentencepiece.model, which has the same ids.

    Args:
        sentences: the text, read once.
        output: the folder, new or empty.
        size: number of entries, including BERT's special tokens and 16 unused ones for facets.
        cased: keeps upper case, and accents, which uncased WordPiece drops.
        log: called with each line of progress.

    Raises:
        UserError: there is no text, the size does not suit the text, or `output` is in use.
    """
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output}: exists; give an --output that is new or empty.")
    if size <= len(SPECIALS):
        raise UserError(f"--size {size}: too small; the special tokens alone take {len(SPECIALS)}.")
    started = time.monotonic()
    words = _count_words(sentences)
    if not words:
        raise UserError("no text in the input: there is nothing to train a vocabulary on.")
    log(f"{words.total():,} words, {len(words):,} different, in {time.monotonic() - started:.0f} s; training {kind}")
    tokenizer, model = (_wordpiece if kind == "wordpiece" else _unigram)(words, size, cased)
    with atomic_folder(output) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        inputs = ["input_ids", "token_type_ids", "attention_mask"]
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, "model_input_names": inputs}
        write_json(folder / "tokenizer_config.json", config | NAMES)
        if model:
            (folder / MODEL_FILE).write_bytes(model)
    log(f"{tokenizer.get_vocab_size():,} entries in {time.monotonic() - started:.0f} s: {output}")
    return output


def _count_words(sentences: Iterable[str]) -> Counter[str]:
    """Returns the number of occurrences of each word; words are split at white space."""
    counts: Counter[str] = Counter()
    for sentence in sentences:
        counts.update(sentence.split())
        if len(counts) > 2 * MOST_WORDS:
            counts = Counter(dict(counts.most_common(MOST_WORDS)))
    return Counter(dict(counts.most_common(MOST_WORDS)))


def _too_small(size: int, needed: int) -> UserError:
    return UserError(f"--size {size}: too small; special tokens and alphabet alone take {needed}. Give more than that.")


def _too_large(size: int, most: int) -> UserError:
    return UserError(
        f"--size {size}: too large for this text; it gives at most {most} entries. Give that, or more text."
    )


def _wordpiece(words: Counter[str], size: int, cased: bool) -> tuple[Tokenizer, bytes]:
    """Trains WordPiece; there is no model file beside the tokenizer."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    normalizer, splitter = normalizers.BertNormalizer(lowercase=not cased), pre_tokenizers.BertPreTokenizer()
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for part, _ in splitter.pre_tokenize_str(normalizer.normalize_str(word)):
            counts[part] += count
    alphabet = _alphabet(counts)
    inside = alphabet & {character for part in counts for character in part[1:]}
    # The trainer numbers characters in the order of a hash table, which differs from run to run, and breaks ties by
    # number. So all characters are given first, in order, as if they were special tokens.
    given = [*sorted(alphabet), *(f"##{character}" for character in sorted(inside))]
    room = size - len(SPECIALS)
    if room < len(given):
        raise _too_small(size, len(SPECIALS) + len(given))
    trainer = trainers.WordPieceTrainer(
        vocab_size=room, min_frequency=MIN_FREQUENCY, special_tokens=given, show_progress=False
    )
    scratch = Tokenizer(models.WordPiece())
    scratch.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    usable = {part: count for part, count in counts.items() if len(part) <= LONGEST_WORD and alphabet.issuperset(part)}
    scratch.train_from_iterator(_repeated(usable), trainer)
    found = scratch.get_vocab(with_added_tokens=False)
    if len(found) < room:
        raise _too_large(size, len(SPECIALS) + len(found))
    entries = [*SPECIALS, *sorted(found, key=found.__getitem__)]
    model = models.WordPiece(
        {entry: number for number, entry in enumerate(entries)},
        unk_token="[UNK]",
        max_input_chars_per_word=LONGEST_WORD,
    )
    return _assemble(model, normalizer, splitter, decoders.WordPiece()), b""


def _alphabet(counts: Counter[str]) -> set[str]:
    """Returns the most frequent characters, which make up the share `COVERAGE` of the text."""
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        for character in word:
            characters[character] += count
    ordered = sorted(characters, key=lambda character: (-characters[character], character))
    before = accumulate((characters[character] for character in ordered), initial=0)
    wanted = COVERAGE * characters.total()
    return {character for character, sum_ in zip(ordered, before, strict=False) if sum_ < wanted}


def _repeated(counts: dict[str, int], most: int = 10_000) -> Iterator[str]:
    """Yields each word as often as it was counted, `most` at a time: the trainer takes no counts."""
    for word, count in counts.items():
        for first in range(0, count, most):
            yield " ".join([word] * min(most, count - first))


def _unigram(words: Counter[str], size: int, cased: bool) -> tuple[Tokenizer, bytes]:
    """Trains a unigram model; returns the tokenizer and SentencePiece's own model file."""
    from sentencepiece import SentencePieceTrainer
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    written = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=(f"{word}\t{count}" for word, count in sorted(words.items())),
            input_format="tsv",  # words with their counts
            model_writer=written,
            model_type="unigram",
            vocab_size=size,
            character_coverage=COVERAGE,
            # The characters of special tokens that text can still have: "[MASK]" in text is split into these.
            required_chars="".join(special for special in SPECIALS if cased or special.islower()),
            normalization_rule_name="nmt_nfkc" if cased else "nmt_nfkc_cf",
            pad_id=0,
            pad_piece="[PAD]",
            unk_id=SPECIALS.index("[UNK]"),
            unk_piece="[UNK]",
            bos_id=-1,
            eos_id=-1,
            control_symbols=[special for special in SPECIALS if special not in ("[PAD]", "[UNK]")],
            max_sentence_length=1 << 20,
            num_threads=16,  # sums depend on it, so it must not depend on the machine
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explained(size, str(error)) from None
    proto = ModelProto.FromString(written.getvalue())
    for piece in proto.pieces:
        piece.score = round(piece.score * 1024) / 1024  # exact sums: float32 and float64 break ties alike
    return _fast_unigram(proto), proto.SerializeToString(deterministic=True)


def _explained(size: int, problem: str) -> UserError:
    """Returns an error of SentencePiece's trainer in our words."""
    if found := re.search(r"set it to a value <= (\d+)", problem):
        return _too_large(size, int(found[1]))
    if found := re.search(r"smaller than required_chars. \d+ vs (\d+)", problem):
        return _too_small(size, int(found[1]))
    return UserError(f"sentencepiece cannot train on this text: {problem}")


def _fast_unigram(proto: Any) -> Tokenizer:
    """Converts SentencePiece's model to a fast tokenizer; ids differ only where several accents stand on one letter."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

    scores = [(piece.piece, piece.score if piece.type == NORMAL else NEVER) for piece in proto.pieces]
    normalizer = normalizers.Sequence(
        [
            # `Precompiled` loses accents when it changes the letter below them (uncased: all capitals). Therefore
            # compose what can be composed, and separate the rest by a character that it removes.
            normalizers.NFC(),
            normalizers.Replace(Regex(r"\Y"), "\x01"),  # inside each grapheme cluster
            normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap),
            normalizers.Replace(Regex("^ +| +$"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.Prepend("▁"),
        ]
    )
    model = models.Unigram(scores, unk_id=SPECIALS.index("[UNK]"), byte_fallback=False)
    splitter = pre_tokenizers.Metaspace(prepend_scheme="never")
    return _assemble(model, normalizer, splitter, decoders.Metaspace(prepend_scheme="always"))


def _assemble(model: Any, normalizer: Any, splitter: Any, decoder: Any) -> Tokenizer:
    """Returns a tokenizer with BERT's special tokens and its form `[CLS] a [SEP] b [SEP]`."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, splitter, decoder
    tokenizer.add_special_tokens(list(NAMES.values()))
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer
