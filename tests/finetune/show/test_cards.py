"""Model cards: metadata that the Hub reads, true numbers, no local path, and a snippet that runs."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.data.examples import LabeledExample
from finetune.data.tasks import Task, find_task
from finetune.heads.building import build_head
from finetune.heads.checkpoint import find_checkpoint, load_tokenizer
from finetune.heads.saving import save_model
from finetune.settings import FinetuneSettings
from finetune.show.cards import model_card
from tests.hub_rules import checked_card, snippets

OWN = Task("own_mail", (("mail",),), ("bug", "praise|other", "question"), ("acc", "macro_f1"), "single", "own",
           about="own rows of /home/anna/mail.csv")  # fmt: skip


def rows_of(task: Task, count: int = 6, **values: Any) -> Any:
    classes = max(1, len(task.labels))
    rows = [LabeledExample(f"a:{n}", ("len bal",), float(n * n % classes), **values) for n in range(count)]
    return SimpleNamespace(task=task, train=rows, dev=rows[:3])


def record_of(task: Task, **values: Any) -> dict[str, Any]:
    train = {"learning_rate": 2e-5, "batch_size": 4, "max_steps": 30, "weight_decay": 0.01, "precision": "fp32"}
    metric = task.metrics[0]
    return {
        "run_id": "0123456789ab", "task": task.name, "benchmark": task.benchmark, "model": "/home/anna/models/base",
        "model_name": None, "fingerprint": "ab12", "label": "isobn/multicls", "selection": "dev",
        "train_size": "all", "data_seed": 1,
        "changed": {"isobn.beta": 1.0}, "resolved": {"max_length": 24, "train": train}, "metric": metric,
        "score": 0.75, "scores": {name: 0.75 - 0.25 * n for n, name in enumerate(task.metrics)}, "score_error": 0.05,
        "constant": dict.fromkeys(task.metrics, 0.5), "test_scores": {}, "best_step": 20, "steps": 30, "seed": 1,
        "history": [[10, 0.6, 0.7], [20, 0.5, 0.75], [30, 0.4, 0.7]], "train_rows": 6, "dev_rows": 3,
        "notes": [task.about, "a note"], "versions": {"python": "3.11", "torch": "2.13"},
    } | values  # fmt: skip


def test_the_card_tells_data_scores_and_limits() -> None:
    data, text = checked_card(model_card([record_of(OWN)], [rows_of(OWN)], {}))
    assert data["library_name"] == "transformers" and data["pipeline_tag"] == "text-classification"
    assert data["metrics"] == ["accuracy", "f1"] and not {"base_model", "license", "language", "model-index"} & set(
        data
    )
    assert "| acc | dev | 75.0 (95 % interval 65.2 to 84.8) | 50.0 |" in text
    assert "| macro_f1 | dev | 50.0 | 50.0 |" in text
    assert "| bug | 2 | 1 |" in text and "| praise\\|other | 4 | 2 |" in text and "| all | 6 | 3 |" in text
    assert "step 20 of 30" in text and "`isobn.beta` = 1.0" in text and "the score is optimistic" in text
    assert "- a note" in text and "anna" not in text, "no path of the user's"
    worse, _ = record_of(OWN, score=0.5, score_error=None), None
    _, text = checked_card(model_card([worse], [rows_of(OWN)], {}))
    assert "no better than the constant answer" in text and "interval 6" not in text


def test_repetitions_with_other_seeds_give_the_mean_an_interval() -> None:
    """Scores 70, 75 and 80: mean 75, standard error 2.887, t(2) = 4.303."""
    record = record_of(OWN)
    others = [record_of(OWN, run_id=f"r{seed}", seed=seed, score=score) for seed, score in ((2, 0.7), (3, 0.8))]
    foreign = [record_of(OWN, run_id="f", label="cls", score=0.1), record_of(OWN, run_id="g", fingerprint="cd")]
    _, text = checked_card(model_card([record], [rows_of(OWN)], {}, [*others, *foreign, record]))
    assert "acc over 3 runs (3 seeds of one pretraining and draw (seeds only))" in text
    assert "75.0 (95 % interval of the mean 62.6 to 87.4)" in text
    _, text = checked_card(model_card([record], [rows_of(OWN)], {}, foreign))
    assert "interval of the mean" not in text


def test_a_benchmarks_card_has_a_model_index_and_the_hub_model() -> None:
    task = find_task("rte")
    record = record_of(task, model="bert-base-uncased", selection="holdout", label="cls", changed={})
    data, text = checked_card(model_card([record], [rows_of(task)], {"base_model": "bert-base-uncased"}))
    assert data["base_model"] == "bert-base-uncased" and data["datasets"] == [task.hub[0] if task.hub else ""]
    (result,) = data["model-index"][0]["results"]
    assert result["metrics"][0]["type"] == "accuracy" and result["metrics"][0]["value"] == 0.75
    assert result["dataset"]["config"] == "rte" and "text_pair" in text and "chosen on held-out train rows" in text


def test_joint_scores_and_choices() -> None:
    tasks = [find_task("stsb"), find_task("copa")]
    _, text = checked_card(model_card([record_of(task) for task in tasks], [rows_of(task) for task in tasks], {}))
    assert "task=1" in text and "### copa" in text and "multiply it by 5" in text and "the mean score of train" in text
    data, text = checked_card(model_card([record_of(tasks[1])], [rows_of(tasks[1])], {}))
    assert "pipeline_tag" not in data and "pipeline(" not in text and "AutoTokenizer" in text


@pytest.mark.parametrize("task", ["sst2", "rte", "stsb"])
def test_the_snippet_runs(
    task: str, tiny_multicls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    settings = FinetuneSettings(model=str(tiny_multicls), task=task, head="multicls", max_length=24)
    checkpoint, own = find_checkpoint(str(tiny_multicls)), find_task(task)
    model = build_head(settings, checkpoint, [own])
    card = model_card([record_of(own, label="multicls")], [rows_of(own)], {})
    save_model(model, load_tokenizer(checkpoint, 24), tmp_path / "saved", card)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "saved").iterdir()} == {0o644}
    text = (tmp_path / "saved" / "README.md").read_text(encoding="utf-8")
    (tmp_path / "snippet.py").write_text(snippets(text)[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path / "saved")
    runpy.run_path(str(tmp_path / "snippet.py"))
    found = ast.literal_eval(capsys.readouterr().out)
    answer = found[0] if isinstance(found, list) else found
    texts = ["A sentence to classify.", "A second one."][: len(own.fields)]
    inputs = load_tokenizer(checkpoint, 24)(*texts, truncation=True, max_length=24, return_tensors="pt")
    with torch.no_grad():
        (logits,) = model.eval()(**inputs).logits
    if own.is_regression:
        assert answer["label"] == "score" and answer["score"] == pytest.approx(float(logits[0]), abs=1e-5)
    else:
        assert answer["label"] == own.labels[int(logits.argmax())]
        assert answer["score"] == pytest.approx(float(logits.softmax(0).max()), abs=1e-5)
