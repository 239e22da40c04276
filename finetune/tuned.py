"""Fine-tuned heads as systems: they fit and predict like all others (`multicls.evaluation`)."""

import io
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from huggingface_hub import ModelCard, ModelCardData
from scipy.special import logit

from finetune.calibration import fit_temperature, fit_thresholds
from finetune.settings import OwnDataSettings, RunSettings, TrainSettings
from finetune.tasks import Example, Task, TaskData
from multicls.cards import inherited_metadata, model_link
from multicls.evaluation import Rows
from multicls.measures import Array
from multicls.systems import Scale

# Small models want a larger rate than BERT-base's 1 to 7e-5.
TRAIN = TrainSettings(learning_rate=1e-4, epochs=10)
CARD = """
# A classifier of texts

The head `{}` on {}, fine-tuned by finetune/compare.py, whose report.md has its scores. It needs transformers and
`trust_remote_code=True`, which runs the Python files of this folder; read them first.
"""


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
    train: TrainSettings = TRAIN
    model: Any = field(default=None, init=False, repr=False)
    tokenizer: Any = field(default=None, init=False, repr=False)
    task: Task | None = field(default=None, init=False, repr=False)
    thresholds: list[float] = field(default_factory=list, init=False, repr=False)

    def fit(self, rows: Rows) -> Self:
        """Fine-tunes the model."""
        from finetune.run import train_system
        from finetune.subsets import select_rows

        self.task = task_of_rows(rows, self.max_length)
        settings = RunSettings(
            model=self.source,
            head=self.head,
            selection="holdout",
            own=OwnDataSettings(train_file="rows"),
            train=self.train,
        )
        data = TaskData(self.task, examples_of(self.task, rows), [])
        data = select_rows(data, "full", 1, holdout=True)
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
            system = train_system(settings, [data], {"settings": {}}, Path(folder))
        self.model, self.tokenizer = system.model, system.tokenizer
        outputs = system.outputs[0]["validation"]
        labels = np.array([row.labels or row.label for row in data.validation])
        temperature = fit_temperature(self.task, outputs, labels)
        for parameter in self.model.classifiers[0].parameters():
            parameter.data /= temperature
        if self.task.multi_label:
            self.thresholds = fit_thresholds(outputs / temperature, labels)
        return self

    def predict(self, rows: Rows) -> Array:
        """Returns outputs (N, C)."""
        from finetune.encoding import Encoded
        from finetune.training import predict_rows

        assert self.task is not None, "fit it first"
        encoded = Encoded(self.task, examples_of(self.task, rows), self.tokenizer)
        outputs = predict_rows(self.model, encoded, 0).astype(np.float64)
        if rows.kind == "score":
            return self.task.to_label(outputs)
        return np.asarray(
            outputs - logit(np.array(self.thresholds)) if self.thresholds else outputs
        )

    def save(self, folder: Path) -> None:
        """Saves the model with its tokenizer, a card and the code that loads it without this project."""
        from finetune.heads.build import save_fine_tuned

        self.model.config.thresholds = [self.thresholds]
        about = inherited_metadata(self.source)
        card = ModelCard.from_template(
            ModelCardData(
                library_name="transformers",
                pipeline_tag="text-classification",
                tags=["text-classification"],
                **about,
            ),
            template_str="---\n{{ card_data }}\n---\n" + CARD.format(self.head, model_link(about)),
        )
        save_fine_tuned(self.model, self.tokenizer, folder, str(card))


def task_of_rows(rows: Rows, max_length: int) -> Task:
    """Returns the task that rows are; scores are standardised by them."""
    fields = ("text",) if len(rows.texts[0]) == 1 else ("text1", "text2")
    scale = Scale.of(rows.targets) if rows.kind == "score" else Scale()
    return Task(
        "rows",
        fields,
        rows.classes,
        (rows.metric,),
        label_scale=scale.spread,
        label_shift=scale.mean,
        label_range=(scale.low, scale.high) if np.isfinite(scale.high) else (),
        multi_label=rows.kind == "multi_label",
        max_length=max_length,
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
