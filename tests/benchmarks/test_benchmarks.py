"""The harness on invented samples; each script starts, and two measure as little as they can."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks import embeddings, inference, setfit_peer
from benchmarks.harness import Report, ratio, take_turns
from multicls.evaluation import Scores
from multicls.passages import Passages
from tests.finetune.runs import write_rows
from tests.processes import answers_of


def test_both_estimates_of_a_ratio() -> None:
    assert ratio([2.0, 3.0, 9.0], [4.0, 5.0, 6.0]) == pytest.approx((2 / 4, 3 / 5))


def test_cases_take_turns_in_rotated_order_after_the_warm_up() -> None:
    calls: list[str] = []
    cases = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    samples = take_turns(cases, rounds=3, warmup=1)
    assert sorted(calls[:3]) == list("abc") and "".join(calls[3:]) == "abcbcacab"
    assert all(len(seconds) == 3 for seconds in samples.values())


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--data", "/some/where/file.txt", "wiki=/some/where/", "a/b", "0.5"]
    monkeypatch.setattr(sys, "argv", ["benchmarks/invented.py", *words])
    report = Report("An invented benchmark")
    samples = {"theirs": [4.0, 4.0], "ours": [1.0, 1.2]}
    report.compare("Step", samples, "theirs")
    text = report.write(tmp_path).read_text()
    assert "| ours | 1 | 0.25 | 0.275 |" in text and "| theirs | 4 | baseline |" in text
    assert "benchmarks/invented.py --data file.txt wiki=where a/b 0.5`" in text


def test_first_look_finds_next_passages() -> None:
    """The embeddings lie on a circle: neighbours of a document are near, others far, or right between them."""
    documents = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    passages = Passages([], documents)
    near = np.array([0.0, 0.1, 0.25, 2.0, 2.1, 4.0, 4.1, 4.25])
    far = np.array([0.0, 2.0, 4.0, 0.5, 2.5, 4.5, 1.0, 3.0])

    def points(angles: np.ndarray) -> np.ndarray:
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)

    found = passages.hits(points(near)).tolist()
    assert found == [True, False, True, True, False], "the third passage is the furthest"
    assert not any(passages.hits(points(far)))
    after, before = (passages.scores({"mean": points(angles)})["mean"] for angles in (near, far))
    assert after.mean == pytest.approx(0.6) and before.mean == 0.0
    assert passages.difference(after, before).high == np.inf, "three documents are too few"
    many = Passages([], np.concatenate([documents + 3 * number for number in range(4)]))
    units = many.documents[many.queries]
    more, fewer = (
        Scores(np.tile(of.folds, 4), np.zeros((0, len(units))), units) for of in (after, before)
    )
    change = many.difference(more, fewer)
    assert 0.0 < change.low < 0.6 < change.high <= 1.0 and change.mean == pytest.approx(0.6)


def test_setfit_stands_beside_a_linear_model(
    tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its process is left out."""
    rows = [{"text": f"row {n}", "label": n % 2} for n in range(40)]
    file = write_rows(tmp_path / "own.csv", rows)

    def know(self: Any, rows: Any) -> np.ndarray:
        return np.eye(2)[rows.targets]

    with mock.patch.object(setfit_peer.SetFit, "predict", know):
        flags = ["--train_file", file, "--model", str(tiny_bert), "--python", "-"]
        assert setfit_peer.main(flags) == 0
    out = capsys.readouterr().out
    assert "setfit: 100.0 (" in out and "setfit against linear: no clear change" in out


def test_retrieval_of_a_collection(tmp_path: Path) -> None:
    """Two documents are relevant; the query without one is left out."""
    texts = {"a": "wings and heat", "b": "a slipstream of air", "c": "heat of a wing", "d": ""}
    lines = [json.dumps({"id": name, "text": text}) + "\n" for name, text in texts.items()]
    with gzip.open(tmp_path / "docs.jsonl.gz", "wt") as file:
        file.writelines(lines)
    queries = [{"id": "1", "text": "nothing"}, {"id": "2", "text": "slipstream"}]
    (tmp_path / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    (tmp_path / "qrels.tsv").write_text("2\tb\t1\n2\tc\t3\n2\ta\t0\n1\ta\t0\n")
    asked, documents, grades = embeddings.read_collection(tmp_path)
    assert (asked, documents) == (["slipstream"], list(texts.values()))
    assert grades.tolist() == [[0.0, 1.0, 3.0, 0.0]]
    assert int(embeddings.bm25(asked, documents).argmax()) == 1
    ideal = 3 + 1 / np.log2(3)
    assert embeddings.ndcg(np.array([[0.0, 2.0, 3.0, 1.0]]), grades)[0] == pytest.approx(1.0)
    found = embeddings.ndcg(np.array([[3.0, 2.0, 1.0, 0.0]]), grades)[0]
    assert found == pytest.approx((1 / np.log2(3) + 3 / np.log2(4)) / ideal)


def test_ways_to_compare_embeddings() -> None:
    """Scores of 20 queries and 3 documents by hand, at more queries than one pass takes."""
    generator = np.random.default_rng(0)
    sides = [generator.standard_normal((rows, 2, 4)).astype("f4") for rows in (20, 3)]
    views = [{"mean": x[:, 0], "sum": x.sum(1), "facets": x.reshape(len(x), 8)} for x in sides]
    found = embeddings.score_pairs(views[0], views[1], 0.1)
    first, second = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in sides)
    pairs = np.einsum("qsd,ntd->qnst", first, second)
    np.testing.assert_allclose(found["mean"], pairs[..., 0, 0], atol=1e-6)
    np.testing.assert_allclose(found["MaxSim"], pairs.max(-1).sum(-1), atol=1e-6)
    best = 0.1 * pairs.max((-1, -2)) + 0.9 * found["sum"]
    np.testing.assert_allclose(found["Eq. 2"], best, atol=1e-6)


def test_each_script_names_a_wrong_flag_without_torch() -> None:
    scripts = ("data_prep", "inference", "embeddings", "peers")
    *answers, _ = answers_of([f"benchmarks/{name}.py", "--no_such_flag"] for name in scripts)
    assert len(answers) == len(scripts)
    for answer in answers:
        assert "--no_such_flag: no such flag" in answer and answer.endswith("\n2")
        assert "'torch'" not in answer


@pytest.mark.parametrize("name", inference.PAPER)
def test_systems_of_the_inference_benchmark(name: str) -> None:
    small = {"hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1}
    with mock.patch.object(inference, "SIZES", small):
        probabilities = inference.make_system(name, inference.Options(batch_size=2))()
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(2))
