"""The tasks: one table that says what each one is, where its rows are and how it is scored. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from multicls.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Task:
    """One labelled task.

    Attributes:
        name: as given to `--task`.
        fields: for each text of a row, the column names that may hold it (official file, then hub).
        label: column names that may hold the label.
        labels: the labels as written in the official files, in the hub's order; empty for regression.
        metrics: names in `finetune.metrics.METRICS`; the first one chooses the best evaluation.
        shape: "single" text or "pair" of texts.
        folder: name of the folder under `--data_dir`; empty when the rows come from a prepared corpus.
        hub: data set id and configuration on the Hugging Face hub; None when it is not there.
        columns: the columns of an official file that has no header row.
        dev: file stem -> short name of each part of the dev set; parts are pooled for the score and reported apart.
        label_scale: a regression label is divided by it to become the training target.
        drops_short_rows: the official file is known to hold rows with missing columns; they are left out, with a note.
        about: what a reader of the results has to know.
    """

    name: str
    fields: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    shape: Literal["single", "pair"]
    folder: str = ""
    hub: tuple[str, str] | None = None
    label: tuple[str, ...] = ("label",)
    columns: tuple[str, ...] | None = None
    dev: tuple[tuple[str, str], ...] = (("dev", ""),)
    label_scale: float = 1.0
    drops_short_rows: bool = False
    about: str = ""

    @property
    def is_regression(self) -> bool:
        """Whether the label is a number instead of a class."""
        return not self.labels

    @property
    def num_labels(self) -> int:
        """Number of outputs of the classifier (1 for regression)."""
        return max(1, len(self.labels))


GLUE = "nyu-mll/glue"
BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
SENTENCES = (("sentence1",), ("sentence2",))

_TABLE = (
    Task(
        "cola", (("sentence",),), BINARY, ("matthews", "acc"), "single", "CoLA", (GLUE, "cola"),
        columns=("source", "label", "author_mark", "sentence"),
    ),
    Task("sst2", (("sentence",),), BINARY, ("acc",), "single", "SST-2", (GLUE, "sst2")),
    Task(
        "mrpc", (("#1 String", "sentence1"), ("#2 String", "sentence2")), BINARY, ("f1", "acc"), "pair", "MRPC",
        (GLUE, "mrpc"), label=("Quality", "label"),
    ),
    Task(
        "stsb", SENTENCES, (), ("spearman", "pearson"), "pair", "STS-B", (GLUE, "stsb"), label=("score", "label"),
        label_scale=5.0,
    ),
    Task("rte", SENTENCES, ENTAILMENT, ("acc",), "pair", "RTE", (GLUE, "rte")),
    Task("wnli", SENTENCES, BINARY, ("acc",), "pair", "WNLI", (GLUE, "wnli")),
    Task("qnli", (("question",), ("sentence",)), ENTAILMENT, ("acc",), "pair", "QNLI", (GLUE, "qnli")),
    Task(
        "qqp", (("question1",), ("question2",)), BINARY, ("f1", "acc"), "pair", "QQP", (GLUE, "qqp"),
        label=("is_duplicate", "label"), drops_short_rows=True,
    ),
    Task(
        "mnli", (("sentence1", "premise"), ("sentence2", "hypothesis")), ("entailment", "neutral", "contradiction"),
        ("acc",), "pair", "MNLI", (GLUE, "mnli"), label=("gold_label", "label"),
        dev=(("dev_matched", "m"), ("dev_mismatched", "mm")),
    ),
    Task(
        "sample_pairs", (("passage1",), ("passage2",)), ("different", "same"), ("acc",), "pair",
        about="same-article, held-out sample articles; not GLUE",
    ),
)  # fmt: skip

TASKS: dict[str, Task] = {task.name: task for task in _TABLE}


def find_task(name: str) -> Task:
    """The task called `name`.

    Raises:
        UserError: there is none.
    """
    if name not in TASKS:
        raise UserError(f"--task {name}: no such task.{did_you_mean(name, TASKS)}")
    return TASKS[name]
