"""The settings of one fine-tuning run. Imports no torch, so that a mistake is answered at once."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from finetune.heads import HEADS
from finetune.tasks import find_task
from multicls.errors import UserError, did_you_mean
from multicls.settings import Settings

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class TrainSettings(Settings):
    """Optimisation; the defaults are those of the paper where it names them. None means: chosen from the data."""

    learning_rate: PositiveFloat = Field(default=2e-5, description="peak learning rate; the paper tries 1 to 7e-5")
    epochs: PositiveInt = Field(default=20, description="passes over the train rows")
    max_steps: PositiveInt | None = Field(default=None, description="at most this many steps, whatever the epochs")
    batch_size: PositiveInt | None = Field(
        default=None, description="rows a step; 4, 8 or 16 for about 100, 1k or more rows"
    )
    eval_every: PositiveInt | None = Field(
        default=None, description="steps between evaluations; two epochs, at most 500"
    )
    patience: PositiveInt = Field(default=10_000, description="stop after so many steps without a better dev score")
    warmup: Fraction = Field(
        default=0.1, description="part of the steps with a rising learning rate; it then falls to 0"
    )
    # The paper names none for fine-tuning; 0.01 is that of the protocol it follows (Mosbach et al., 2021).
    weight_decay: float = Field(default=0.01, ge=0.0, description="decoupled; not on biases and LayerNorms")
    clip: PositiveFloat = Field(default=1.0, description="largest norm of the gradient")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="auto: bf16 on a GPU that has it, else fp32"
    )


class FinetuneSettings(Settings):
    """One run: a model, a task, a number of train rows, a head and a seed."""

    model: str = Field(description="a run's hf/ folder, any Hugging Face model folder, or a hub id")
    task: str = Field(description="name of the task")
    train_size: PositiveInt | Literal["full"] = Field(
        default="full", description="train rows: 100, 1k, any number, or full"
    )
    head: str = Field(description="how the label is read off the encoder")
    seed: int = Field(default=1, ge=0, description="seed of the new weights, the order of the rows and dropout")
    data_seed: int = Field(default=1, ge=0, description="seed of the sample of train rows")
    data_dir: str | None = Field(
        default=None, description="folder in the official layout (RTE/train.tsv, ...); default: the hub"
    )
    train_from_dev: bool = Field(
        default=False, description="draw the train rows from dev, for lack of others (not the protocol)"
    )
    max_length: PositiveInt = Field(
        default=128, description="longest sequence in tokens, [CLS], facets and [SEP] included"
    )
    output_dir: str = Field(default="results", description="folder for results.jsonl and predictions/")
    save_model: bool = Field(
        default=False, description="save the model of the best evaluation to OUTPUT_DIR/models/RUN_ID"
    )
    trust_remote_code: bool = Field(default=False, description="run the Python code that lies in the model's folder")
    train: TrainSettings = TrainSettings()

    @field_validator("train_size", mode="before")
    @classmethod
    def _thousands(cls, value: object) -> object:
        """`1k` is 1000."""
        if isinstance(value, str) and value.lower().endswith("k") and value[:-1].isdigit():
            return int(value[:-1]) * 1000
        if isinstance(value, str) and value != "full" and not value.isdigit():
            raise ValueError("must be a number of rows such as 100 or 1k, or 'full'")
        return value


def check_names(settings: FinetuneSettings) -> None:
    """Checks the names of task and head.

    Raises:
        UserError: one is unknown.
    """
    find_task(settings.task)
    if settings.head not in HEADS:
        raise UserError(f"--head {settings.head}: no such head.{did_you_mean(settings.head, HEADS)}")


def resolve(settings: FinetuneSettings, num_rows: int, precision: Literal["fp32", "bf16"]) -> TrainSettings:
    """`settings.train` with every value that depends on the data or the device filled in.

    Args:
        num_rows: train rows that there are.
        precision: what "auto" means on this device.

    Returns:
        A copy without None: `max_steps` is the number of steps of the whole run.
    """
    train = settings.train
    batch_size = train.batch_size or _paper_batch_size(settings.train_size)
    steps_per_epoch = math.ceil(num_rows / batch_size)
    steps = min(train.epochs * steps_per_epoch, train.max_steps or math.inf)
    return train.model_copy(
        update={
            "batch_size": batch_size,
            "max_steps": int(steps),
            "eval_every": train.eval_every or min(500, 2 * steps_per_epoch),
            "precision": precision if train.precision == "auto" else train.precision,
        }
    )


def _paper_batch_size(train_size: int | str) -> int:
    if isinstance(train_size, str):
        return 16
    return 4 if train_size <= 300 else 8 if train_size <= 3000 else 16
