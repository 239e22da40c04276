"""Tasks in the official layout, of words that the tiny BERT knows, and a tiny Multi-CLS checkpoint."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.finetune.runs import finetune

Tune = Callable[..., dict[str, Any]]

NOUNS = ("bal", "del", "fil", "gol", "kul", "man")  # one token each in the tiny BERT's vocabulary
GOOD, BAD = ("nar", "pel"), ("ros", "tun")


def write_tsv(path: Path, header: str, rows: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *rows, ""]), encoding="utf-8")


def sentiment_rows(count: int, seed: int) -> list[str]:
    draw, rows = random.Random(seed), []
    for label in [draw.randrange(2) for _ in range(count)]:
        rows.append(f"len {draw.choice(NOUNS)} los {draw.choice((BAD, GOOD)[label])}\t{label}")
    return rows


def similarity_rows(count: int, seed: int) -> list[str]:
    """Pairs whose score a model without pretraining can learn: one word of the second text decides it."""
    draw, rows = random.Random(seed), []
    for index in range(count):
        good, noun = draw.randrange(2), draw.choice(NOUNS)
        score = 4.0 * good + draw.uniform(0, 1)
        texts = f"len {noun} los\tthe {noun} los {draw.choice((BAD, GOOD)[good])}"
        rows.append(f"{index}\tg\tf\ty\t0\tn\tn\t{texts}\t{score:.3f}")
    return rows


@pytest.fixture(scope="session")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SST-2 (learnable), STS-B, and QNLI without a train file."""
    folder = tmp_path_factory.mktemp("glue")
    stsb = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"
    for split, count, seed in (("train", 120, 0), ("dev", 60, 1)):
        write_tsv(folder / "SST-2" / f"{split}.tsv", "sentence\tlabel", sentiment_rows(count, seed))
        write_tsv(folder / "STS-B" / f"{split}.tsv", stsb, similarity_rows(count, seed))
    answers = ["entailment" if index % 3 else "not_entailment" for index in range(40)]
    rows = [f"{i}\trol {NOUNS[i % 6]} {i}\t{NOUNS[i % 5]} pel\t{answers[i]}" for i in range(40)]
    write_tsv(folder / "QNLI" / "dev.tsv", "index\tquestion\tsentence\tlabel", rows)
    return folder


@pytest.fixture(scope="session")
def tiny_multicls(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Multi-CLS checkpoint with two facets and three topics, as pretraining exports it."""
    import torch

    from multicls.build import build
    from multicls.modeling_multicls import TopicTable

    folder = tmp_path_factory.mktemp("multicls")
    model, tokenizer = build(str(tiny_bert), num_facets=2, facet_layers=[1], report=lambda _: None)
    model.config.num_topics = 3
    topics = model.multicls.topics = TopicTable(model.config.vocab_size, 3)
    topics.idf += 1
    topics.table += torch.randn(topics.table.shape, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tune(tiny_bert: Path, glue: Path, tmp_path: Path) -> Tune:
    """Makes a quick run of the tiny BERT on SST-2 with the settings passed, and returns its record."""
    return partial(finetune, tiny_bert, glue, tmp_path)
