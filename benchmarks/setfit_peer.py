"""SetFit (arXiv:2209.11055) beside a linear model on the same embedding: on the same rows and folds.

python benchmarks/setfit_peer.py --train_file tickets.csv --model sample --python SETFIT/bin/python

benchmarks/setfit_worker.py says how to make the environment of setfit. Both learn from the same rows; the interval is
that of `multicls.evaluation.compare`.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from pydantic import Field

from finetune.heads.build import find_checkpoint
from finetune.own_data import labelled_rows, read_own
from finetune.settings import RowSettings
from multicls.console import print_line, progress_bar
from multicls.embeddings import Embedder
from multicls.errors import UserError, run_command
from multicls.evaluation import Rows, System, compare, evaluate, fewer, folds
from multicls.files import REPOSITORY
from multicls.measures import Array
from multicls.settings import parse
from multicls.systems import Linear

LOWEST = 1e-6  # probability, so that its logarithm is a number


class Options(RowSettings):
    """Options of the benchmark."""

    model: str = Field("sample", description="a sentence-transformers model")
    python: str = Field(description="Python of the environment that has setfit")
    max_steps: int = Field(-1, description="steps on pairs; -1: as many as setfit takes")


@dataclass
class SetFit:
    """The setfit library's classifier as a system; its process trains when it predicts."""

    model: str
    python: str
    max_length: int
    max_steps: int
    rows: Rows | None = field(default=None, init=False, repr=False)

    def fit(self, rows: Rows) -> Self:
        """Keeps the training rows."""
        self.rows = rows
        return self

    def predict(self, rows: Rows) -> Array:
        """Returns the log-probabilities (N, C) by setfit's process."""
        assert self.rows is not None, "fit it first"
        labels = self.rows.targets.tolist()
        texts = [text for (text,) in self.rows.texts]
        job = {
            "model": self.model,
            "train": [{"text": t, "label": y} for t, y in zip(texts, labels, strict=True)],
            "texts": [text for (text,) in rows.texts],
            "classes": rows.num_classes,
            "seed": 1,
            "max_length": self.max_length,
            "max_steps": self.max_steps,
        }
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "job.json")
            file.write_text(json.dumps(job), encoding="utf-8")
            worker = str(REPOSITORY / "benchmarks" / "setfit_worker.py")
            done = subprocess.run([self.python, worker, str(file)], check=False)
            if done.returncode:
                raise UserError(f"--python {self.python}: setfit ended with {done.returncode}.")
            probabilities = np.array(json.loads(Path(f"{file}.out").read_text(encoding="utf-8")))
        return np.log(np.maximum(probabilities, LOWEST))


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluates both and prints their scores and difference."""
    options = parse(Options, argv, prog="benchmarks/setfit_peer.py", doc=__doc__)
    task, examples, notes = read_own(options, {"train": options.train_file})
    for note in notes:
        print_line(f"note: {note}")
    if task.is_regression or task.multi_label or len(task.fields) > 1:
        raise UserError(f"{task.name}: setfit takes one text and one class a row here.")
    folder = find_checkpoint(options.model)
    model = Embedder(folder)
    embeddings = model.embed([row.texts[0] for row in examples["train"]])
    rows = labelled_rows(task, examples["train"], embeddings)
    setfit = SetFit(str(folder), options.python, model.max_length, options.max_steps)
    splits = fewer(folds(rows))
    fits = 2 * (len(splits.folds) * 5 + len(splits.draws))
    with progress_bar(fits, "fit", "setfit and linear") as bar:
        linear = Linear.of(model.parts[0])
        systems: dict[str, System] = {"setfit": setfit, "linear": linear}
        scores = evaluate(systems, rows, splits, bar.update)
    for name, found in scores.items():
        print(f"{name}: {compare(found).score()}")
    print(compare(scores["setfit"], scores["linear"]).verdict("setfit", "linear"))
    return 0


if __name__ == "__main__":
    run_command(main)
