"""The settings of one fine-tuning run. Imports no torch, so that a mistake is answered at once."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from finetune.data.tasks import TASKS
from finetune.heads import FITTED_HEADS, HEADS
from multicls.errors import UserError, did_you_mean
from multicls.settings import Settings

POOLED = ("isobn", "batchnorm", "cln", "probe")  # heads on top of another one, which `pooling` names
HEAD_OPTIONS = ("isobn", "hire", "cln")  # groups of settings that only the head of that name reads
NOT_IN_IDENTITY = ("model", "model_name", "pretraining_seed", "data_dir", "output_dir", "save_model", "predict_test",
                   "config", "trust_remote_code")  # fmt: skip
WITHOUT_EFFECT = ("eval_batch_size", "gradient_checkpointing", "snapshot_minutes", "precision")  # of train, on numbers
OWN_IDENTITY = ("text_column", "label_column", "label_type", "metric", "dev_share")
COLUMNS = ("task", "train_size", "head", "pooling", "selection", "data_seed", "seed")
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class TrainSettings(Settings):
    """Optimisation; the defaults are those of the paper where it names them. None means: chosen from the data."""

    learning_rate: PositiveFloat = Field(2e-5, description="peak learning rate; the paper tries 1 to 7e-5")
    epochs: PositiveInt = Field(20, description="passes over the train rows")
    max_steps: PositiveInt | None = Field(None, description="at most this many steps, whatever the epochs")
    batch_size: PositiveInt | None = Field(None, description="rows a step; 4, 8 or 16 for about 100, 1k or more rows")
    micro_batch_size: PositiveInt | None = Field(
        None, description="rows of a forward pass on each rank (gradient accumulation); default: all"
    )
    eval_batch_size: PositiveInt = Field(64, description="rows of a forward pass in evaluation")
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, slower by about a third"
    )
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="balanced: each class has the same total weight in the loss"
    )
    snapshot_minutes: float = Field(
        5.0, gt=0.0, description="minutes between snapshots, from which a killed run goes on; at evaluations"
    )
    eval_every: PositiveInt | None = Field(None, description="steps between evaluations; two epochs, at most 500")
    patience: PositiveInt = Field(10_000, description="stop after so many steps without a better score")
    warmup_ratio: Fraction = Field(0.1, description="part of the steps with a rising learning rate; it then falls to 0")
    # The paper names none for fine-tuning; 0.01 is that of the protocol it follows (Mosbach et al., 2021).
    weight_decay: float = Field(0.01, ge=0.0, description="decoupled; not on biases and LayerNorms")
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0, description="Adam's second decay rate")
    adam_epsilon: PositiveFloat = Field(1e-8, description="Adam's epsilon")
    max_grad_norm: PositiveFloat = Field(1.0, description="largest norm of the gradient")
    dropout: Fraction | None = Field(None, description="before the classifier; default: the checkpoint's")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 on a GPU that has it, else fp32")


class IsoBnSettings(Settings):
    """Head `isobn` (IsoBN, Eq. 5-7)."""

    momentum: Fraction = Field(0.95, description="weight of the new batch in the moving statistics")
    epsilon: PositiveFloat = Field(0.1, description="added to sigma * gamma")
    beta: Fraction = Field(0.5, description="strength of the normalisation; the paper tries 0.25, 0.5 and 1")


class HireSettings(Settings):
    """Head `hire`, with its ablations."""

    layers: Literal["dynamic", "none", "mean_first6", "mean_last6", "mean_all",
                    "random_first6", "random_last6", "random_all"] = Field(
        "dynamic", description="weights of the layers: HIRE's, no complementary part (A = R), or fixed ones"
    )  # fmt: skip
    fusion: bool = Field(True, description="fuse with the last layer; without it A goes to the output layer")
    fusion_layers: Annotated[int, Field(ge=0, le=3)] = Field(2, description="GRU layers of the fusion")


class ClnSettings(Settings):
    """Head `cln`: any set of tasks in one run."""

    train: Literal["full", "last_linear"] = Field(
        "full", description="train everything, or only the classifiers and the conditional gamma and beta"
    )
    sampling: Literal["size_balanced", "round_robin"] = Field(
        "size_balanced", description="tasks drawn in proportion to their rows, or in turn"
    )


class OwnDataSettings(Settings):
    """Your own labelled rows, instead of a task of the benchmarks."""

    train_file: str | None = Field(None, description="your own rows: CSV, TSV, JSON lines or Parquet")
    dev_file: str | None = Field(None, description="rows to evaluate on; default: dev_share of train_file")
    test_file: str | None = Field(None, description="labelled rows that are scored once, at the end")
    dataset: str | None = Field(None, description="a Hub data set instead: ID or ID:CONFIGURATION; its usual splits")
    text_column: str | None = Field(
        None,
        description="column of the text, or text1,text2 for pairs; default: text, or sentence1,sentence2",
    )
    label_column: str = Field("label", description="column of the label")
    label_type: Literal["auto", "class", "multi_label", "score"] = Field(
        "auto", description="auto: score if labels are numbers that are not all whole, else class"
    )
    metric: str | None = Field(
        None, description="metric that chooses and is reported first; default: acc, micro_f1 or spearman"
    )
    dev_share: float = Field(0.2, gt=0.0, lt=1.0, description="share of train_file for dev without dev_file")
    task_name: str | None = Field(None, description="name in tables; default: the file's or data set's")

    @property
    def source(self) -> str | None:
        """The file or data set of the rows, None if this is a task of the benchmarks."""
        return self.train_file or self.dataset

    @property
    def name(self) -> str:
        """The name of the task in tables and file names."""
        name = self.task_name or Path((self.source or "").split(":")[0]).stem
        return "own_" + re.sub(r"[^A-Za-z0-9-]+", "_", name)


class FinetuneSettings(Settings):
    """One run: a model, a task, a number of train rows, a head and a seed."""

    model: str = Field(description="a pretraining run's hf/ folder, a Hugging Face model folder, a Hub id, or 'sample'")
    model_name: str | None = Field(
        None, description="name in tables; models that differ by their pretraining seed only share one"
    )
    pretraining_seed: int | None = Field(None, ge=0, description="which of the models of that name this is")
    task: str = Field("", description=f"name of the task; several with commas for --head cln: {', '.join(TASKS)}")
    own: OwnDataSettings = OwnDataSettings()
    train_size: PositiveInt | Literal["full"] = Field("full", description="train rows: 100, 1k, any number, or full")
    sampling: Literal["uniform", "balanced"] = Field(
        "uniform", description="how the train rows are drawn: as in the paper, or as many of each class"
    )
    label_noise: Fraction = Field(0.0, description="share of the train rows that get another label")
    data_seed: int = Field(1, ge=0, description="seed of the sample of train rows")
    selection: Literal["dev", "holdout"] = Field(
        "dev", description="what chooses the best evaluation: dev (the papers) or rows held out of train"
    )
    holdout: float = Field(0.2, gt=0.0, lt=1.0, description="share of drawn rows that --selection holdout holds out")
    head: str = Field(
        description="the name of a head, such as cls or multicls; "
        + "; ".join(f"{name}: {about}" for name, about in HEADS.items())
    )
    pooling: Literal["cls", "multicls", "mean"] = Field("cls", description=f"what {', '.join(POOLED)} read")
    isobn: IsoBnSettings = IsoBnSettings()
    hire: HireSettings = HireSettings()
    cln: ClnSettings = ClnSettings()
    seed: int = Field(1, ge=0, description="seed of the new weights, the order of the rows and dropout")
    data_dir: str | None = Field(None, description="folder in the official layout (RTE/train.tsv); default: the hub")
    train_from_dev: bool = Field(False, description="draw train rows from dev, for lack of others (not the protocol)")
    max_length: PositiveInt | None = Field(
        None, description="longest sequence in tokens, facets included; 128, or 256 for SuperGLUE"
    )
    output_dir: str = Field("results", description="folder for results.jsonl and predictions/")
    save_model: bool = Field(False, description="save the model of the best evaluation to OUTPUT_DIR/models/RUN_ID")
    predict_test: bool = Field(False, description="also predict the benchmark's test set, for finetune/submit.py")
    config: str | None = Field(None, description="DeepSpeed JSON, such as ds_configs/zero2.json")
    trust_remote_code: bool = Field(False, description="run the Python code that lies in the model's folder")
    train: TrainSettings = TrainSettings()

    @field_validator("train_size", mode="before")
    @classmethod
    def _thousands(cls, value: object) -> object:
        """Reads `1k` as 1000."""
        if isinstance(value, str) and value.lower().endswith("k") and value[:-1].isdigit():
            return int(value[:-1]) * 1000
        if isinstance(value, str) and value != "full" and not value.isdigit():
            raise ValueError("must be a number of rows such as 100 or 1k, or 'full'")
        return value

    @model_validator(mode="after")
    def _rows_from_one_place(self) -> FinetuneSettings:
        if self.own.train_file and self.own.dataset:
            raise ValueError("give either a train_file or a dataset")
        if (self.own.dev_file or self.own.test_file) and not self.own.train_file:
            raise ValueError("dev_file and test_file need a train_file")
        if bool(self.task) == bool(self.own.source):
            raise ValueError("give either --task NAME, or your own rows by --train_file FILE or --dataset ID")
        return self

    @property
    def task_names(self) -> list[str]:
        """The tasks of a benchmark, more than one for `cln` only; none for own rows."""
        return [name.strip() for name in self.task.split(",")] if self.task else []

    @property
    def label(self) -> str:
        """How the label is read, for tables: the head, its pooling and the tasks that share the model."""
        pooling = f"/{self.pooling}" if self.head in POOLED and self.pooling != "cls" else ""
        joint = f" of {','.join(sorted(self.task_names))}" if len(self.task_names) > 1 else ""
        return self.head + pooling + joint

    def requested(self) -> dict[str, Any]:
        """Returns all that was requested and decides a run's numbers, but for the weights of the model.

        Not in it: where things lie, what else a run leaves, and settings that this run does not read.
        """
        values = self.model_dump(mode="json", exclude=set(NOT_IN_IDENTITY))
        unread = {name for name in HEAD_OPTIONS if name != self.head}
        unread |= {"pooling"} if self.head not in POOLED else set()
        unread |= {"holdout"} if self.selection == "dev" else set()
        if self.train_size == "full":
            unread |= {"sampling"}  # all rows are taken
            unread |= {"data_seed"} if self.selection == "dev" and not self.label_noise else set()
        values = {name: value for name, value in values.items() if name not in unread}
        train = {name: value for name, value in values["train"].items() if name not in WITHOUT_EFFECT}
        values["train"] = {} if self.head in FITTED_HEADS else train
        values["own"] = {name: values["own"][name] for name in OWN_IDENTITY} if self.own.source else {}
        return values | {"task": ",".join(self.task_names) or self.own.name}

    def changed(self) -> dict[str, Any]:
        """Returns what `requested` holds beyond defaults and what tables have columns for, by dotted name."""
        same = {name: getattr(self, name) for name in ("model", "head", "task", "train_size", "selection")}
        same["own"] = self.own.model_copy(update={"metric": None})
        plain = FinetuneSettings(**same).requested()
        mine, default = flatten(self.requested()), flatten(plain)
        return {name: value for name, value in mine.items() if value != default.get(name) and name not in COLUMNS}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def check_names(settings: FinetuneSettings) -> None:
    """Checks the names of tasks and head.

    Raises:
        UserError: some are unknown, or do not go together.
    """
    names = settings.task_names
    problems = [f"--task {name}: no such task.{did_you_mean(name, TASKS)}" for name in names if name not in TASKS]
    if settings.head not in HEADS:
        problems.append(f"--head {settings.head}: no such head.{did_you_mean(settings.head, HEADS)}")
    elif len(names) > 1 and settings.head != "cln":
        problems.append(f"--task {settings.task}: only --head cln trains several tasks together.")
    if len(set(names)) < len(names):
        problems.append(f"--task {settings.task}: a task is given twice.")
    if settings.head in FITTED_HEADS and settings.save_model:
        problems.append(f"--head {settings.head} trains no model that can be saved: leave out --save_model.")
    if settings.own.source and settings.predict_test:
        problems.append("--predict_test: your own rows are no benchmark's; leave it out, or give --test_file.")
    if problems:
        raise UserError(*problems)


def resolve(settings: FinetuneSettings, num_rows: list[int], precision: Literal["fp32", "bf16"]) -> TrainSettings:
    """Returns `settings.train` with every value that depends on the data or the device filled in.

    Args:
        num_rows: train rows that each task has.
        precision: what "auto" means on this device.

    Returns:
        A copy without None but for `dropout` and `micro_batch_size`; `max_steps` is the number of steps of the run.
    """
    train, size = settings.train, settings.train_size
    of_the_paper = 16 if isinstance(size, str) or size > 3000 else 8 if size > 300 else 4
    batch_size = train.batch_size or of_the_paper
    steps_per_epoch = sum(math.ceil(rows / batch_size) for rows in num_rows)
    steps = min(train.epochs * steps_per_epoch, train.max_steps or math.inf)
    return train.model_copy(
        update={
            "batch_size": batch_size,
            "max_steps": int(steps),
            "eval_every": train.eval_every or min(500, 2 * steps_per_epoch),
            "precision": precision if train.precision == "auto" else train.precision,
        }
    )
