"""Model cards: README.md of a saved model, with metadata that the Hub reads. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from multicls.cards import METHOD, cell, model_link, render_card
from multicls.sample import SAMPLE

if TYPE_CHECKING:
    from finetune.data.examples import LabeledExample
    from finetune.data.selection import TaskRows
    from finetune.data.tasks import Task

Record = Mapping[str, Any]
HUB_METRICS = {"acc": "accuracy", "f1": "f1", "f1a": "f1", "macro_f1": "f1", "micro_f1": "f1",
               "matthews": "matthews_correlation", "pearson": "pearsonr", "spearman": "spearmanr"}  # fmt: skip
CLASSES_SHOWN = 20
SMALL = 500  # dev rows
TEMPLATE = Path(__file__).with_name("card.md.jinja")


def model_card(
    records: Sequence[Record], rows: Sequence[TaskRows], inherited: Mapping[str, Any], earlier: Sequence[Record] = ()
) -> str:
    """Returns the card of a saved model as Markdown with the Hub's metadata.

    Args:
        records: the run's lines of results, one for each task, as `rows`.
        inherited: what `multicls.cards.inherited_metadata` says about the pretrained model.
        earlier: all lines of the results folder; runs that differ in seed or draw only say how far the score varies.
    """
    first, task = records[0], rows[0].task
    pipeline = task.shape in ("single", "pair")
    names = ", ".join(cell(own.task.name) for own in rows)
    return render_card(
        TEMPLATE,
        _metadata(records, rows, pipeline) | dict(inherited),
        papers=[METHOD] * ("multicls" in first["label"]) + [first["label"].partition("/")[0]],
        title=f"{names}: a BERT with the head {first['label']}",
        names=names, first=first, records=records, start=_start(first, inherited),
        pipeline=pipeline, columns=_columns(task), task=task,
        parts=[
            (record, own.task, _about(own.task), _counts(own.task, own.train, own.dev), _scores(record),
             _over_runs(record, earlier))
            for record, own in zip(records, rows, strict=True)
        ],
        limits=_limits(records, rows, inherited),
    )  # fmt: skip


def _metadata(records: Sequence[Record], rows: Sequence[TaskRows], pipeline: bool) -> dict[str, Any]:
    """Returns the metadata that the run itself knows, as arguments of `ModelCardData`."""
    from huggingface_hub import EvalResult

    first = records[0]
    results = [
        EvalResult("text-classification", own.task.hub[0], own.task.name, HUB_METRICS[name], round(value, 4),
                   dataset_config=own.task.hub[1], dataset_split="validation", metric_name=name)
        for record, own in zip(records, rows, strict=True) if own.task.hub
        for name, value in record["scores"].items() if name in HUB_METRICS
    ]  # fmt: skip
    return {
        "library_name": "transformers",
        "pipeline_tag": "text-classification" if pipeline else None,
        "tags": ["text-classification", *(["multicls-bert"] if "multicls" in first["label"] else [])],
        "metrics": sorted({HUB_METRICS[name] for one in records for name in one["scores"] if name in HUB_METRICS}),
        "datasets": sorted({own.task.hub[0] for own in rows if own.task.hub}),
        "model_name": f"{first['label']}-{first['run_id']}".replace("/", "-") if results else None,
        "eval_results": results,
    }


def _start(record: Record, inherited: Mapping[str, Any]) -> str:
    """Returns the pretrained model in words, without the user's paths."""
    base, link = inherited.get("base_model"), model_link(inherited)
    if base and record["model"] in (base, SAMPLE):
        return link
    name = f"{cell(record.get('model_name') or 'a local model')} (fingerprint {record['fingerprint']})"
    return f"{name}, trained from {link}" if base else name


def _scores(record: Record) -> list[tuple[str, str, str, str]]:
    """Returns metric, rows, score and the constant answer's score, of dev and of each test set."""
    error, metric, interval = record["score_error"], record["metric"], ""
    if error is not None and error == error:  # not NaN
        low, high = record["score"] - 1.96 * error, min(1.0, record["score"] + 1.96 * error)
        interval = f" (95 % interval {100 * low:.1f} to {100 * high:.1f})"
    constant = {name: f"{100 * value:.1f}" for name, value in record["constant"].items()}
    scores = [(name, "dev", f"{100 * value:.1f}" + interval * (name == metric), constant.get(name, ""))
              for name, value in record["scores"].items()]  # fmt: skip
    return scores + [(name, cell(f"test, {test}"), f"{100 * value:.1f}", "")
                     for test, values in record["test_scores"].items() for name, value in values.items()]  # fmt: skip


def _over_runs(record: Record, earlier: Sequence[Record]) -> str:
    """Returns the mean over this run and its repetitions with other seeds or draws; "" if there are none."""
    from finetune.stats.estimates import estimate

    same = ("task", "label", "fingerprint", "train_size", "selection", "changed")
    alike = {one["run_id"]: one for one in [*earlier, record] if all(one[name] == record[name] for name in same)}
    if len(alike) < 2:
        return ""
    runs = pd.DataFrame({"pretraining": one["fingerprint"], "draw": one["data_seed"], "seed": one["seed"],
                         "score": 100 * one["score"]} for one in alike.values())  # fmt: skip
    found = estimate(runs)
    return (
        f"{record['metric']} over {found.runs} runs ({found.units}), of which this model is one: "
        f"{found.mean:.1f} (95 % interval of the mean {found.low:.1f} to {found.high:.1f})."
    )


def _about(task: Task) -> str:
    """Returns where the rows come from, without the user's paths."""
    if task.hub:
        return f"A task of {task.benchmark}; on the Hub: {task.hub[0]}, configuration {task.hub[1]}."
    if task.benchmark == "own":
        return f"The user's own rows; the text is in {_columns(task)}."
    return f"Rows of {task.benchmark or 'a prepared corpus'}."


def _columns(task: Task) -> str:
    return ", ".join(cell(names[0]) for names in task.fields)


def _counts(task: Task, train: Sequence[LabeledExample], dev: Sequence[LabeledExample]) -> list[tuple[str, int, int]]:
    """Returns the train and dev rows of each class, the most frequent first, and in all."""
    total = ("all", len(train), len(dev))
    if task.is_regression or task.num_choices:
        return [total]
    counts = [Counter(label for example in rows for label in example.classes) for rows in (train, dev)]
    order = sorted(range(len(task.labels)), key=lambda label: -counts[0][label])
    table = [(cell(task.labels[label]), counts[0][label], counts[1][label]) for label in order]
    if rest := table[CLASSES_SHOWN:]:
        others = (f"{len(rest)} other classes", sum(row[1] for row in rest), sum(row[2] for row in rest))
        table[CLASSES_SHOWN:] = [others]
    return [*table, total]


def _limits(records: Sequence[Record], rows: Sequence[TaskRows], inherited: Mapping[str, Any]) -> list[str]:
    languages = ", ".join(inherited.get("language", []))
    limits = [
        f"The pretrained model knows: {languages}. " * bool(languages) + "The language of the rows was not checked.",
        "Biases of the rows and of the pretraining text have not been examined.",
        "Tested on rows like the train rows only; texts of another kind may score lower.",
    ]
    if (small := min(len(own.dev) for own in rows)) < SMALL:
        limits.append(f"Only {small} rows tested it, so the intervals are wide.")
    if records[0]["selection"] == "dev":
        limits.append("The dev rows chose the weights and gave the score, so the score is optimistic.")
    for record in records:
        constant, metric = record["constant"].get(record["metric"]), record["metric"]
        if constant is not None and record["score"] <= constant:
            limits.append(f"On {cell(record['task'])} it is no better than the constant answer ({metric}).")
    if not rows[0].task.is_regression:
        limits.append("The probabilities are not calibrated.")
    about = {own.task.about for own in rows}  # of own rows it names the user's file
    notes = [note for record in records for note in record["notes"] if note not in about]
    return [*limits, *dict.fromkeys(cell(re.sub(r"(/[^\s/:]+)+/", "", note)) for note in notes)]
