"""The comparison with peers, as small as it can be, and its arithmetic."""

import gzip
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks import peer_training, peers
from multicls.errors import UserError
from multicls.files import read_json
from tests.encoders import WORDS

SMALL = ["--steps", "2", "--train_rows", "12", "--draws", "3", "--max_length", "16"]


@pytest.fixture(autouse=True)
def small_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers and our arms learn from short inputs."""
    for peer, arguments in peer_training.PEERS.items():
        monkeypatch.setitem(peer_training.LENGTHS, peer, 32)
        monkeypatch.setitem(arguments, "per_device_train_batch_size", 8)
    flags = ["--data.seq_length=32", "--run.eval_examples=10", "--data.num_workers=0"]
    monkeypatch.setattr(peer_training, "OWN_FLAGS", [*peer_training.OWN_FLAGS, *flags])


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one domain: three topics, each with words of its own."""
    folder = tmp_path_factory.mktemp("domains")
    rng = random.Random(0)
    rows = []
    for number in range(60):
        words = WORDS[number % 3 :: 3]
        sentences = [" ".join(rng.choices(words, k=8)).capitalize() for _ in range(6)]
        rows.append({"text": ". ".join(sentences) + ".", "label": f"topic {number % 3}"})
    (folder / "topics").mkdir()
    for name, kept in (("docs", rows), ("rows", rows[:36])):
        with gzip.open(folder / "topics" / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
    return folder


def run(domains: Path, output: Path, model: Path, *arms: str, more: tuple[str, ...] = ()) -> None:
    words = ["--data", str(domains), "--output", str(output), "--model", str(model), *SMALL, *more]
    assert peers.main([*words, "--arms", *arms]) == 0


def rows_of(folder: Path) -> dict[str, list[str]]:
    """Returns the cells of the report's rows by the first two."""
    lines = [line[2:-2].split(" | ") for line in (folder / "peers.md").read_text().splitlines()]
    return {" | ".join(cells[:2]): cells[2:] for cells in lines if len(cells) > 2}


def query(folder: Path) -> torch.Tensor:
    model = AutoModel.from_pretrained(folder)
    weight: torch.Tensor = model.encoder.layer[0].attention.self.query.weight.detach()
    return weight


def test_peers_train_resume_and_refuse(domains: Path, tmp_path: Path, tiny_bert: Path) -> None:
    run(domains, tmp_path, tiny_bert, "mlm", "tsdae", "simcse")
    rows = rows_of(tmp_path)
    assert float(rows["untouched | bag of words"][0].split(",")[0]) > 90, (
        "the words tell the topics apart"
    )
    assert ", +0.0 (" in rows["untouched | mean"][0]
    for peer in ("mlm", "tsdae", "simcse"):
        record = read_json(tmp_path / f"topics/{peer}-1/record.json")
        assert rows[f"{peer} | mean"][1] == "2" and record["cpu_seconds"] > 0
        trained = query(tmp_path / f"topics/{peer}-1/hf")
        assert 0 < float((trained - query(tiny_bert)).abs().max()) < 0.1
    records = {path: path.stat().st_mtime_ns for path in tmp_path.glob("topics/*/record.json")}
    assert len(records) == 4
    stopped = tmp_path / "topics/untouched-1/record.json"
    stopped.unlink()  # as if it had been stopped
    run(domains, tmp_path, tiny_bert, "mlm", more=("--seeds", "1", "2"))
    changed = [path for path, time in records.items() if path.stat().st_mtime_ns != time]
    assert changed == [stopped]
    seeds = [query(tmp_path / f"topics/mlm-{seed}/hf") for seed in (1, 2)]
    assert not torch.equal(*seeds), "the seed decides nothing"
    with pytest.raises(UserError, match="name it in --arms"):  # not after hours of training
        run(domains, tmp_path, tiny_bert, "mlm", more=("--finetune", "true"))
    with pytest.raises(UserError, match="made with another draws"):
        run(domains, tmp_path, tiny_bert, "mlm", more=("--draws", "4"))
    shutil.copytree(domains / "topics", tmp_path / "other" / "topics")
    with gzip.open(tmp_path / "other" / "topics" / "rows.jsonl.gz", "at") as file:
        file.write('{"text": "one more", "label": "topic 0"}\n')
    with pytest.raises(UserError, match="made with another topics/rows.jsonl.gz"):
        run(tmp_path / "other", tmp_path, tiny_bert, "mlm")


@pytest.mark.slow
def test_our_arms_train_by_the_commands(domains: Path, tmp_path: Path, tiny_bert: Path) -> None:
    run(domains, tmp_path, tiny_bert, "own_text")
    assert "| own_text - untouched mean, 12 rows |" in (tmp_path / "peers.md").read_text()
    assert {"untouched | mean+topics", "own_text | mean+facets+topics"} <= rows_of(tmp_path).keys()
    assert not (tmp_path / "topics/own_text-1/checkpoints").exists()


def test_texts_of_peers(domains: Path, tiny_bert: Path) -> None:
    """Passages hold whole sentences up to their length, and all of the text; blocks have one length."""
    documents = domains / "topics" / "docs.jsonl.gz"
    text = " ".join(peers.read_lines(documents)["text"])
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    long, short = (peer_training.passages(documents, str(tiny_bert), n) for n in (32, 4))
    assert " ".join(long) == text and " ".join(short) == text
    assert all(passage.endswith(".") for passage in short) and len(long) < len(short) / 2
    assert max(len(tokenizer(passage)["input_ids"]) for passage in long) <= 32
    blocks = peer_training.blocks(documents, str(tiny_bert), 32)
    assert {len(block["input_ids"]) for block in blocks} == {32}
    words = " ".join(WORDS[:100])
    kept = peer_training.without_words(words, random.Random(0)).split()
    assert 25 < len(kept) < 55 and peer_training.without_words("one", random.Random(1)) == "one"
