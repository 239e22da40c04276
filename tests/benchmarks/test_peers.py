"""The peers, trained as little as they can be, and their texts."""

import gzip
import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks import peers
from multicls.errors import UserError
from multicls.files import read_json
from tests.encoders import WORDS


@pytest.fixture(autouse=True)
def small_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers learn from few short inputs."""
    for peer, arguments in peers.ARGUMENTS.items():
        monkeypatch.setitem(peers.LENGTHS, peer, 32)
        monkeypatch.setitem(arguments, "per_device_train_batch_size", 8)


@pytest.fixture(scope="module")
def domain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 60 documents of six sentences."""
    folder, rng = tmp_path_factory.mktemp("topics"), random.Random(0)
    with gzip.open(folder / "docs.jsonl.gz", "wt") as file:
        for number in range(60):
            words = WORDS[number % 3 :: 3]
            sentences = [" ".join(rng.choices(words, k=8)).capitalize() for _ in range(6)]
            file.write(json.dumps({"text": ". ".join(sentences) + "."}) + "\n")
    return folder


def query(folder: Path) -> torch.Tensor:
    model = AutoModel.from_pretrained(folder)
    weight: torch.Tensor = model.encoder.layer[0].attention.self.query.weight.detach()
    return weight


def test_peers_train_resume_and_refuse(domain: Path, tmp_path: Path, tiny_bert: Path) -> None:
    flags = ["--domain", f"topics={domain}", "--output", str(tmp_path), "--model", str(tiny_bert)]
    assert peers.main([*flags, "--steps", "2"]) == 0
    for peer in peers.ARGUMENTS:
        record = read_json(tmp_path / f"topics/{peer}-1/record.json")
        assert record["steps"] == 2 and record["seconds"] > 0
        trained = query(tmp_path / f"topics/{peer}-1/hf")
        assert 0 < float((trained - query(tiny_bert)).abs().max()) < 0.1
    records = {path: path.stat().st_mtime_ns for path in tmp_path.glob("topics/*/record.json")}
    more = [*flags, "--steps", "2", "--peers", "mlm", "--seeds", "1", "2"]
    assert peers.main(more) == 0
    assert all(path.stat().st_mtime_ns == time for path, time in records.items())
    seeds = [query(tmp_path / f"topics/mlm-{seed}/hf") for seed in (1, 2)]
    assert not torch.equal(*seeds), "the seed decides nothing"
    with pytest.raises(UserError, match="mlm-1: was made otherwise"):
        peers.main([*flags, "--steps", "3"])


def test_texts_of_peers(domain: Path, tiny_bert: Path) -> None:
    """Passages hold whole sentences up to their length, and all of the text; blocks have one length."""
    documents = domain / "docs.jsonl.gz"
    texts = peers.read_lines(documents)["text"].tolist()
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    long, short = (peers.passages(documents, str(tiny_bert), length) for length in (32, 4))
    assert [" ".join(cut) for cut in long] == texts and [" ".join(cut) for cut in short] == texts
    assert all(passage.endswith(".") for cut in short for passage in cut)
    assert sum(map(len, long)) < sum(map(len, short)) / 2
    assert max(len(tokenizer(passage)["input_ids"]) for cut in long for passage in cut) <= 32
    pairs = peers.pairs_of("adjacent", short[:2], seed=1)
    assert pairs["anchor"][:2] == short[0][:2] and pairs["positive"][:2] == short[0][1:3]
    assert len(pairs) == len(short[0]) + len(short[1]) - 2, "no pair spans two documents"
    blocks = peers.blocks(documents, str(tiny_bert), 32)
    assert {len(block["input_ids"]) for block in blocks} == {32}
    words = " ".join(WORDS[:100])
    kept = peers.without_words(words, random.Random(0)).split()
    assert 25 < len(kept) < 55 and peers.without_words("one", random.Random(1)) == "one"
