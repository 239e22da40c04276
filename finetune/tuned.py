"""Fine-tuned heads as systems: they fit and predict like all others (`multicls.evaluation`).

After training, one temperature T (Guo et al., 2017) divides the outputs. It is folded into the classifier, W / T and
b / T, so that whatever loads the model has the calibrated probabilities; the most likely class stays the same.
"""

import io
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from scipy.special import expit, logit

from finetune.settings import RunSettings, TrainSettings
from finetune.tasks import Example, Task, TaskData, task_of
from multicls.evaluation import Rows
from multicls.measures import Array
from multicls.systems import Scale, best_thresholds, fit_temperature

FEWEST = 10  # validation rows for a temperature
SPREAD = 0.5  # standard deviation of the prior of log T: few rows without an error ask for T = 0


@dataclass
class Tuned:
    """A head of `finetune.heads` on a model, trained by `finetune.training` with settings for own rows.

    `fit` holds out a fifth of its rows. They pick the checkpoint, the temperature and the thresholds. The two texts of
    a pair are read as one sequence, as BERT does; `multicls.systems.Linear` embeds each by itself.
    """

    is_costly: ClassVar[bool] = True

    head: str
    source: str
    max_length: int
    learning_rate: float
    epochs: int
    sha256: str = ""  # of the model in `source`; it tells systems apart, and changes nothing
    model: Any = field(default=None, init=False, repr=False)
    tokenizer: Any = field(default=None, init=False, repr=False)
    task: Task | None = field(default=None, init=False, repr=False)
    scale: Scale = field(default_factory=Scale, init=False, repr=False)

    def fit(self, rows: Rows) -> Self:
        """Fine-tunes the model; temperature and thresholds go into its weights and configuration."""
        from finetune.run import train_system
        from finetune.subsets import select_rows

        if rows.kind == "score":
            self.scale = Scale.of(rows.targets)
            rows = replace(rows, targets=self.scale.apply(rows.targets))
        self.task = task_of_rows(rows, self.max_length)
        settings = RunSettings(
            model=self.source,
            head=self.head,
            train_size=len(rows.targets),  # which chooses the batch size
            train=TrainSettings(learning_rate=self.learning_rate, epochs=self.epochs),
        )
        data = TaskData(self.task, examples_of(self.task, rows), [])
        data = select_rows(data, "full", 1, holdout=True)
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
            system = train_system(settings, [data], {"settings": {}}, Path(folder))
        self.model, self.tokenizer = system.model, system.tokenizer
        outputs = system.outputs[0]["validation"]
        labels = np.array([row.labels or row.label for row in data.validation])
        temperature = 1.0
        if rows.kind != "score" and len(labels) >= FEWEST:
            logits = outputs.astype(np.float64)
            temperature = fit_temperature(rows.kind, logits, labels, bounds=(-3, 3), spread=SPREAD)
        for parameter in self.model.classifiers[0].parameters():
            parameter.data /= temperature
        if self.task.multi_label:
            self.model.config.thresholds = [fit_thresholds(outputs / temperature, labels)]
        return self

    @property
    def shift(self) -> Array:
        """The logit of each label's threshold, of several labels a row, which `predict` subtracts."""
        thresholds = self.model.config.thresholds
        return logit(np.array(thresholds[0])) if thresholds else np.zeros(1)

    def predict(self, rows: Rows) -> Array:
        """Returns outputs (N, C); scores are in the unit of the labels."""
        from finetune.encoding import Encoded
        from finetune.training import predict_rows

        assert self.task is not None, "fit it first"
        encoded = Encoded(self.task, examples_of(self.task, rows), self.tokenizer)
        # The classifier of a saved model has the unit of the scores, for which 16 bits are too few.
        precision: Any = "fp32" if self.task.is_regression else "auto"
        outputs = predict_rows(self.model, encoded, 0, precision).astype(np.float64)
        outputs = outputs * self.task.label_scale * self.scale.spread + self.scale.mean
        return np.asarray(outputs - self.shift)

    def save(self, folder: Path) -> None:
        """Saves the model with its tokenizer, a card and the code that loads it without this project.

        The saved classifier gives scores in the unit of the labels.
        """
        from finetune.heads.build import model_card, save_fine_tuned

        assert self.task is not None, "fit it first"
        card = model_card(self.source, self.head, [self.task])
        fitted = self.model.classifiers[0]
        self.model.classifiers[0] = in_unit = deepcopy(fitted)
        for parameter in in_unit.parameters():
            parameter.data *= self.scale.spread
        in_unit.bias.data += self.scale.mean
        save_fine_tuned(self.model, self.tokenizer, folder, card)
        self.model.classifiers[0] = fitted

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Returns a model that `save`, or finetune/run.py --save_model, has written."""
        from finetune.heads.build import load_fine_tuned

        model, tokenizer = load_fine_tuned(str(folder))
        task = task_of(model.config.tasks[0])
        system = cls(model.config.head, str(folder), task.max_length, learning_rate=0.0, epochs=0)
        system.model, system.tokenizer, system.task = model, tokenizer, task
        return system


def task_of_rows(rows: Rows, max_length: int) -> Task:
    """Returns the task that rows are."""
    fields = ("text",) if len(rows.texts[0]) == 1 else ("text1", "text2")
    several = rows.kind == "multi_label"
    return Task(
        "rows", fields, rows.classes, (rows.metric,), multi_label=several, max_length=max_length
    )


def examples_of(task: Task, rows: Rows) -> list[Example]:
    """Returns rows as examples of a task."""
    none: list[Any] = [()] * len(rows.targets)
    several: Sequence[Any] = list(rows.targets) if task.multi_label else none
    return [
        Example(
            f"row:{number}",
            texts,
            0.0 if task.multi_label else float(rows.targets[number]),
            labels=tuple(map(float, several[number])),
            passage=f"unit:{rows.units[number]}",
        )
        for number, texts in enumerate(rows.texts)
    ]


def fit_thresholds(outputs: Array, labels: Array) -> list[float]:
    """Returns the probability above which each label (N, C) is given, that with the best F1; 0.5 for few rows."""
    thresholds = expit(best_thresholds(outputs.astype(np.float64), labels, default=0.0))
    return np.clip(thresholds, 1e-9, 1 - 1e-9).tolist()
