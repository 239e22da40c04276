"""The table tells how many seeds are behind a number, and mixes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.report import main
from multicls.errors import UserError


def record(run_id: str, seed: int, score: float, notes: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    train = {"learning_rate": changes.pop("learning_rate", 2e-5)}
    identity = {
        "task": "rte",
        "train_size": 100,
        "head": "cls",
        "seed": seed,
        "model": "abcdef01",
        "train": train,
    } | changes
    return {
        "run_id": run_id,
        "identity": identity,
        "model": "RUN/hf",
        "metric": "acc",
        "score": score,
        "notes": list(notes),
    }


def table(folder: Path, records: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> str:
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records), encoding="utf-8")
    assert main([str(folder)]) == 0
    return capsys.readouterr().out


def test_mean_standard_error_and_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = table(tmp_path, [record("a", 1, 0.5), record("b", 2, 0.6), record("c", 3, 0.7)], capsys)
    # standard deviation 10, over the root of three
    assert "| rte | 100 | cls | RUN/hf (abcdef) | acc | 60.00 | 5.77 | 3 |" in text


def test_other_settings_get_a_row_and_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [record("a", 1, 0.5), record("b", 2, 0.6), record("c", 1, 0.7, learning_rate=5e-5)]
    text = table(tmp_path, lines, capsys)
    assert "| learning_rate |" in text.splitlines()[0]
    assert "| 55.00 | 5.00 | 2 | 2e-05 |" in text and "| 70.00 | - | 1 | 5e-05 |" in text
    assert "different numbers of seeds" in text


def test_repeated_lines_count_once_and_notes_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = table(tmp_path, [record("a", 1, 0.5), record("a", 1, 0.5, ("not the protocol",))], capsys)
    assert "| rte [1] | 100 | cls | RUN/hf (abcdef) | acc | 50.00 | - | 1 |" in text and "[1] not the protocol" in text


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished runs"):
        main([str(tmp_path)])
