"""Model cards: README.md of a saved model, with metadata that the Hub reads. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.data.examples import LabeledExample
    from finetune.data.selection import TaskRows
    from finetune.data.tasks import Task

Record = Mapping[str, Any]
HUB_METRICS = {"acc": "accuracy", "f1": "f1", "f1a": "f1", "macro_f1": "f1", "micro_f1": "f1",
               "matthews": "matthews_correlation", "pearson": "pearsonr", "spearman": "spearmanr"}  # fmt: skip
CLASSES_SHOWN = 20
TEMPLATE = Path(__file__).with_name("card.md.jinja")


def model_card(records: Sequence[Record], rows: Sequence[TaskRows]) -> str:
    """Returns the card of a saved model as Markdown with the Hub's metadata.

    Args:
        records: the lines of results of the run, one for each task.
        rows: the rows of each task.
    """
    from jinja2 import Environment, StrictUndefined

    first, task = records[0], rows[0].task
    pipeline = task.shape in ("single", "pair")
    texts = ["A sentence to classify.", "A second one."]
    names = ", ".join(_cell(own.task.name) for own in rows)
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        metadata=_metadata(records, rows, pipeline),
        title=f"{names}: {_base(first)} with the head {first['label']}",
        names=names,
        first=first,
        records=records,
        base=_base(first),
        pipeline=pipeline,
        columns=", ".join(_cell(names[0]) for names in task.fields),
        task=task,
        scale=f"{task.label_scale:g}" if task.label_scale != 1 else 1,
        example=str({"text": texts[0], "text_pair": texts[1]}) if task.shape == "pair" else repr(texts[0]),
        tasks=[_task(record, own) for record, own in zip(records, rows, strict=True)],
        settings=_settings(first),
        limits=_limits(records, rows),
    )


def _metadata(records: Sequence[Record], rows: Sequence[TaskRows], pipeline: bool) -> str:
    """Returns the YAML between the card's lines `---`, as the Hub wants it."""
    from huggingface_hub import EvalResult, ModelCardData

    first = records[0]
    results = [
        EvalResult("text-classification", own.task.hub[0], own.task.name, HUB_METRICS[name], round(value, 4),
                   dataset_config=own.task.hub[1], dataset_split="validation", metric_name=name)
        for record, own in zip(records, rows, strict=True) if own.task.hub
        for name, value in record["scores"].items() if name in HUB_METRICS
    ]  # fmt: skip
    scored = {HUB_METRICS[name] for record in records for name in record["scores"] if name in HUB_METRICS}
    data = ModelCardData(
        library_name="transformers",
        base_model=first["model"] if _is_hub_id(first["model"]) else None,
        pipeline_tag="text-classification" if pipeline else None,
        tags=["text-classification", *(["multicls-bert"] if "multicls" in first["label"] else [])],
        metrics=sorted(scored) or None,
        datasets=sorted({own.task.hub[0] for own in rows if own.task.hub}) or None,
        model_name=f"{first['label']}-{first['run_id']}".replace("/", "-") if results else None,
        eval_results=results or None,
    )
    return data.to_yaml()


def _is_hub_id(model: str) -> bool:
    return not Path(model).exists() and bool(re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model))


def _base(record: Record) -> str:
    """Returns the pretrained model in words. A local path is nobody else's business."""
    if _is_hub_id(record["model"]):
        return str(record["model"])
    return _cell(record.get("model_name") or f"a local model (fingerprint {record['fingerprint']})")


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
        scores += [(name, _cell(f"test, {test}"), f"{100 * value:.1f}", "") for name, value in values.items()]
    return {
        "name": _cell(task.name),
        "about": _about(task),
        "head": "score" if task.is_regression else "label",
        "counts": _counts(task, own.train, own.dev),
        "rows": f"{record['dev_rows']} dev rows",
        "constant": "the mean score of train" if task.is_regression else "what is most frequent in train",
        "scores": scores,
    }


def _about(task: Task) -> str:
    """Returns where the rows come from, without the user's paths."""
    if task.hub:
        return f"A task of {task.benchmark}; on the Hub: {task.hub[0]}, configuration {task.hub[1]}."
    if task.benchmark == "own":
        return f"The user's own rows; the text is in {', '.join(_cell(names[0]) for names in task.fields)}."
    return f"Rows of {task.benchmark or 'a prepared corpus'}."


def _counts(task: Task, train: Sequence[LabeledExample], dev: Sequence[LabeledExample]) -> list[tuple[str, int, int]]:
    """Returns the train and dev rows of each class, the most frequent first, and in all."""
    total = ("all", len(train), len(dev))
    if task.is_regression or task.num_choices:
        return [total]
    counts = [Counter(label for example in rows for label in _labels(task, example)) for rows in (train, dev)]
    order = sorted(range(len(task.labels)), key=lambda label: -counts[0][label])
    table = [(_cell(task.labels[label]), counts[0][label], counts[1][label]) for label in order]
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


def _limits(records: Sequence[Record], rows: Sequence[TaskRows]) -> list[str]:
    limits = ["Tested on rows like the train rows only; texts of another kind may score lower."]
    if records[0]["selection"] == "dev":
        limits.append("The dev rows chose the weights and gave the score, so the score is optimistic.")
    for record in records:
        constant, metric = record["constant"].get(record["metric"]), record["metric"]
        if constant is not None and record["score"] <= constant:
            limits.append(f"On {_cell(record['task'])} it is no better than the constant answer ({metric}).")
    if not rows[0].task.is_regression:
        limits.append("The probabilities are not calibrated.")
    limits.append("It needs transformers 5. The licenses of the pretrained model and of the data apply.")
    about = {own.task.about for own in rows}  # of own rows it names the user's file
    notes = [note for record in records for note in record["notes"] if note not in about]
    return [*limits, *dict.fromkeys(_cell(re.sub(r"(/[^\s/:]+)+/", "", note)) for note in notes)]


def _cell(text: object) -> str:
    """Returns a text of the user's that breaks neither a table nor the Markdown around it."""
    return re.sub(r"([|`<>\[\]*\\])", r"\\\1", " ".join(str(text).split()))
