"""The harness on invented samples, and the flags of each script."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import data_prep
from benchmarks.harness import Report, ratio, take_turns
from multicls.evaluation import Scores
from multicls.passages import Passages
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


def test_scale_finds_copies_and_windows_and_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of the second and third of three units of 1,000 documents are copies; each row has a window."""
    monkeypatch.setattr(data_prep, "UNIT", 1000)
    monkeypatch.setattr(data_prep, "ROWS", 1000)
    report = Report("Scale")
    data_prep.measure_scale(3000, tmp_path, report)
    assert "3,000 documents:" in report.text and "| 200 copies |" in report.text
    windows, gigabytes = re.findall(r"\| ([\d,]+) windows \| ([\d.e-]+) ", report.text)[0]
    assert 2900 < int(windows.replace(",", "")) < 3000, "about one in a hundred is held out"
    assert 8 * 1000 < float(gigabytes) * 1e9 < 1e6
    assert not any(tmp_path.iterdir())


def test_each_script_names_a_wrong_flag_without_torch() -> None:
    scripts = ("data_prep", "peers", "domains", "gpu")
    *answers, _ = answers_of([f"benchmarks/{name}.py", "--no_such_flag"] for name in scripts)
    assert len(answers) == len(scripts)
    for answer in answers:
        assert "--no_such_flag: no such flag" in answer and answer.endswith("\n2")
        assert "'torch'" not in answer
