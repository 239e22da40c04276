"""tools/try.py answers sentences with passages of a corpus and with labels; first_look is in tests/pretrain."""

from importlib import import_module
from pathlib import Path

import pytest

from finetune import compare
from multicls.errors import UserError
from tests.finetune.runs import write_rows
from tests.pretrain.conftest import Fork, fork, logs, tiny_run  # noqa: F401  (fixtures)

WORDS = ("river", "city", "music", "war", "church")


def test_nearest_passages_before_and_after(
    fork: Fork,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A passage itself is its own nearest one, by both models."""
    run, flags = tmp_path / "run", ("--model.random_weights", "false", "--steps", "2")
    assert fork(run, flags=flags) == [[0]], logs(run)
    tool = import_module("tools.try")
    monkeypatch.setattr(tool, "SHOWN", 10_000)
    assert tool.main([str(run / "hf"), "river city"]) == 0
    sentence, before, first, *_, after, _, _, _ = capsys.readouterr().out.splitlines()
    assert (sentence, before, after) == ("river city", "before:", "after:")
    passage = first.split(maxsplit=1)[1]
    assert tool.main([str(run), passage]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    for begin in (2, 6):
        found = lines[begin : begin + 3]
        cosines = [float(line.split()[0]) for line in found]
        assert passage in found[0] and cosines[0] == 1.0 and cosines == sorted(cosines)[::-1]


def test_a_label_with_its_probability(
    tmp_path: Path, tiny_bert: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"{WORDS[n % 2]} and {n}", "label": WORDS[n % 2]} for n in range(40)]
    file = write_rows(tmp_path / "own.csv", rows)
    output = str(tmp_path / "out")
    words = ["--train_file", file, "--model", f"tiny={tiny_bert}", "--output_dir", output]
    assert compare.main([*words, "--systems", "words"]) == 0
    capsys.readouterr()
    tool = import_module("tools.try")
    assert tool.main([f"{output}/model", "the river"]) == 0
    sentence, label, first, second = capsys.readouterr().out.splitlines()
    assert (sentence, label.strip()) == ("the river", "river")
    probabilities = [float(line.split()[0]) for line in (first, second)]
    assert [line.split()[1] for line in (first, second)] == ["river", "city"]
    assert probabilities[0] > 0.5 and sum(probabilities) == pytest.approx(1, abs=0.011)
    with pytest.raises(UserError, match="'a.tb': the model reads 1 text; a tab divides two"):
        tool.main([f"{output}/model", "a\tb"])
    with pytest.raises(UserError, match="no finished run"):
        tool.main([str(tmp_path), "the river"])
