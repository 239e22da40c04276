"""Where there is something to learn, every objective learns it, on documents it has never seen."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.pretrain.conftest import Fork, records, said

pytestmark = [pytest.mark.launcher, pytest.mark.slow]
LEARNT = [("mcqt", 0.9), ("mlm", 0.9), ("tfidf", 0.5), ("so", 0.8)]


@pytest.fixture(scope="module")
def orderly_corpus(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of six sentences: the words tell the topic, and the first word whether a sentence opens or closes."""
    from data_prep.run import main

    folder = tmp_path_factory.mktemp("orderly")
    vocabulary = json.loads((tiny_bert / "tokenizer.json").read_text())["model"]["vocab"]
    opening, closing, *words = sorted(
        word for word in vocabulary if word.isalpha() and len(word) == 3
    )
    topics = [words[start : start + 10] for start in range(0, 200, 10)]
    generator = random.Random(0)
    documents = []
    for _ in range(400):
        topic = generator.choice(topics)
        first_words = [opening, closing] * 3
        sentences = [" ".join([first, *generator.choices(topic, k=9)]) for first in first_words]
        documents.append(" ".join(f"{sentence.capitalize()}." for sentence in sentences))
    (folder / "text.txt").write_text("\n\n".join(documents), encoding="utf-8")
    source = ["--input", str(folder / "text.txt"), "--documents", "blank_line"]
    main([*source, "--output", str(folder / "shards"), "--tokenizer", str(tiny_bert)])
    return folder / "shards"


@pytest.mark.parametrize(("objective", "fraction"), LEARNT)
def test_every_loss_falls(
    fork: Fork, orderly_corpus: Path, tmp_path: Path, objective: str, fraction: float
) -> None:
    flags = ["--corpus", str(orderly_corpus), "--steps", "150", "--train.negatives_group", "8"]
    flags += ["--global_batch_size", "16", "--micro_batch_size", "auto"]
    for other in {"mlm", "tfidf", "so", "mcqt"} - {objective}:
        flags += [f"--objective.{other}", "0"]
    for name in ("log_every", "eval_every", "save_every"):
        flags += [f"--run.{name}", "150"]
    assert fork(tmp_path / "run", flags=tuple(flags)) == [[0]], said(tmp_path / "run")
    first, last = records(tmp_path / "run", "validation")
    assert last[f"loss/{objective}"] < fraction * first[f"loss/{objective}"], said(tmp_path / "run")
