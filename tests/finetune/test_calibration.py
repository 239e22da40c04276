"""Calibration: a known temperature is found, is in the saved model, thresholds suit rare labels."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit
from sklearn.metrics import f1_score

from finetune.benchmark_tasks import read_task
from finetune.calibration import fit_temperature, fit_thresholds
from finetune.predict import answers_of, predict
from finetune.results import load_predictions
from finetune.tasks import TASKS, task_of
from multicls.files import read_json
from tests.finetune.runs import finetune, write_rows


def test_a_known_temperature_is_found() -> None:
    """Labels are drawn from the outputs divided by 3; few rows without an error do not ask for 0."""
    draw = np.random.default_rng(0)
    outputs = draw.normal(size=(3000, 2)) * 6
    labels = (draw.random(3000) < expit((outputs[:, 1] - outputs[:, 0]) / 3)).astype(float)
    assert fit_temperature(TASKS["rte"], outputs, labels) == pytest.approx(3, rel=0.1)
    several = replace(TASKS["rte"], multi_label=True)
    marks = (draw.random(outputs.shape) < expit(outputs / 3)).astype(float)
    assert fit_temperature(several, outputs, marks) == pytest.approx(3, rel=0.1)
    right = outputs[:20].argmax(axis=1)
    assert 0.3 < fit_temperature(TASKS["rte"], outputs[:20], right) < 1
    assert fit_temperature(TASKS["rte"], outputs[:9], labels[:9]) == 1.0
    assert fit_temperature(TASKS["stsb"], outputs[:, :1], labels) == 1.0


def test_thresholds_of_rare_labels_are_lower() -> None:
    """A label whose rows have probabilities about 0.3 is given from below that on; one of 4 rows keeps 0.5."""
    draw = np.random.default_rng(1)
    labels = np.zeros((200, 2))
    labels[:20, 0] = labels[:4, 1] = 1
    probabilities = np.clip(0.1 + 0.2 * labels + draw.normal(0, 0.03, labels.shape), 0.01, 0.9)
    first, second = fit_thresholds(np.log(probabilities / (1 - probabilities)), labels)
    assert 0.15 < first < 0.27 and second == 0.5


def test_the_temperature_of_a_run(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    """It is fitted on the validation split, is in the saved classifier."""
    values: dict[str, Any] = {"train_size": 100, "selection": "holdout", "save_model": True}
    record = finetune(tiny_bert, glue, tmp_path, head="mean", **values)
    splits = load_predictions(Path(record["path"]), "sst2")
    (entry,) = record["tasks"]
    held = splits["validation"]
    temperature = fit_temperature(TASKS["sst2"], held["logits"], held["labels"])
    assert entry["temperature"] == pytest.approx(temperature) and temperature != 1
    dev, task = read_task(TASKS["sst2"], str(glue)).dev, replace(TASKS["sst2"], max_length=24)
    found = predict(str(Path(record["path"]) / "model"), 0, task, dev)
    scaled = splits["dev"]["logits"] / temperature
    np.testing.assert_allclose(found, scaled, rtol=1e-3, atol=1e-4)
    assert read_json(Path(record["path"]) / "model" / "config.json")["thresholds"] == [[]]
    assert "calibrated by one temperature" in (Path(record["path"]) / "model/README.md").read_text()


def test_the_scores_are_with_the_thresholds_that_the_model_has(
    tiny_bert: Path, tmp_path: Path
) -> None:
    draw = np.random.default_rng(0)
    rows = [
        {
            "text": f"{('len', 'nar')[n % 2]} bal {n}",
            "label": ["a"] * (n % 2) + ["b"] * (draw.random() < 0.4),
        }
        for n in range(120)
    ]
    own = {"train_file": write_rows(tmp_path / "t.jsonl", rows), "dev_share": 0.3}
    values: dict[str, Any] = {"head": "mean", "selection": "holdout", "train__epochs": 4}
    values |= {
        "data_dir": "",
        "task": "",
        "own": own,
        "save_model": True,
    }
    record = finetune(tiny_bert, tmp_path, tmp_path, **values)
    (entry,), folder = record["tasks"], Path(record["path"])
    table = pd.read_parquet(folder / "predictions.parquet").query("split == 'dev'")
    task = task_of(entry["description"])
    outputs = np.stack(list(table["outputs"])) / entry["temperature"]
    answers = answers_of(task, outputs, entry["thresholds"])["predicted_label"]
    assert [", ".join(names) for names in answers] == list(table["predicted"])
    marks = [[name in names for name in task.labels] for names in answers]
    score = f1_score(np.stack(list(table["target"])), np.array(marks), average="micro")
    dev = entry["splits"]["dev"]
    assert dev["scores"]["micro_f1"] == pytest.approx(score)
