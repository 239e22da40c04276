"""Fine-tuned heads on own rows: calibration, thresholds, scores with any offset, and the saved folder."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import expit

from finetune.predict import answers_of
from finetune.results import TrainedSystem
from finetune.run import train_system
from finetune.saved import SavedSystem, write_record
from finetune.tuned import SPREAD, Tuned, fit_thresholds
from multicls.evaluation import Rows
from multicls.systems import fit_temperature
from tests.finetune.conftest import NOUNS

WORDS = (("ros", "nar"), ("tun", "pel"))
MARKS = np.array([(n % 2, n // 2 % 2) for n in range(40)], dtype=float)
TEXTS = [(f"{NOUNS[n % 5]} {WORDS[0][n % 2]} {WORDS[1][n // 2 % 2]}",) for n in range(40)]


def test_a_known_temperature_is_found() -> None:
    """Labels are drawn from the outputs divided by 3; few rows without an error do not ask for 0."""
    draw = np.random.default_rng(0)
    outputs = draw.normal(size=(3000, 2)) * 6
    prior: Any = {"bounds": (-3, 3), "spread": SPREAD}
    labels = (draw.random(3000) < expit((outputs[:, 1] - outputs[:, 0]) / 3)).astype(float)
    assert fit_temperature("class", outputs, labels, **prior) == pytest.approx(3, rel=0.1)
    marks = (draw.random(outputs.shape) < expit(outputs / 3)).astype(float)
    assert fit_temperature("multi_label", outputs, marks, **prior) == pytest.approx(3, rel=0.1)
    right = outputs[:20].argmax(axis=1)
    assert 0.3 < fit_temperature("class", outputs[:20], right, **prior) < 1


def test_thresholds_of_rare_labels_are_lower() -> None:
    """A label whose rows have probabilities about 0.3 is given from below that on; one of 4 rows keeps 0.5."""
    draw = np.random.default_rng(1)
    labels = np.zeros((200, 2))
    labels[:20, 0] = labels[:4, 1] = 1
    probabilities = np.clip(0.1 + 0.2 * labels + draw.normal(0, 0.03, labels.shape), 0.01, 0.9)
    first, second = fit_thresholds(np.log(probabilities / (1 - probabilities)), labels)
    assert 0.15 < first < 0.27 and second == 0.5


def test_several_labels_and_their_thresholds_are_saved(tiny_bert: Path, tmp_path: Path) -> None:
    """The folder alone predicts what the fitted model does; it labels where the output is above 0."""
    rows = Rows("multi_label", MARKS, TEXTS, classes=("New York, NY", "b"))
    tuned = Tuned("mean", str(tiny_bert), 16, learning_rate=3e-3, epochs=20).fit(rows)
    outputs = tuned.predict(rows)
    assert ((outputs > 0) == MARKS).mean() > 0.9 and tuned.shift.shape == (2,)
    tuned.save(tmp_path)
    write_record(tmp_path, "tuned", rows.kind, rows.classes, ["text"])
    saved = SavedSystem(tmp_path)
    np.testing.assert_allclose(saved.predict(TEXTS), outputs, atol=1e-5)
    answers = answers_of(saved.kind, saved.classes, outputs, saved.shift)
    assert answers["predicted_label"].map(len).tolist() == (outputs > 0).sum(axis=1).tolist()
    np.testing.assert_allclose(answers["p_b"], expit(outputs + tuned.shift)[:, 1], atol=1e-5)
    card = (tmp_path / "README.md").read_text()
    assert "`thresholds` of config.json" in card and "are calibrated by a temperature" in card


def test_the_temperature_is_in_the_saved_classifier(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows("class", MARKS[:, 0].astype(int), TEXTS, classes=("a", "b"))
    found = []
    tuned = Tuned("cls", str(tiny_bert), 16, learning_rate=3e-3, epochs=1)
    twice = rows.take(np.arange(80) % 40)  # 16 validation rows
    for temperature in (1.0, 4.0):
        monkeypatch.setattr("finetune.tuned.fit_temperature", lambda *_, t=temperature, **__: t)
        found.append([tuned.fit(of).predict(rows) for of in (twice, rows)])
    np.testing.assert_allclose(found[0][0], 4 * found[1][0], rtol=1e-4)
    np.testing.assert_allclose(found[0][1], found[1][1], err_msg="8 rows have no temperature")


@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-3), ("bf16", 0.02)])
def test_scores_with_any_offset(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, error: float
) -> None:
    """Labels x and 2000 + x give outputs that differ by 2000, also from the saved folder and in 16 bits."""
    monkeypatch.setattr(
        "finetune.training.choose_precision",
        lambda wanted, device: precision if wanted == "auto" else wanted,
    )
    x = np.arange(24) % 2 + 0.1 * np.arange(24) / 24
    found = []
    for offset in (0.0, 2000.0):
        rows = Rows("score", x + offset, TEXTS[:24])
        tuned = Tuned("mean", str(tiny_bert), 16, learning_rate=1e-4, epochs=1).fit(rows)
        found.append(tuned.predict(rows)[:, 0] - offset)
    np.testing.assert_allclose(found[0], found[1], atol=error)
    assert len(np.unique(found[1].round(4))) > 12
    tuned.save(tmp_path)
    write_record(tmp_path, "tuned", "score", (), ["text"])
    again = SavedSystem(tmp_path).predict(TEXTS[:24])[:, 0]
    np.testing.assert_allclose(again, found[1] + 2000.0, atol=error)


def test_the_rows_held_out_pick_the_checkpoint(
    tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of errors that grow with each evaluation is the best one."""
    rows = Rows("score", 9.0 * MARKS[:, 0] + 0.5, TEXTS, metric="mae")
    errors, found = iter(range(1, 100)), list[TrainedSystem]()

    def train(*arguments: Any) -> TrainedSystem:
        found.append(train_system(*arguments))
        return found[0]

    monkeypatch.setattr("finetune.training.score_predictions", lambda *_: {"mae": next(errors)})
    monkeypatch.setattr("finetune.run.train_system", train)
    Tuned("mean", str(tiny_bert), 16, learning_rate=3e-3, epochs=6).fit(rows)
    fields = found[0].fields
    assert fields["best_step"] == fields["history"][0]["step"] < fields["steps"]
