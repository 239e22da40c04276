"""Isotropy, facets and layers of fine-tuned models: numbers against worked ones, and the command."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune import isotropy
from finetune.analyze import main
from multicls.errors import UserError
from multicls.files import read_json
from tests.finetune.runs import finetune


def embeddings(rows: int = 400, seed: int = 0) -> np.ndarray:
    """Six dimensions of the spreads 3, 2, 1, 1, 1, 1, uncorrelated to the last digit, around a mean far from 0."""
    draw = np.random.default_rng(seed).normal(size=(rows, 6))
    orthonormal = np.linalg.qr(draw - draw.mean(axis=0))[0]
    return np.sqrt(rows) * orthonormal * [3, 2, 1, 1, 1, 1] + 100


def test_explained_variance_of_known_spreads() -> None:
    expected = np.cumsum([9, 4, 1, 1, 1, 1]) / 17
    np.testing.assert_allclose(isotropy.explained_variance(embeddings()), expected)
    np.testing.assert_allclose(isotropy.explained_variance(7 * embeddings() - 30), expected)
    assert np.isnan(isotropy.explained_variance(np.ones((5, 3)))).all()


def test_correlated_dimensions_come_to_lie_side_by_side() -> None:
    draw = np.random.default_rng(1)
    first, second, constant = *draw.normal(size=(2, 500, 1)), np.full((500, 1), 3.0)
    mixed = np.hstack([first, second, -first, second, first, constant])
    mixed[:, :5] += 0.01 * draw.normal(size=(500, 5))
    matrix = isotropy.correlation(mixed)
    sizes = [
        len(list(run)) for _, run in groupby(range(6), key=lambda i: (matrix[i] > 0.9).argmax())
    ]
    assert sorted(sizes) == [1, 2, 3], "each group stands together"
    assert ((matrix > 0.99) | (matrix < 0.2)).all() and (matrix > 0.99).sum() == 9 + 4 + 1


def test_logit_variance_is_that_of_the_projected_logits() -> None:
    h, weight = embeddings(), np.random.default_rng(2).normal(size=(2, 6))
    values, vectors = np.linalg.eigh(np.cov(h.T))
    direction = weight[1] - weight[0]
    expected = (values * (direction @ vectors) ** 2)[::-1]
    shares = isotropy.logit_variance(h, weight)
    np.testing.assert_allclose(
        shares[:2], (expected / expected.sum())[:2]
    )  # the others have equal eigenvalues
    assert shares.sum() == pytest.approx(1)
    np.testing.assert_allclose(
        isotropy.logit_variance(h, weight + 50.0), shares
    )  # moves no decision
    assert isotropy.logit_variance(h, np.eye(6)[:1])[0] == pytest.approx(
        1
    )  # one output: nothing in common to take out


def test_similarity_of_equal_and_of_orthogonal_facets() -> None:
    vector = np.random.default_rng(3).normal(size=(7, 1, 5))
    alike = isotropy.facet_similarity(vector * np.array([1.0, 2, 3])[:, None])
    np.testing.assert_allclose(alike, np.ones((3, 3)))
    apart = isotropy.facet_similarity(np.broadcast_to(np.eye(3), (7, 3, 3)))
    assert isotropy.off_diagonal_mean(alike) == pytest.approx(1)
    assert isotropy.off_diagonal_mean(apart) == 0


QUICK: dict[str, Any] = {"train_size": 40, "train__max_steps": 6, "save_model": True}


def test_facets_and_isotropy_of_a_run_that_was_moved(
    tiny_multicls: Path, glue: Path, tmp_path: Path
) -> None:
    """A run's folder is enough, wherever it lies: names come from its record, not from the folders above."""
    run = finetune(tiny_multicls, glue, tmp_path / "r", head="multicls", name="mine", **QUICK)
    moved = Path(run["path"]).rename(tmp_path / "moved")
    out = tmp_path / "analysis"
    assert main([str(moved), "--output", str(out), "--examples", "30"]) == 0
    ((label, numbers),) = read_json(out / "analysis.json").items()
    assert label == "sst2-mine-moved" and numbers["rows"] == 30
    assert np.shape(numbers["facets, cosines"]["after"]) == (2, 2)
    assert numbers["EV1, EV2, EV3"].keys() == {
        *("before", "after"),
        *("before, batch norm", "before, IsoBN"),
    }
    assert numbers["EV1, EV2, EV3"]["before, IsoBN"][0] < numbers["EV1, EV2, EV3"]["before"][0]
    assert (out / f"isotropy-{label}.png").exists()


def test_layers_of_hire(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    run = finetune(tiny_bert, glue, tmp_path / "r", head="hire", **QUICK)["path"]
    assert main([run, "--output", str(tmp_path / "a"), "--examples", "20"]) == 0
    ((label, numbers),) = read_json(tmp_path / "a" / "analysis.json").items()
    assert len(numbers["layers"]) == 4 and sum(numbers["layers"]) == pytest.approx(1)
    assert "facets, cosines" not in numbers
    assert (tmp_path / "a" / f"layers-{label}.png").exists()
    with pytest.raises(UserError, match="given twice"):
        main([run, run, "--output", str(tmp_path / "b")])


def test_runs_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run with a saved model"):
        main([str(tmp_path)])


def test_rows_with_several_labels(tiny_bert: Path, tmp_path: Path) -> None:
    rows = [{"text": f"len bal {n}", "label": ["x", "y"][: n % 3]} for n in range(60)]
    (tmp_path / "own.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own = {"own__train_file": str(tmp_path / "own.jsonl"), "train__max_steps": 2}
    settings = {"task": "", "data_dir": "", "save_model": True, **own}
    run = finetune(tiny_bert, tmp_path, tmp_path / "r", **settings)["path"]
    assert main([run, "--output", str(tmp_path / "a")]) == 0
    assert next(iter(read_json(tmp_path / "a" / "analysis.json").values()))["rows"] == 48
