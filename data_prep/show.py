"""What training sees of a document, in words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_prep.triples import Example, Part, SpecialIds, TripleStream
from multicls.errors import UserError
from multicls.shards import Corpus
from multicls.tokenization import facet_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_SENTENCES = 12


def show(folder: str, number: int, seq_length: int, num_facets: int, seed: int, epoch: int) -> str:
    """Document `number` of a corpus and the first training example of it in `epoch`.

    Raises:
        UserError: no such corpus or document, or its tokenizer has no BERT special tokens.
    """
    from tokenizers import Tokenizer

    corpus = Corpus.open(folder)
    document = corpus.document(number)
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    special = _special_ids(tokenizer, num_facets)
    stream = TripleStream(corpus, special, seq_length=seq_length, seed=seed, validation_fraction=0.0)
    example = stream.example_of(number, epoch)
    lines = [f"document {number}: {document.title!r} ({document.source}: {document.id})"]
    lines += [f"{len(document.offsets) - 1} sentences, {len(document.pieces)} pieces", ""]
    for sentence in range(min(len(document.offsets) - 1, MOST_SENTENCES)):
        pieces = document.pieces[document.offsets[sentence] : document.offsets[sentence + 1]]
        lines.append(f"  {sentence}: {tokenizer.decode(pieces.tolist(), skip_special_tokens=False)}")
    lines.append("  ..." if len(document.offsets) - 1 > MOST_SENTENCES else "")
    for p in range(len(example.parts)):
        lines += ["", f"part {'ABC'[p]}: {_describe(example.parts[p])}", *_table(example, p, tokenizer, num_facets)]
    return "\n".join(lines)


def _special_ids(tokenizer: Tokenizer, num_facets: int) -> SpecialIds:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    names = ("[CLS]", "[SEP]", "[PAD]", "[MASK]")
    missing = [name for name in names if name not in vocabulary]
    if missing:
        raise UserError(f"the corpus's tokenizer has no {', '.join(missing)}; `show` needs BERT's special tokens.")
    facets = facet_tokens(vocabulary, num_facets)
    ids = [vocabulary.get(facet, len(vocabulary) + k) for k, facet in enumerate(facets)]
    cls, sep, pad, mask = (vocabulary[name] for name in names)
    return SpecialIds(cls=cls, sep=sep, pad=pad, mask=mask, facets=tuple(ids))


def _describe(part: Part) -> str:
    if part.cut == part.end:
        return f"sentence {part.first}, a single run, so no order to tell"
    runs = f"sentences {part.first} to {part.cut - 1} | {part.cut} to {part.end - 1}"
    return f"{runs}, {'swapped (label 1)' if part.swapped else 'in order (label 0)'}"


def _table(example: Example, p: int, tokenizer: Tokenizer, num_facets: int) -> list[str]:
    """One line a run of text: `[MASK](was)` is a masked-LM target, `word/7.3` carries its TF-IDF target."""
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
