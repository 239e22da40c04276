"""`sample_pairs`: a real labelled task that needs no download, made from the held-out articles of a prepared corpus.

"Are these two passages from one article?" The task shows that the way from pretraining to a score works. It is no
benchmark, not GLUE, and its numbers compare with nothing published. It is fair: pretraining with
`validation_fraction >= HELD_OUT` never sees its articles, train and dev pairs come from different articles, no passage
is used twice, and the classes are balanced, so chance is 50 %. The passages are decoded from the corpus's tokens, so
with an uncased tokenizer they are lower-cased, with spaces around punctuation.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from finetune.data.examples import LabeledExample, TaskData
from finetune.data.tasks import Task
from multicls.corpus import Corpus, held_out_share
from multicls.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HELD_OUT = 0.2  # share of the articles; the default recipe of pretraining holds out the same ones
DEV = 0.4  # share of the held-out articles that dev gets
MAX_ARTICLES = 500  # held-out articles to use of a large corpus
PASSAGE_TOKENS = 24  # whole sentences up to at least this length
MAX_PASSAGES = 80  # of an article: a long one must not make up the whole task
MIN_PAIRS = 20


def read(task: Task, data_dir: str | None) -> TaskData:
    """Returns the pairs made from the corpus folder `data_dir`, the same on every machine.

    Raises:
        UserError: No corpus is given, or too few of its articles are held out.
    """
    from tokenizers import Tokenizer

    if data_dir is None:
        raise UserError(
            f"--task {task.name} is made from a prepared corpus: give --data_dir CORPUS "
            "(python data_prep/run.py --sample --output CORPUS makes one from the embedded sample)."
        )
    corpus = Corpus.open(data_dir)
    tokenizer = Tokenizer.from_file(str(Path(data_dir) / "tokenizer.json"))
    articles: dict[str, list[int]] = {"train": [], "dev": []}
    for number, share in held_out(corpus):
        articles["dev" if share < DEV * HELD_OUT else "train"].append(number)
    pairs = {split: make_pairs(task, corpus, tokenizer, numbers) for split, numbers in articles.items()}
    for split, examples in pairs.items():
        if len(examples) < MIN_PAIRS:
            raise UserError(
                f"{data_dir}: {len(articles[split])} held-out articles give {len(examples)} {split} pairs for task "
                f"{task.name}, too few; prepare more documents."
            )
    counts = ", ".join(f"{len(numbers)} for {split}" for split, numbers in articles.items())
    note = f"articles: {counts}; unseen if pretrained with validation_fraction >= {HELD_OUT}"
    return TaskData(pairs["train"], pairs["dev"], [note])


def held_out(corpus: Corpus) -> list[tuple[int, float]]:
    """Returns number and share of the first held-out articles, on which pretraining validates and never trains."""
    found: list[tuple[int, float]] = []
    for number in range(corpus.num_shards):
        shares = held_out_share(corpus.shard(number).hashes)
        rows = np.flatnonzero(shares < HELD_OUT)
        found += [(int(corpus.starts[number]) + int(row), float(shares[row])) for row in rows]
        if len(found) >= MAX_ARTICLES:
            break
    return found[:MAX_ARTICLES]


def make_pairs(task: Task, corpus: Corpus, tokenizer: Tokenizer, articles: list[int]) -> list[LabeledExample]:
    """Returns balanced pairs: half of an article's passages are paired among themselves, half with other articles'."""
    same: list[tuple[str, str]] = []
    others: list[str] = []
    texts: dict[str, str] = {}
    for article in articles:
        passages = _passages(corpus, tokenizer, article)
        keys = sorted(passages, key=_rank)[:MAX_PASSAGES]
        keys = keys[: len(keys) // 4 * 4]
        half = len(keys) // 2
        same += [(keys[i], keys[i + 1]) for i in range(0, half, 2)]
        others += keys[half:]
        texts |= {key: passages[key] for key in keys}
    # in the order of articles, the passage half a turn away is from another article unless one article holds half
    half = len(others) // 2
    turned = zip(others[:half], others[half:], strict=True)
    different = [(one, other) for one, other in turned if _article(one) != _article(other)]
    count = min(len(same), len(different))
    examples = []
    for label, pairs in (("same", same), ("different", different)):
        for first, second in sorted(pairs, key=lambda pair: _rank(f"{pair}"))[:count]:
            key = f"{first}+{second}"
            examples.append(LabeledExample(key, (texts[first], texts[second]), task.labels.index(label)))
    return sorted(examples, key=lambda example: _rank(example.id))


def _passages(corpus: Corpus, tokenizer: Tokenizer, article: int) -> dict[str, str]:
    """Returns segments of whole sentences by "article:first token", without the rest at the end."""
    document = corpus.row(article)
    passages, begin = {}, 0
    for end in document.offsets[1:].tolist():
        if end - begin >= PASSAGE_TOKENS:
            passages[f"{article}:{begin}"] = tokenizer.decode(document.tokens[begin:end].tolist())
            begin = end
    return passages


def _article(key: str) -> str:
    return key.partition(":")[0]


def _rank(key: str) -> bytes:
    """Returns a sort key that has nothing to do with the text, the same on every machine."""
    return hashlib.sha256(key.encode()).digest()
