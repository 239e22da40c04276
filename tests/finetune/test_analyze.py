"""Isotropy, facets and layers of fine-tuned models: numbers against worked ones, and the command."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune import analyze
from finetune.analyze import main
from multicls.errors import UserError
from multicls.files import read_json
from tests.finetune.runs import finetune, write_rows


def embeddings(rows: int = 400, seed: int = 0) -> np.ndarray:
    """Six dimensions of the spreads 3, 2, 1, 1, 1, 1, uncorrelated to the last digit, around a mean far from 0."""
    draw = np.random.default_rng(seed).normal(size=(rows, 6))
    orthonormal = np.linalg.qr(draw - draw.mean(axis=0))[0]
    return np.sqrt(rows) * orthonormal * [3, 2, 1, 1, 1, 1] + 100


def test_explained_variance_of_known_spreads() -> None:
    for rows in (embeddings(), 7 * embeddings() - 30):
        found = analyze.explained_variance(rows)
        np.testing.assert_allclose(found, np.cumsum([9, 4, 1]) / 17)


def test_mean_cosine_of_equal_of_orthogonal_and_of_some_facets() -> None:
    vector = np.random.default_rng(3).normal(size=(7, 1, 5))
    assert analyze.mean_cosine(vector * np.array([1.0, 2, 3])[:, None]) == pytest.approx(1)
    assert analyze.mean_cosine(np.broadcast_to(np.eye(3), (7, 3, 3))) == pytest.approx(0)
    assert analyze.mean_cosine(np.array([[[0, 1.0], [2, 0], [3, 0]]])) == pytest.approx(1 / 3)


QUICK: dict[str, Any] = {"train_size": 40, "train__max_steps": 6, "save_model": True}


def test_facets_and_isotropy(
    tiny_multicls: Path, glue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(finetune(tiny_multicls, glue, tmp_path, head="multicls", **QUICK)["path"])
    assert main([str(run), "--examples", "30"]) == 0
    numbers = read_json(run / "analysis.json")
    variance = numbers["EV1, EV2, EV3"]
    assert numbers["rows"] == 30 and variance["before, IsoBN"][0] < variance["before"][0]
    printed = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    cosine = numbers["facets, mean cosine"]["after"]
    assert float(printed["facets, mean cosine.after"]) == pytest.approx(cosine, abs=1e-3)


def test_layers_of_hire(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    run = finetune(tiny_bert, glue, tmp_path, head="hire", **QUICK)["path"]
    assert main([run, "--examples", "20"]) == 0
    numbers = read_json(Path(run, "analysis.json"))
    assert len(numbers["layers"]) == 4 and sum(numbers["layers"]) == pytest.approx(1)
    assert "facets, mean cosine" not in numbers


def test_runs_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run with a saved model"):
        main([str(tmp_path)])


def test_rows_with_several_labels(tiny_bert: Path, tmp_path: Path) -> None:
    rows = [{"text": f"len bal {n}", "label": ["x", "y"][: n % 3]} for n in range(60)]
    file = write_rows(tmp_path / "own.jsonl", rows)
    own = {"task": "", "data_dir": "", "own__train_file": file, "train_size": "full"}
    run = finetune(tiny_bert, tmp_path, tmp_path / "r", **QUICK | own)["path"]
    assert main([run]) == 0 and read_json(Path(run, "analysis.json"))["rows"] == 12
