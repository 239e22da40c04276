"""The settings of one fine-tuning run. Imports no torch, so that errors are reported at once."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from finetune.heads import HEADS
from finetune.tasks import TASKS
from multicls.errors import did_you_mean
from multicls.labels import LabelledSettings
from multicls.settings import RecipeOptions, Settings

RECIPES = "finetune/recipes"
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
THOUSANDS = BeforeValidator(lambda value: re.sub("(?i)k$", "000", str(value)))  # 1k is 1000
Shots = Annotated[str, Field(pattern=r"^[1-9]\d*-shot$")]  # rows of each class
TrainSize = Annotated[PositiveInt | Literal["full"] | Shots, THOUSANDS]
# Which settings count: each head reads some of them or of their groups, and of these some change no number of a run.
READ_BY = {  # others are read by all heads
    **{name: {name} for name in ("isobn", "hire", "cln")},
    "pooling": {"isobn", "cln"},
}
NOT_COMPARED: dict[str, Any] = {
    "train": {"checkpoint_minutes"},
    "save_model": True,
}


class TrainSettings(Settings):
    """Optimisation. The defaults are those of the paper where it names them; None is chosen from the data."""

    learning_rate: PositiveFloat = Field(2e-5, description="peak; the paper tries 1e-5 to 7e-5")
    epochs: PositiveInt = Field(20, description="passes over the training rows")
    max_steps: PositiveInt | None = Field(None, description="at most this many steps")
    batch_size: PositiveInt | None = Field(None, description="rows a step; null: 4, 8 or 16")
    checkpoint_minutes: PositiveFloat = Field(5.0, description="minutes between checkpoints")
    eval_every: PositiveInt | None = Field(None, description="steps; default: 2 epochs, max. 500")
    warmup_ratio: Fraction = Field(0.1, description="share of the steps with a rising rate")
    # The paper names none for fine-tuning; 0.01 is that of the protocol it follows (Mosbach et al., 2021).
    weight_decay: float = Field(0.01, ge=0.0, description="decoupled; not on biases and LayerNorms")
    adam_beta2: Fraction = Field(0.999, description="AdamW's decay of squared gradients")
    adam_epsilon: PositiveFloat = Field(1e-8, description="AdamW's epsilon")
    max_grad_norm: PositiveFloat = Field(1.0, description="largest norm of the gradient")
    dropout: Fraction | None = Field(None, description="before the classifier; null: checkpoint's")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="auto: bf16 on a GPU that has it, fp16 on others, fp32 on a CPU"
    )


class IsoBnSettings(Settings):
    """Head `isobn` (IsoBN, Eq. 5-7)."""

    momentum: Fraction = Field(0.95, description="weight of the new batch in the statistics")
    epsilon: PositiveFloat = Field(0.1, description="added to sigma * gamma")
    beta: Fraction = Field(0.5, description="strength; the paper tries 0.25, 0.5 and 1")


class HireSettings(Settings):
    """Head `hire`, with its ablations."""

    layers: Literal["dynamic", "none"] = Field("dynamic", description="none: the last layer alone")
    fusion: bool = Field(True, description="fuse the weighted sum with the last layer")
    fusion_layers: int = Field(2, ge=0, le=3, description="GRU layers of the fusion")


class ClnSettings(Settings):
    """Head `cln`: any set of tasks in one run."""

    train: Literal["full", "last_linear"] = Field(
        "full", description="last_linear: only the classifiers and what CLN adds"
    )
    sampling: Literal["proportional", "round_robin"] = Field("proportional", description="of tasks")


class RowSettings(LabelledSettings):
    """Files of your own labelled rows."""

    train_file: str | None = Field(None, description="own rows: CSV, TSV, JSON lines or Parquet")
    test_file: str | None = Field(None, description="rows scored at the end; they pick nothing")
    group_column: str | None = Field(None, description="such as customer; its rows stay together")
    metric: str | None = Field(None, description="main metric, which picks what is to be picked")


class SystemSettings(Settings):
    """The settings that make a system: what is trained and how. A grid shares them among its runs."""

    head: str = Field("", description="; ".join(f"{name}: {text}" for name, text in HEADS.items()))
    pooling: Literal["cls", "multicls", "mean", "facets"] = Field(
        "cls", description=f"the embedding that {', '.join(sorted(READ_BY['pooling']))} read"
    )
    isobn: IsoBnSettings = IsoBnSettings()
    hire: HireSettings = HireSettings()
    cln: ClnSettings = ClnSettings()
    selection: Literal["dev", "holdout"] = Field(
        "dev", description="rows that pick the checkpoint; holdout: a fifth of the training rows"
    )
    max_length: PositiveInt | None = Field(None, description="most tokens; 128, in SuperGLUE 256")
    train: TrainSettings = TrainSettings()
    config: str | None = Field(None, description="DeepSpeed JSON, such as ds_configs/zero2.json")
    save_model: bool = Field(False, description="save the best model in the run's folder")


class RunSettings(SystemSettings, RecipeOptions):
    """One run: a model, a task, a number of training rows, a head and a seed."""

    head: str = Field(
        "mean", description="; ".join(f"{name}: {text}" for name, text in HEADS.items())
    )
    model: str = Field("", description="a RUN/hf folder, a model folder, a Hub id, or 'sample'")
    name: str | None = Field(None, description="name of the system; default: model and head")
    pretraining: PositiveInt = Field(1, description="number of the system's pretrained checkpoint")
    task: str = Field("", description=f"one, or several with commas for cln: {', '.join(TASKS)}")
    data_dir: str | None = Field(None, description="folder of official files; default: the Hub")
    train_size: TrainSize = Field("full", description="100, 1k, 8-shot (8 rows a class), full, ...")
    subset: int = Field(1, ge=0, description="number (seed) of the training subset")
    seed: int = Field(1, ge=0, description="seed of new weights, row order and dropout")
    output_dir: str = Field("results", description="results folder; a run has a folder in it")
    search: dict[str, Any] = Field({}, description="values that a grid tries: part of the folder")

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if problems := list(self._problems()):
            raise ValueError("; ".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        """Yields what is missing, unknown, or not read by the head."""
        names, head = self.task_names, self.head
        for name in set(names) - set(TASKS):
            yield f"task {name}: no such task.{did_you_mean(name, TASKS)}"
        if len(set(names)) < len(names) or (len(names) > 1 and head != "cln"):
            yield f"task {self.task}: only --head cln trains several, each once"
        if not self.model:
            yield "--model: required, a folder, a Hub id or 'sample'"
        if head not in HEADS:
            yield f"--head {head!r}: no such head.{did_you_mean(head, HEADS)}"
            return
        unread = self.model_dump(include=unread_settings(head), exclude_defaults=True)
        for name in sorted(flatten(unread)):
            flag = f"--{SHORTCUTS.get(name, name)}"
            yield f"{flag}: the head {head} does not read it; leave it out"
        if not self.hire.fusion and self.hire.fusion_layers != 2:
            yield "hire.fusion_layers: without fusion nothing reads it; leave it out"
        if head == "isobn" and self.train.batch_size == 1:
            yield "--head isobn: a single row has no spread; the batch size must be 2 or more"

    @property
    def task_names(self) -> list[str]:
        """The tasks, more than one for `cln` only."""
        return [name.strip() for name in self.task.split(",")] if self.task else []

    @property
    def system(self) -> str:
        """Name of the system in folders and tables."""
        if self.name:
            return safe_name(self.name)
        pooling = f"-{self.pooling}" if self.pooling != "cls" else ""
        folder = Path(self.model).parent if Path(self.model).name in ("hf", "model") else self.model
        return safe_name(f"{Path(folder).name}-{self.head}{pooling}".lstrip("-"))

    @property
    def folder(self) -> Path:
        """The run's folder."""
        tasks = "+".join(self.task_names)
        values = "".join(f"-{key.rpartition('.')[2]}={v}" for key, v in self.search.items())
        run = f"p{self.pretraining}-d{self.subset}-s{self.seed}{safe_name(values)}"
        return Path(self.output_dir, self.system, f"{tasks}-{self.train_size}", run)

    def compared(self) -> dict[str, Any]:
        """Returns all settings that decide a run's numbers, by dotted name, without its model and rows."""
        names = set(SystemSettings.model_fields)
        return flatten(self.model_dump(mode="json", include=names, exclude=NOT_COMPARED))


def unread_settings(head: str) -> set[str]:
    """Returns the settings and groups of settings that a head does not read; of a wrong name, none."""
    return {name for name, heads in READ_BY.items() if head in HEADS and head not in heads}


SHORTCUTS = {f"train.{name}": name for name in TrainSettings.model_fields}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return flat


def safe_name(name: str) -> str:
    """Returns the name for a folder: with letters, digits and `._+=-` only, and no dot in front."""
    return re.sub(r"[^\w.+=-]+", "-", name).lstrip(".")
