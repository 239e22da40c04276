"""The evaluation on domains and its records: what is kept suffices for every comparison, and nothing runs twice."""

import gzip
import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import domains
from benchmarks.records import Records, pack, unpack
from multicls.errors import UserError
from tests.encoders import WORDS

VIEW = ("bert", "mean+topics")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one domain of three topics, each with words of its own; a fifth of the labels is wrong."""
    folder = tmp_path_factory.mktemp("domains") / "topics"
    folder.mkdir()
    rng, rows = random.Random(0), list[dict[str, str]]()
    for number in range(400):
        words = rng.choices(WORDS[number % 3 :: 3], k=20)
        label = number % 3 if number % 5 else rng.randrange(3)
        rows.append({"text": " ".join(words), "label": f"topic {label}"})
    for name in ("docs", "rows"):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder.parent


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_bert: Path) -> None:
    monkeypatch.setattr(domains, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(domains, "sample_model", lambda: tiny_bert)


def test_records_keep_what_comparisons_need_and_resume(
    data: Path, tmp_path: Path, tiny_bert: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        shutil.copytree(tiny_bert, tmp_path / f"topics-{seed}")
        (tmp_path / f"topics-{seed}" / "vocab.txt").touch()
    output, choosing = tmp_path / "results" / "bert.json", tmp_path / "choosing"
    command = ["--domain", f"topics={data / 'topics'}", "--draws", "4", "--labels", "20", "10"]
    command += ["--model", f"bert={tmp_path}/{{domain}}-*", "--words", "true"]
    command += ["--output", str(output), "--choosing", str(choosing)]
    assert domains.main(command) == 0
    out = capsys.readouterr().out
    assert "| words | words |" in out and "| bert | mean | " in out
    records = Records.read(output.parent)
    assert [(r.system, r.seed) for r in records.records] == [("bert", 1), ("bert", 2), ("words", 1)]
    first = records.records[0]
    kept, less = first.results[20]["mean+topics"], first.results[10]["mean+topics"]
    assert kept.rows and not less.rows and kept.low < kept.accuracy < kept.high
    scores = records.scores("topics", *VIEW, labels=20)
    assert len(scores) == 2 and scores[0].draws.shape == (4, 100)
    assert np.isfinite(scores[0].draws).sum(axis=1).tolist() == [80] * 4
    assert scores[0].mean == pytest.approx(kept.accuracy, abs=1e-5)
    change, mean = records.differences(["topics"], VIEW, ("words", "words"), labels=20)
    assert change and mean and mean.low == change.low
    assert change.mean == pytest.approx(
        scores[0].mean - records.scores("topics", "words", "words", 20)[0].mean
    )
    chosen = {json.loads(line)["text"] for line in (choosing / "topics.jsonl").open()}
    domain = domains.Domain("topics", data / "topics")
    assert len(chosen) == domains.CHOOSING and not chosen & set(domain.texts)

    before = output.read_bytes()
    assert domains.main(command) == 0 and output.read_bytes() == before
    with pytest.raises(UserError, match="bert, seed 1: its record has another max_length"):
        domains.main([*command, "--max_length", "32"])


PEER = """
import json, sys
import numpy as np
job = json.load(open(sys.argv[2]))
targets = np.array(job["targets"])
answers = {f"draw{n}": targets[scored] for n, (train, scored) in enumerate(job["draws"])}
answers["draw1"][:8] = -1
if sys.argv[1] == "wordllama":
    answers = {"mean": np.eye(3)[targets]}
np.savez(sys.argv[2].replace(".json", ".npz"), **answers)
"""


def test_peers_answer_from_processes_of_their_own(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One predicts all labels but eight of the second draw's 80, one embeds the labels."""
    (tmp_path / "peer.py").write_text(PEER)
    monkeypatch.setattr(domains, "WORKERS", tmp_path / "peer.py")
    command = ["--domain", f"topics={data / 'topics'}", "--draws", "2", "--labels", "20"]
    command += ["--output", str(tmp_path / "peers.json")]
    command += ["--peer", f"semantra={sys.executable}", f"wordllama={sys.executable}"]
    assert domains.main(command) == 0
    semantra, wordllama = Records.read(tmp_path / "peers.json").records
    assert semantra.results[20]["predictions"].accuracy == pytest.approx((1 + 0.9) / 2)
    assert wordllama.results[20]["mean"].accuracy == 1.0
    assert "mean+topics" in wordllama.results[20]
    # Without facets all parts are mean and topics.
    assert wordllama.results[20]["all parts"] == wordllama.results[20]["mean+topics"]


def test_only_the_views_named_are_evaluated(data: Path, tmp_path: Path, tiny_bert: Path) -> None:
    command = ["--domain", f"topics={data / 'topics'}", "--draws", "2", "--labels", "20"]
    command += ["--model", f"bert={tiny_bert}", "--views", "mean", "all parts"]
    assert domains.main([*command, "--output", str(tmp_path / "few.json")]) == 0
    (record,) = Records.read(tmp_path / "few.json").records
    assert list(record.results[20]) == ["mean", "all parts"]


def test_values_survive_packing() -> None:
    generator = np.random.default_rng(0)
    draws = generator.choice([0.0, 1.0, np.nan], size=(5, 300), p=[0.3, 0.6, 0.1])
    np.testing.assert_array_equal(unpack(pack(draws)), draws)


def test_a_missing_folder_is_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder is called nowhere/topics-1"):
        domains.main(
            ["--domain", f"topics={data / 'topics'}", "--model", "a=nowhere/{domain}-1"]
            + ["--output", str(tmp_path / "a.json")]
        )
