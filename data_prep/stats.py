"""The commands that look into a corpus: `stats`, `show` and `verify`.

Counts come from the manifest. The rest is measured on a sample: on all rows of a small corpus, on
every n-th row of a large one, which is a fair share of all sources and files.
"""

import json
import re
from typing import Any

import numpy as np
import pandas as pd
import xxhash
from tokenizers import Tokenizer

from data_prep.examples import ExampleStream, SpecialIds, TrainingExample
from data_prep.ledger import Ledger, last_lines
from data_prep.settings import CorpusOptions, ExampleOptions, ShowOptions, StatsOptions
from multicls.console import count, print_summary
from multicls.corpus import Corpus
from multicls.errors import UserError
from multicls.files import read_json
from multicls.tokenization import facet_tokens

SAMPLE_TOKENS = 500_000  # rows with about as many are measured for each length, a matter of seconds
PERCENTILES = [0.05, 0.25, 0.5, 0.75, 0.95]
LENGTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512)
MOST_PADDING = 0.2
MOST_CUT, LEAST_ORDER = 0.01, 0.5  # of the text, and of the parts, at a length that fits
MOST_UNKNOWN, MOST_PIECES = 0.01, 2.0  # share of the tokens, and tokens a word
LONG_SENTENCE = 40  # tokens; shorter ones recur by chance
WHOLE_TOKENS = 2_000_000_000  # of the shards that are read as a whole: some minutes
_NO_SPACES = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")


def sample_rows(corpus: Corpus, tokens: int = SAMPLE_TOKENS) -> range:
    """Returns the rows to measure, which hold about `tokens` tokens together."""
    step = max(1, corpus.manifest["tokens"] // tokens)
    return range(min(step // 2, corpus.num_rows - 1), corpus.num_rows, step)


def sample_shards(corpus: Corpus) -> range:
    """Returns the shards to read as a whole: every n-th one of a large corpus."""
    return range(0, corpus.num_shards, 1 + (corpus.manifest["tokens"] - 1) // WHOLE_TOKENS)


def document_lengths(corpus: Corpus) -> np.ndarray:
    """Returns the number of sentences and of tokens of each document of the sampled shards, (2, D)."""
    lengths = list[np.ndarray]()
    for shard in map(corpus.shard, sample_shards(corpus)):  # which has all rows of a document
        rows = np.stack([np.diff(shard.row_starts), shard.num_tokens]).astype(np.int64)
        lengths.append(np.add.reduceat(rows, np.flatnonzero(shard.begins), axis=1))
    return np.concatenate(lengths, axis=1)


def sampled_examples(
    corpus: Corpus, special: SpecialIds, seq_length: int, num_parts: int = 3
) -> list[TrainingExample]:
    """Builds the first epoch's examples of sampled rows, as training does."""
    rows = sample_rows(corpus)
    if not any(len(corpus.row(row).offsets) > num_parts for row in rows):
        return []
    options: Any = {"seq_length": seq_length, "num_parts": num_parts}
    stream = ExampleStream(corpus, special, seed=0, validation_fraction=0, **options)
    return [example for row in rows for example in stream.examples_of_row(row, epoch=0)]


def training_table(
    corpus: Corpus, special: SpecialIds, seq_length: int, num_parts: int = 3
) -> pd.DataFrame:
    """Returns what training sees at `seq_length` and at other lengths: a row of shares for each.

    It is empty if no document has a sentence for each part.
    """
    table = dict[int, dict[str, Any]]()
    around = [special.cls, special.sep, special.pad, *special.facets]  # the text
    for length in sorted({seq_length, *(n for n in LENGTHS if n >= len(special.facets) + 16)}):
        if examples := sampled_examples(corpus, special, length, num_parts):
            cut = sum(example.cut_tokens for example in examples)
            shown = sum((~np.isin(example.input_ids, around)).sum() for example in examples)
            table[length] = {
                "padding": 1 - np.mean([example.attention_mask for example in examples]),
                "parts with an order": np.mean([example.so_labels >= 0 for example in examples]),
                "tokens cut": cut / (cut + shown),
            }
    return pd.DataFrame(table).T.rename_axis("seq_length")


def fitting_length(table: pd.DataFrame) -> int | None:
    """Returns the length with least padding that cuts little text and keeps sentence order; None if none does."""
    fits = (table["tokens cut"] <= MOST_CUT) & (table["parts with an order"] >= LEAST_ORDER)
    return int(table["padding"][fits].idxmin()) if fits.any() else None


def length_hint(table: pd.DataFrame, tokens_a_sentence: np.ndarray) -> str:
    """Returns the length that fits, in words, or what is in its way."""
    if length := fitting_length(table):
        return f"--data.seq_length {length}"
    cut, order = table["tokens cut"].min(), table["parts with an order"].max()
    hint = f"none: at best {cut:.1%} of the text is cut and {order:.0%} of the parts have an order"
    long = tokens_a_sentence[tokens_a_sentence > LENGTHS[-1]].sum() / tokens_a_sentence.sum()
    if long > MOST_CUT:
        hint += f"; sentences of over {LENGTHS[-1]} tokens hold {long:.1%} of the text: code, logs or tables?"
    return hint


def vocabulary_fit(corpus: Corpus, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Returns lines on how well the tokenizer fits: the share of [UNK] and of tokens a word, on sampled rows.

    Text whose words no spaces divide, as in Chinese, has no tokens a word, but where WordPiece divides it.
    """
    tokens = np.concatenate([corpus.row(row).tokens for row in sample_rows(corpus)])
    counts = np.bincount(tokens, minlength=corpus.vocabulary_size)
    texts = [tokenizer.id_to_token(i) or "" for i in range(corpus.vocabulary_size)]
    marks = ("\u0120", "\u2581")  # of byte-pair encoding and sentencepiece: before a word
    is_wordpiece = any(text.startswith("##") for text in texts)
    begins = [t[:2] != "##" if is_wordpiece else t.startswith(marks) for t in texts]
    model = json.loads(tokenizer.to_str())["model"]
    unknown = model.get("unk_token")
    if model.get("unk_id") is not None:  # of sentencepiece's unigrams
        unknown = model["vocab"][model["unk_id"]][0]
    share = counts[texts.index(unknown)] / len(tokens) if unknown in texts else 0.0
    some = tokenizer.decode(tokens[:10_000].tolist())
    has_words = is_wordpiece or len(_NO_SPACES.findall(some)) < len(some) / 5
    pieces = len(tokens) / max(counts[begins].sum(), 1) if has_words else 0.0
    words = f", {pieces:.2f} tokens a word" if has_words else ""
    lines = [("vocabulary", f"{share:.2%} of the tokens are unknown{words}")]
    if share > MOST_UNKNOWN or pieces > MOST_PIECES:
        remedy = "take a model and tokenizer of this language or domain, or train a tokenizer (docs/data.md)"
        lines.append(("warning", f"the tokenizer hardly knows this text: {remedy}."))
    return lines


def held_out_copies(corpus: Corpus, fraction: float = 0.05) -> str:
    """Returns, in words, the share of long held-out sentences that also stand in training."""
    limit, numbers = corpus.validation_limit(fraction), sample_shards(corpus)
    training, held_out = list[np.ndarray](), list[np.ndarray]()
    for number in numbers:
        shard = corpus.shard(number)
        starts = shard.sentence_starts
        long = np.flatnonzero(np.diff(starts) >= LONG_SENTENCE)
        sentences = (shard.tokens[starts[i] : starts[i + 1]].tobytes() for i in long.tolist())
        hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, sentences), np.uint64, count=len(long))
        rows = np.searchsorted(shard.row_starts, long, side="right") - 1
        is_held_out = corpus.held_out(number, limit)[rows]
        held_out.append(hashes[is_held_out])
        training.append(hashes[~is_held_out])
    sought = np.concatenate(held_out)
    share = np.isin(sought, np.concatenate(training)).sum() / max(len(sought), 1)
    what = f"{len(sought):,} held-out sentences of {LONG_SENTENCE} and more tokens"
    where = f" (in one shard of {numbers.step})" if numbers.step > 1 else ""
    return f"{share:.1%} of {what} also stand in training{where}"


def describe(options: ExampleOptions) -> dict[str, Any]:
    """Returns the numbers of a corpus and of what training sees of it, as JSON values."""
    corpus = Corpus(options.corpus)
    tokenizer = Tokenizer.from_file(str(corpus.path / "tokenizer.json"))
    special = special_ids(corpus, tokenizer, options.num_facets)
    training = training_table(corpus, special, options.seq_length, options.num_parts)
    (sentences, tokens), rows = document_lengths(corpus), sample_rows(corpus)
    lengths = {
        "sentences a document": sentences,
        "tokens a document": tokens,
        "tokens a sentence": np.concatenate([np.diff(corpus.row(row).offsets) for row in rows]),
    }
    table = {name: pd.Series(values).describe(PERCENTILES) for name, values in lengths.items()}
    manifest, record = corpus.manifest, read_json(corpus.path / "dropped.json")
    ledger = Ledger(record)
    characters = ledger.totals()[1]
    found = {
        "corpus": options.corpus,
        **{unit: manifest[unit] for unit in ("documents", "rows", "sentences", "tokens")},
        "kept": dict(last_lines(corpus))["kept"],
        "characters": {"taken": dict(ledger.text), "kept": dict(ledger.kept)},
        "sources": manifest["sources"],
        "lengths": json.loads(pd.DataFrame(table).to_json()),
        "left_out": {
            reason: {
                "cases": number,
                "characters": characters[reason],
                "samples": [sample[1:] for sample in ledger.samples[reason][:3]],
            }
            for reason, number in sorted(manifest["dropped"].items(), key=lambda item: -item[1])
        },
        "skipped": record["skipped"],
        "seq_length": json.loads(training.T.to_json()),
    }
    if not training.empty:
        hint = length_hint(training, lengths["tokens a sentence"])
        padding = training["padding"][options.seq_length]
        if padding > MOST_PADDING and "joined_documents" not in manifest["dropped"]:
            hint += "; or join short documents (--short_documents join)"
        more = [*vocabulary_fit(corpus, tokenizer), ("copies", held_out_copies(corpus))]
        found |= {"length that fits": hint, **dict(more)}
    return found


def stats(options: StatsOptions) -> None:
    """Prints what a finished corpus holds, and what training sees of it."""
    found = describe(options)
    if options.as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    units = ("document", "row", "sentence", "token")
    holds = ", ".join(count(found[f"{unit}s"], unit) for unit in units)
    print_summary([("corpus", visible(options.corpus)), ("holds", holds), ("kept", found["kept"])])
    sources = pd.DataFrame(found["sources"]).T.rename(index=visible)
    print(f"\n{sources.map('{:,}'.format).to_string()}\n")
    lengths = pd.DataFrame(found["lengths"]).T
    print(lengths.to_string(float_format="{:,.1f}".format), end="\n\n")
    for reason, entry in found["left_out"].items():
        print(f"{'joined' if 'joined' in reason else 'left out'}: {entry['cases']:,}  {reason}")
        for source, document, text in entry["samples"]:
            print(f"      {visible(f'{text} ({source}: {document})')[:110]}")
    training = pd.DataFrame(found["seq_length"]).T.rename_axis("seq_length")
    if training.empty:
        why = f"no document has {options.num_parts} sentences"
        print(f"\nno example: {why}; prepare it with --short_documents join")
        return
    print(f"\n{training.to_string(float_format='{:.1%}'.format)}\n")
    names = ("length that fits", "vocabulary", "warning", "copies")
    print_summary([(name, found[name]) for name in names if name in found])


def visible(text: str) -> str:
    """Returns the text on one line, with control and other unprintable characters as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def show(options: ShowOptions) -> None:
    """Prints a row of a corpus and the training example that its window gives, with its masks."""
    corpus = Corpus(options.corpus)
    row = corpus.row(options.row)
    tokenizer = Tokenizer.from_file(str(corpus.path / "tokenizer.json"))
    special = special_ids(corpus, tokenizer, options.num_facets)
    settings: Any = options.model_dump(include={"seq_length", "seed", "num_parts"})
    stream = ExampleStream(corpus, special, validation_fraction=0, **settings)
    examples = stream.examples_of_row(options.row, options.epoch)
    if options.window >= len(examples):
        have = f"row {options.row} has no window {options.window}; it has {len(examples)}, from 0"
        raise UserError(f"{corpus.path}: {have}.")
    example = examples[options.window]
    lines = [
        f"row {options.row}: {row.title!r} ({row.source}: {row.id})",
        f"{len(row.offsets) - 1} sentences, {len(row.tokens)} tokens",
        f"window {options.window} of {len(examples)}, as in epoch {options.epoch} with seed {options.seed}:\n",
    ]
    for sentence in range(example.parts[0].first, example.parts[-1].end):
        tokens = row.tokens[row.offsets[sentence] : row.offsets[sentence + 1]].tolist()
        lines.append(f"  {sentence}: {tokenizer.decode(tokens, skip_special_tokens=False)}")
    for p, part in enumerate(example.parts):
        order = "swapped (label 1)" if part.swapped else "in order (label 0)"
        words = f"sentences {part.first} to {part.cut - 1} | {part.cut} to {part.end - 1}, {order}"
        if part.cut == part.end:
            words = f"sentence {part.first}, a single segment, so no order to tell"
        lines.append(f"\npart {'ABC'[p]}: {words}")
        lines += _sequence(example, p, tokenizer, options.num_facets)
    print("\n".join(lines))


def verify(options: CorpusOptions) -> None:
    """Compares every file of a corpus with the manifest's checksums."""
    corpus = Corpus(options.corpus)
    corpus.verify()
    documents, rows = count(corpus.num_documents, "document"), count(corpus.num_rows, "row")
    print(f"{options.corpus}: whole, {documents} ({rows}) in {count(corpus.num_shards, 'shard')}")


def special_ids(corpus: Corpus, tokenizer: Tokenizer, num_facets: int) -> SpecialIds:
    """Returns the ids of the special tokens as in training.

    Names that differ from BERT's come from the corpus's tokenizer_config.json. A missing one is a `UserError`.
    """
    path, names = corpus.path / "tokenizer_config.json", dict[str, str]()
    config = read_json(path) if path.exists() else {}
    for role in ("cls", "sep", "pad", "mask"):
        name = config.get(f"{role}_token") or f"[{role.upper()}]"
        names[role] = name["content"] if isinstance(name, dict) else name
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if missing := ", ".join(name for name in names.values() if name not in vocabulary):
        raise UserError(f"the corpus's tokenizer has no {missing}, so no example can be made.")
    added = enumerate(facet_tokens(vocabulary, num_facets), len(vocabulary))
    facets = tuple(vocabulary.get(name, number) for number, name in added)
    return SpecialIds(**{role: vocabulary[name] for role, name in names.items()}, facets=facets)


def _sequence(example: TrainingExample, p: int, tokenizer: Tokenizer, facets: int) -> list[str]:
    """Returns a line a segment: `[MASK](was)` is a masked-LM target, `word/7.3` has its TF-IDF target."""
    length = int(example.attention_mask[p].sum())
    tfidf = np.insert(example.tfidf_labels[p], [1] * facets, 0.0)
    segments: list[list[str]] = [[], []]
    for i in range(length):
        token = tokenizer.id_to_token(int(example.input_ids[p, i]))
        text = f"[C{i}]" if 1 <= i <= facets else str(token)
        if example.labels[p, i] >= 0:
            text += f"({tokenizer.id_to_token(int(example.labels[p, i]))})"
        if tfidf[i] > 0:
            text += f"/{tfidf[i]:.1f}"
        segments[example.token_type_ids[p, i]].append(text)
    lines = [f"  type {kind}: {' '.join(texts)}" for kind, texts in enumerate(segments) if texts]
    return [*lines, f"  + {len(example.input_ids[p]) - length} [PAD]"]
