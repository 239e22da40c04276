"""A tiny random BERT, tasks in the official layout, and the command in this process."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

NOUNS = ("cat", "dog", "bird", "fish", "tree", "stone")
GOOD, BAD = ("good", "kind"), ("bad", "cruel")


def write_tsv(path: Path, header: str | None, rows: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in ([header] if header else []) + rows), encoding="utf-8")


def sentiment_rows(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    labels = [draw.randrange(2) for _ in range(count)]
    return [f"the {draw.choice(NOUNS)} is {draw.choice((BAD, GOOD)[label])}\t{label}" for label in labels]


def similarity_rows(count: int, seed: int) -> list[str]:
    """Pairs whose score a model without pretraining can learn: one word of the second text decides it."""
    draw, rows = random.Random(seed), []
    for index in range(count):
        good, noun = draw.randrange(2), draw.choice(NOUNS)
        score = 4.0 * good + draw.uniform(0, 1)
        rows.append(f"{index}\tg\tf\ty\t0\tn\tn\tthe {noun} is\tthe {noun} is {draw.choice((BAD, GOOD)[good])}\t{score:.3f}")
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
    rows = [f"{i}\twhat is the {NOUNS[i % 6]}\tthe {NOUNS[i % 5]} is good\t{answers[i]}" for i in range(40)]
    write_tsv(folder / "QNLI" / "dev.tsv", "index\tquestion\tsentence\tlabel", rows)
    return folder


def save_tiny_bert(folder: Path) -> Path:
    """A BertModel with hidden size 32 and 2 layers, random weights, and its tokenizer."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = [*NOUNS, *GOOD, *BAD, "the", "is", "what", "mask", "sep", "[", "]"]
    vocabulary = ["[PAD]", *(f"[unused{i}]" for i in range(6)), "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    tokenizer = BertTokenizerFast.from_pretrained(folder)
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=64, max_position_embeddings=64)  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a plain BERT."""
    return save_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def tiny_multicls(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Multi-CLS checkpoint with two facets, as pretraining exports it."""
    from multicls.initialize import from_bert

    folder = tmp_path_factory.mktemp("multicls")
    model, tokenizer = from_bert(str(tiny_bert), num_facets=2, facet_layers=[1], report=lambda line: None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

