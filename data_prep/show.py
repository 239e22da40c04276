"""Shows a row of a corpus and a training example of it as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from data_prep.examples import ExampleStream, Part, SpecialIds, TrainingExample
from multicls.corpus import Corpus
from multicls.errors import UserError
from multicls.files import read_json
from multicls.tokenization import facet_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROLES = ("cls", "sep", "pad", "mask")


def show(folder: str, number: int, seq_length: int, num_facets: int, seed: int, epoch: int, window: int = 0) -> str:
    """Returns row `number` of a corpus and the training example that its window gives in `epoch`, with its masks.

    Raises:
        UserError: there is no such corpus, row or window, or its tokenizer lacks special tokens.
    """
    from tokenizers import Tokenizer

    corpus = Corpus.open(folder)
    row = corpus.row(number)
    tokenizer = Tokenizer.from_file(str(corpus.path / "tokenizer.json"))
    special = special_ids(corpus, tokenizer, num_facets)
    stream = ExampleStream(corpus, special, seq_length=seq_length, seed=seed, validation_fraction=0.0)
    (example,) = stream.examples_of_row(number, epoch, [window])
    lines = [f"row {number}: {row.title!r} ({row.source}: {row.id})"]
    lines.append(f"{len(row.offsets) - 1} sentences, {len(row.tokens)} tokens")
    lines += [f"window {window} of {stream.num_windows(number)}, as in epoch {epoch} with seed {seed}:", ""]
    for sentence in range(example.parts[0].first, example.parts[-1].end):
        tokens = row.tokens[row.offsets[sentence] : row.offsets[sentence + 1]]
        lines.append(f"  {sentence}: {tokenizer.decode(tokens.tolist(), skip_special_tokens=False)}")
    for p in range(len(example.parts)):
        lines += ["", f"part {'ABC'[p]}: {_describe(example.parts[p])}", *_table(example, p, tokenizer, num_facets)]
    return "\n".join(lines)


def special_ids(corpus: Corpus, tokenizer: Tokenizer, num_facets: int) -> SpecialIds:
    """Returns the ids of the special tokens as in training.

    Names that differ from BERT's come from the corpus's tokenizer_config.json.

    Raises:
        UserError: the tokenizer lacks a special token.
    """
    path = corpus.path / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {}
    named = {role: config.get(f"{role}_token") or f"[{role.upper()}]" for role in ROLES}
    named = {role: name["content"] if isinstance(name, dict) else name for role, name in named.items()}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    missing = [str(name) for name in named.values() if name not in vocabulary]
    if missing:
        raise UserError(f"the corpus's tokenizer has no {', '.join(missing)}, so no example can be made.")
    ids = {role: vocabulary[name] for role, name in named.items()}
    facets = facet_tokens(vocabulary, num_facets)
    return SpecialIds(**ids, facets=tuple(vocabulary.get(name, len(vocabulary) + k) for k, name in enumerate(facets)))


def _describe(part: Part) -> str:
    """Returns the sentences of a part and their order in words."""
    if part.cut == part.end:
        return f"sentence {part.first}, a single segment, so no order to tell"
    segments = f"sentences {part.first} to {part.cut - 1} | {part.cut} to {part.end - 1}"
    return f"{segments}, {'swapped (label 1)' if part.swapped else 'in order (label 0)'}"


def _table(example: TrainingExample, p: int, tokenizer: Tokenizer, num_facets: int) -> list[str]:
    """Returns one line for each segment: `[MASK](was)` is a masked-LM target, `word/7.3` carries its TF-IDF target."""
    length = int(example.attention_mask[p].sum())
    tfidf = np.insert(example.tfidf_labels[p], [1] * num_facets, 0.0)
    lines: dict[int, list[str]] = {0: [], 1: []}
    for i in range(length):
        token_id = int(example.input_ids[p, i])
        facet = 1 <= i <= num_facets
        token = f"[C{i}]" if facet else str(tokenizer.id_to_token(token_id))
        if example.labels[p, i] >= 0:
            token += f"({tokenizer.id_to_token(int(example.labels[p, i]))})"
        if tfidf[i] > 0:
            token += f"/{tfidf[i]:.1f}"
        lines[int(example.token_type_ids[p, i])].append(token)
    padding = f"+ {len(example.input_ids[p]) - length} [PAD]"
    texts = [f"  type {kind}: {' '.join(tokens)}" for kind, tokens in lines.items() if tokens]
    return [*texts, f"  {padding}"]
