"""Shows a row of a corpus and a training example of it as text."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from data_prep.examples import ExampleStream, SpecialIds, TrainingExample
from data_prep.settings import ShowOptions
from data_prep.windows import Part
from multicls.corpus import Corpus
from multicls.errors import UserError
from multicls.files import read_json
from multicls.tokenization import facet_tokens

ROLES = ("cls", "sep", "pad", "mask")


def describe(options: ShowOptions) -> str:
    """Returns a row of a corpus and the training example that its window gives, with its masks."""
    corpus = Corpus.open(options.corpus)
    row = corpus.row(options.row)
    tokenizer = Tokenizer.from_file(str(corpus.path / "tokenizer.json"))
    special = special_ids(corpus, tokenizer, options.num_facets)
    length, seed = options.seq_length, options.seed
    stream = ExampleStream(corpus, special, seq_length=length, seed=seed, validation_fraction=0.0)
    (example,) = stream.examples_of_row(options.row, options.epoch, [options.window])
    which = f"as in epoch {options.epoch} with seed {options.seed}:"
    lines = [
        f"row {options.row}: {row.title!r} ({row.source}: {row.id})",
        f"{len(row.offsets) - 1} sentences, {len(row.tokens)} tokens",
        f"window {options.window} of {stream.num_windows(options.row)}, {which}\n",
    ]
    for sentence in range(example.parts[0].first, example.parts[-1].end):
        tokens = row.tokens[row.offsets[sentence] : row.offsets[sentence + 1]].tolist()
        lines.append(f"  {sentence}: {tokenizer.decode(tokens, skip_special_tokens=False)}")
    for p, part in enumerate(example.parts):
        lines.append(f"\npart {'ABC'[p]}: {_in_words(part)}")
        lines += _sequence(example, p, tokenizer, options.num_facets)
    return "\n".join(lines)


def special_ids(corpus: Corpus, tokenizer: Tokenizer, num_facets: int) -> SpecialIds:
    """Returns the ids of the special tokens as in training.

    Names that differ from BERT's come from the corpus's tokenizer_config.json. A missing one is a
    `UserError`.
    """
    path, names = corpus.path / "tokenizer_config.json", dict[str, str]()
    config = read_json(path) if path.exists() else {}
    for role in ROLES:
        name = config.get(f"{role}_token") or f"[{role.upper()}]"
        names[role] = name["content"] if isinstance(name, dict) else name
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if missing := ", ".join(name for name in names.values() if name not in vocabulary):
        raise UserError(f"the corpus's tokenizer has no {missing}, so no example can be made.")
    added = enumerate(facet_tokens(vocabulary, num_facets), len(vocabulary))
    facets = tuple(vocabulary.get(name, number) for number, name in added)
    return SpecialIds(**{role: vocabulary[name] for role, name in names.items()}, facets=facets)


def _in_words(part: Part) -> str:
    """Returns the sentences of a part and their order."""
    if part.cut == part.end:
        return f"sentence {part.first}, a single segment, so no order to tell"
    segments = f"sentences {part.first} to {part.cut - 1} | {part.cut} to {part.end - 1}"
    return f"{segments}, {'swapped (label 1)' if part.swapped else 'in order (label 0)'}"


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
