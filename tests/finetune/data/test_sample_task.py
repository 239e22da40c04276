"""The demo's labelled task: balanced, from articles that pretraining does not see, train and dev apart."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from finetune.data import sample_task
from finetune.data.examples import LabeledExample
from finetune.data.reading import read_task
from finetune.data.tasks import TASKS
from finetune.run import main
from multicls.corpus import Corpus
from multicls.errors import UserError

NOUNS = ("bal", "del", "fil", "gol", "kul", "man")
TASK = TASKS["sample_pairs"]


@pytest.fixture(scope="module")
def corpus(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 articles of 60 sentences of ten random words, prepared."""
    from data_prep.run import main as prepare

    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    with open(folder / "articles.jsonl", "w", encoding="utf-8") as file:
        for _ in range(100):
            sentences = [" ".join(draw.choice(NOUNS) for _ in range(10)).capitalize() + "." for _ in range(60)]
            file.write(json.dumps({"text": " ".join(sentences)}) + "\n")
    prepare(["--input", str(folder / "articles.jsonl"), "--output", str(folder / "corpus"), "--tokenizer",
             str(tiny_bert), "--workers", "1"])  # fmt: skip
    return folder / "corpus"


def articles(examples: list[LabeledExample]) -> set[int]:
    return {int(key.split(":")[0]) for example in examples for key in example.id.split("+")}


def test_pairs(corpus: Path) -> None:
    data = read_task(TASK, str(corpus))
    assert data.train is not None and read_task(TASK, str(corpus)) == data, "deterministic"
    assert not articles(data.train) & articles(data.dev)
    for examples in (data.train, data.dev):
        assert len(examples) >= 20 and len({example.id for example in examples}) == len(examples)
        assert 2 * sum(example.label for example in examples) == len(examples), "balanced"
        for example in examples:
            first, second = (key.split(":") for key in example.id.split("+"))
            assert (first[0] == second[0]) == bool(example.label) and first != second
        keys = [key for example in examples for key in example.id.split("+")]
        assert len(keys) == len(set(keys)), "no passage twice"


def test_pretraining_does_not_train_on_its_articles(corpus: Path) -> None:
    """The rule is that of data_prep.examples: with this fraction, validation holds the articles and train none."""
    from data_prep.examples import ExampleStream, SpecialIds

    opened = Corpus.open(corpus)
    special = SpecialIds(cls=12, sep=13, pad=0, mask=14, facets=())
    held_out = {number for number, _ in sample_task.held_out(opened)}
    assert 10 < len(held_out) < 35
    for split in ("train", "validation"):
        stream = ExampleStream(
            opened, special, seq_length=64, seed=1, split=split, validation_fraction=sample_task.HELD_OUT
        )
        seen = {example.row for example in stream.examples(0, range(stream.examples_per_epoch))}
        assert seen == (held_out if split == "validation" else set(range(100)) - held_out)


def test_passages_are_whole_sentences_of_the_text(corpus: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    passages = sample_task._passages(Corpus.open(corpus), tokenizer, 0)
    texts = [text.replace(".", "").split() for text in passages.values()]
    assert len(texts) >= 6 and all(len(text) % 10 == 0 and len(text) >= 20 for text in texts), "sentences of ten words"
    lines = (corpus.parent / "articles.jsonl").read_text(encoding="utf-8").lower().replace(".", "").splitlines()
    article = next(words for line in lines if (words := json.loads(line)["text"].split())[:10] == texts[0][:10])
    joined = [word for text in texts for word in text]
    assert joined == article[: len(joined)], "one after the other, nothing left out between"


def test_command(corpus: Path, tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--model",
        str(tiny_bert),
        "--task",
        "sample_pairs",
        "--train_size",
        "20",
        "--head",
        "cls",
        "--max_steps",
        "1",
    ]
    assert main([*arguments, "--max_length", "64", "--data_dir", str(corpus), "--output_dir", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "results.jsonl").read_text(encoding="utf-8"))
    assert record["notes"][0] == "same-article, held-out sample articles; not GLUE"


def test_needs_a_corpus_with_enough_held_out(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for data_dir, message in ((None, "--data_dir CORPUS"), (str(tmp_path), "not a finished corpus")):
        with pytest.raises(UserError, match=message):
            read_task(TASK, data_dir)
    monkeypatch.setattr(sample_task, "MAX_ARTICLES", 2)
    with pytest.raises(UserError, match="too few"):
        read_task(TASK, str(corpus))
