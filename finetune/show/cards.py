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
        records: the lines of results of the run, one for each task.
        rows: the rows of each task.
        inherited: what `multicls.cards.inherited_metadata` says about the pretrained model.
        earlier: all lines of the results folder; runs that differ in seed or draw only say how far the score varies.
    """
    first, task = records[0], rows[0].task
    pipeline = task.shape in ("single", "pair")
    texts = ["A sentence to classify.", "A second one."]
    names = ", ".join(cell(own.task.name) for own in rows)
    return render_card(
        TEMPLATE,
        _metadata(records, rows, pipeline) | dict(inherited),
        papers=[METHOD] * ("multicls" in first["label"]) + [first["label"].partition("/")[0]],
        title=f"{names}: a BERT with the head {first['label']}",
        names=names,
        first=first,
        records=records,
        start=_start(first, inherited),
        pipeline=pipeline,
        columns=", ".join(cell(names[0]) for names in task.fields),
        task=task,
        scale=f"{task.label_scale:g}" if task.label_scale != 1 else 1,
        example=str({"text": texts[0], "text_pair": texts[1]}) if task.shape == "pair" else repr(texts[0]),
        tasks=[
            _task(record, own) | {"runs": _over_runs(record, earlier)}
            for record, own in zip(records, rows, strict=True)
        ],
        settings=_settings(first),
        limits=_limits(records, rows, inherited),
    )


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


def _task(record: Record, own: TaskRows) -> dict[str, Any]:
    task = own.task
    error, metric = record["score_error"], record["metric"]
    interval = ""
    if error is not None and error == error:  # not NaN
        low, high = record["score"] - 1.96 * error, min(1.0, record["score"] + 1.96 * error)
        interval = f" (95 % interval {100 * low:.1f} to {100 * high:.1f})"
    scores = [
        (name, "dev", f"{100 * value:.1f}" + (interval if name == metric else ""),
         f"{100 * record['constant'][name]:.1f}" if name in record["constant"] else "")
        for name, value in record["scores"].items()
    ]  # fmt: skip
    for test, values in record["test_scores"].items():
        scores += [(name, cell(f"test, {test}"), f"{100 * value:.1f}", "") for name, value in values.items()]
    return {
        "name": cell(task.name),
        "about": _about(task),
        "head": "score" if task.is_regression else "label",
        "counts": _counts(task, own.train, own.dev),
        "rows": f"{record['dev_rows']} dev rows",
        "constant": "the mean score of train" if task.is_regression else "what is most frequent in train",
        "scores": scores,
    }


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
        return f"The user's own rows; the text is in {', '.join(cell(names[0]) for names in task.fields)}."
    return f"Rows of {task.benchmark or 'a prepared corpus'}."


def _counts(task: Task, train: Sequence[LabeledExample], dev: Sequence[LabeledExample]) -> list[tuple[str, int, int]]:
    """Returns the train and dev rows of each class, the most frequent first, and in all."""
    total = ("all", len(train), len(dev))
    if task.is_regression or task.num_choices:
        return [total]
    counts = [Counter(label for example in rows for label in _labels(task, example)) for rows in (train, dev)]
    order = sorted(range(len(task.labels)), key=lambda label: -counts[0][label])
    table = [(cell(task.labels[label]), counts[0][label], counts[1][label]) for label in order]
    if rest := table[CLASSES_SHOWN:]:
        others = (f"{len(rest)} other classes", sum(row[1] for row in rest), sum(row[2] for row in rest))
        table[CLASSES_SHOWN:] = [others]
    return [*table, total]


def _labels(task: Task, example: LabeledExample) -> list[int]:
    if task.multi_label:
        return [label for label, value in enumerate(example.labels) if value]
    return [int(example.label)] if example.label == example.label else []


def _settings(record: Record) -> str:
    """Returns how the model was trained, in sentences."""
    train = record["resolved"]["train"]
    chosen = f"the best of {len(record['history'])} evaluations (step {record['best_step']} of {record['steps']})"
    rows = "held-out train rows" if record["selection"] == "holdout" else "the dev rows"
    lines = [
        f"AdamW with a peak learning rate of {train['learning_rate']:g}, {train['batch_size']} rows a step, up to "
        f"{train['max_steps']} steps, weight decay {train['weight_decay']:g}, {train['precision']}, at most "
        f"{record['resolved']['max_length']} tokens, seed {record['seed']}.",
        f"The weights are those of {chosen}, chosen on {rows}.",
    ]
    if record["changed"]:
        lines.append("Settings that are not the defaults: "
                     + ", ".join(f"`{name}` = {value}" for name, value in record["changed"].items()) + ".")  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return "\n".join([*lines, f"Versions: {versions}."])


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
