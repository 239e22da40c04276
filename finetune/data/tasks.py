"""The tasks: one table that says what each is, where its rows are and how it is scored. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from multicls.errors import UserError, did_you_mean

Parts = tuple[tuple[str, str], ...]
SHOWN = 20  # names of labels in a message


@dataclass(frozen=True)
class Task:
    """One labelled task.

    Its shape is a "single" text; a "pair" of texts; "choice": a sequence for each choice, softmax over them; "span":
    one or two texts in which two spans are marked; "multi_answer": a pair for each answer, scored by question.
    """

    name: str  # as given to `--task`
    fields: tuple[tuple[str, ...], ...]  # for each text, the column names that may hold it (official file, then hub)
    labels: tuple[str, ...]  # as the benchmark's submissions spell them, in the hub's order; empty for regression
    metrics: tuple[str, ...]  # of `data.metrics`; the first picks the checkpoint; "mean(..)" is the mean of the others
    shape: Literal["single", "pair", "choice", "span", "multi_answer"]
    benchmark: Literal["glue", "superglue", "cs224n", "own", ""] = ""  # "own" for a user's rows
    folder: str = ""  # name of the folder under `--data_dir`; empty when the rows come from a prepared corpus
    hub: tuple[str, str] | None = None  # data set id and configuration on the Hugging Face hub
    label: tuple[str, ...] = ("label",)  # column names that may hold the label
    columns: tuple[str, ...] = ()  # of train and dev files that have no header row
    train: str = "train"  # file stem of the train rows; empty where there are none
    dev: Parts = (("dev", ""),)  # file stem -> short name of each part; parts are pooled for the score and told apart
    test: Parts = ()  # the same for the test set
    submissions: tuple[tuple[str, int], ...] = ()  # for each part of test: stem of its file, number of predictions
    diagnostics: tuple[str, ...] = ()  # tasks without train rows, which a model trained on this task predicts
    label_scale: float = 1.0  # a regression label is divided by it to become the training target
    num_choices: int = 0  # sequences to choose from; 0 for other shapes
    num_spans: int = 0  # spans marked in a row; 0 for other shapes
    drops_short_rows: bool = False  # train and dev rows with missing columns or no label are left out, with a note
    multi_label: bool = False  # a row has any number of the labels; C sigmoid outputs
    # Index of the text that rows share, given if a third of the rows or more share it. Rows of one passage stay
    # together in hold-outs and bootstraps.
    passage: int | None = None
    about: str = ""  # what a reader of the results has to know

    @property
    def is_regression(self) -> bool:
        """True if the label is a number instead of a class."""
        return not self.labels

    @property
    def num_labels(self) -> int:
        """Number of outputs of the classifier for a sequence: 1 for regression and for choices."""
        return 1 if self.num_choices else max(1, len(self.labels))

    @property
    def max_length(self) -> int:
        """The paper's sequence length in tokens, facets included."""
        return 256 if self.benchmark == "superglue" else 128


BINARY = ("0", "1")
BOOLEAN = ("false", "true")
ENTAILMENT = ("entailment", "not_entailment")
NLI = ("entailment", "neutral", "contradiction")
SENTENCE, SENTENCES = (("sentence",),), (("sentence1",), ("sentence2",))
PREMISE = (("premise",), ("hypothesis",))
ACC, CORRELATIONS = ("acc",), ("spearman", "pearson")


def _task(benchmark: str, name: str, fields: tuple[tuple[str, ...], ...], labels: tuple[str, ...],
          metrics: tuple[str, ...], folder: str, test_rows: int, **options: object) -> Task:  # fmt: skip
    """Returns a task of GLUE or SuperGLUE, with what most of them have in common."""
    common: dict[str, object] = {"shape": "single" if len(fields) == 1 else "pair", "hub": ("nyu-mll/glue", name),
                                 "test": (("test", ""),), "submissions": ((folder, test_rows),)}  # fmt: skip
    if benchmark == "superglue":
        common |= {"hub": ("aps/super_glue", name), "dev": (("val", ""),)}
    about = common | options
    return Task(name, fields, labels, metrics, benchmark=benchmark, folder=folder, **about)  # type: ignore[arg-type]


_glue, _super = partial(_task, "glue"), partial(_task, "superglue")
_TABLE = (
    _glue("cola", SENTENCE, BINARY, ("matthews", "acc"), "CoLA", 1063,
          columns=("source", "label", "author_mark", "sentence")),
    _glue("sst2", SENTENCE, BINARY, ACC, "SST-2", 1821),
    _glue("mrpc", (("#1 String", "sentence1"), ("#2 String", "sentence2")), BINARY, ("f1", "acc"), "MRPC", 1725,
          label=("Quality", "label")),
    _glue("stsb", SENTENCES, (), CORRELATIONS, "STS-B", 1379, label=("score", "label"), label_scale=5.0),
    _glue("qqp", (("question1",), ("question2",)), BINARY, ("f1", "acc"), "QQP", 390965,
          label=("is_duplicate", "label"), drops_short_rows=True),
    _glue("mnli", (("sentence1", "premise"), ("sentence2", "hypothesis")), NLI, ACC, "MNLI", 0,
          label=("gold_label", "label"), dev=(("dev_matched", "m"), ("dev_mismatched", "mm")),
          test=(("test_matched", "m"), ("test_mismatched", "mm")),
          submissions=(("MNLI-m", 9796), ("MNLI-mm", 9847)), diagnostics=("ax",), passage=0),
    _glue("qnli", (("question",), ("sentence",)), ENTAILMENT, ACC, "QNLI", 5463, passage=0),
    _glue("rte", SENTENCES, ENTAILMENT, ACC, "RTE", 3000),
    _glue("wnli", SENTENCES, BINARY, ACC, "WNLI", 146, passage=0),
    _glue("ax", (("sentence1", "premise", "Premise"), ("sentence2", "hypothesis", "Hypothesis")), NLI, ("matthews",),
          "AX", 1104, label=("label", "Label"), train="", dev=(), test=(("AX", ""),)),
    _super("boolq", (("passage",), ("question",)), BOOLEAN, ACC, "BoolQ", 3245, passage=0),
    _super("cb", PREMISE, ("entailment", "contradiction", "neutral"), ("mean(acc,macro_f1)", "acc", "macro_f1"),
           "CB", 250),
    _super("copa", (("premise",), ("question",)), BINARY, ACC, "COPA", 500, shape="choice", num_choices=2),
    _super("multirc", (("passage", "paragraph"), ("question",)), BINARY, ("mean(f1a,em)", "f1a", "em"), "MultiRC",
           9693, shape="multi_answer", passage=0),
    _super("record", (("passage",), ("query",)), BINARY, ("mean(record_f1,record_em)", "record_f1", "record_em"),
           "ReCoRD", 10000, shape="multi_answer", passage=0),
    _super("rte_superglue", PREMISE, ENTAILMENT, ACC, "RTE", 3000, hub=("aps/super_glue", "rte"),
           diagnostics=("axb", "axg")),
    _super("wic", SENTENCES, BOOLEAN, ACC, "WiC", 1400, shape="span", num_spans=2, passage=0),
    _super("wsc", (("text",),), ("False", "True"), ACC, "WSC", 146, shape="span", num_spans=2, passage=0,
           hub=("aps/super_glue", "wsc.fixed")),
    _super("axb", SENTENCES, ENTAILMENT, ("matthews", "acc"), "AX-b", 1104, train="", dev=(), test=(("AX-b", ""),)),
    _super("axg", PREMISE, ENTAILMENT, ("acc", "gender_parity"), "AX-g", 356, train="", dev=(),
           test=(("AX-g", ""),)),
    Task("sst5", SENTENCE, ("0", "1", "2", "3", "4"), ACC, "single", "cs224n", ".", label=("sentiment",),
         train="ids-sst-train", dev=(("ids-sst-dev", ""),)),
    Task("quora", SENTENCES, ("0.0", "1.0"), ("acc", "f1"), "pair", "cs224n", ".", label=("is_duplicate",),
         train="quora-train", dev=(("quora-dev", ""),), drops_short_rows=True),
    Task("sts", SENTENCES, (), ("pearson", "spearman"), "pair", "cs224n", ".", label=("similarity",),
         train="sts-train", dev=(("sts-dev", ""),), label_scale=5.0),
    Task("sample_pairs", (("passage1",), ("passage2",)), ("different", "same"), ACC, "pair",
         about="same-article, held-out sample articles; not GLUE"),
)  # fmt: skip

TASKS: dict[str, Task] = {task.name: task for task in _TABLE}


def find_task(name: str) -> Task:
    """Returns the task of that name.

    Raises:
        UserError: There is none.
    """
    if name not in TASKS:
        raise UserError(f"--task {name}: no such task.{did_you_mean(name, TASKS)}")
    return TASKS[name]


def label_list(labels: Sequence[str]) -> str:
    """Returns the names of labels for a message, quoted if one holds a comma; of many the first ones."""
    quote = repr if any("," in label for label in labels) else str
    return ", ".join(map(quote, labels[:SHOWN])) + ", ..." * (len(labels) > SHOWN)


def task_of(record: Mapping[str, Any]) -> Task:
    """Returns the task of a record; for a user's own rows, which are in no table, only what scores them."""
    name, labels = record["task"], tuple(record.get("labels", () if "pearson" in record["scores"] else ("",)))
    if record["benchmark"] != "own":
        return find_task(name)
    return Task(
        name, (), labels, tuple(record["scores"]), "single", "own", multi_label=record.get("multi_label", False)
    )
