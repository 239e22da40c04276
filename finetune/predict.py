"""Labels new rows with a fine-tuned model.

python finetune/predict.py results/k5-mean/tickets-full/p1-d1-s1/model new.csv
python finetune/predict.py MODEL new.jsonl --text_column body --output labelled.jsonl
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

import numpy as np
from pydantic import Field
from pydantic_settings import CliPositionalArg

from finetune.own_data import example_of, requested_columns, text_columns, with_texts
from finetune.tables import read_table
from finetune.tasks import Task, task_of
from multicls.console import count, print_summary
from multicls.errors import UserError, did_you_mean, run_command
from multicls.files import atomic_write, read_json
from multicls.settings import Settings, parse

if TYPE_CHECKING:
    from pandas import DataFrame

    from finetune.examples import Example
    from finetune.tables import RawRows
    from finetune.training import Array


class PredictOptions(Settings):
    """Options of the command."""

    model: CliPositionalArg[str] = Field(
        description="a folder that finetune/run.py --save_model has saved"
    )
    rows: CliPositionalArg[str] = Field(
        description="rows to label: CSV, TSV, JSON lines or Parquet"
    )
    output: str | None = Field(
        None, description="a .csv or .jsonl file; default: ROWS.predictions.csv"
    )
    text_column: str | None = Field(
        None, description="the text's column, or text1,text2; default: the training's"
    )
    task: str | None = Field(None, description="which task, if the model was fine-tuned on several")


@dataclass(frozen=True)
class TrainedTask:
    """The task that a saved model was fine-tuned on."""

    task: Task
    index: int  # among the tasks of the model
    max_length: int  # longest sequence in tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(PredictOptions, argv, prog="finetune/predict.py", doc=__doc__)
    output = Path(options.output or Path(options.rows).with_suffix(".predictions.csv"))
    if output.suffix not in (".csv", ".jsonl") or output.resolve() == Path(options.rows).resolve():
        raise UserError(f"--output {output}: give another file, with the ending .csv or .jsonl.")
    trained = load_task(options.model, options.task)
    task, rows = trained.task, read_table(Path(options.rows))
    usual = list(product(*task.fields))
    columns = requested_columns(options.text_column) if options.text_column else usual
    fields = text_columns(*rows[0], columns)
    if len(fields) != len(usual[0]):
        raise UserError(f"--text_column: the model reads {count(len(usual[0]), 'text')} a row.")
    full = with_texts(rows, fields)
    if not full:
        raise UserError(f"{options.rows}: no row has a text.")
    hidden = [example_of(task, fields, row, where, where) for where, row in full]
    outputs = predict(options.model, trained, hidden)
    answers = answers_of(task, outputs)
    _write(output, rows, full, answers)
    empty = len(rows) - len(full)
    made = [
        ("labelled", f"{count(len(full), 'row')}: {_summary(task, answers)}"),
        ("left empty", f"{count(empty, 'row')} without a text" if empty else None),
        ("written", output),
    ]
    print_summary([(name, value) for name, value in made if value])
    return 0


def load_task(folder: str, name: str | None = None) -> TrainedTask:
    """Returns the task that the saved model in `folder` was fine-tuned on.

    Raises:
        UserError: The folder is not a fine-tuned model, or its task is not one of plain texts.
    """
    path = Path(folder) / "config.json"
    tasks = (read_json(path) if path.exists() else {}).get("tasks")
    if not tasks:
        raise UserError(
            f"{folder}: not a fine-tuned model. Give a folder that `python finetune/run.py ... --save_model` has saved "
            "(RESULTS/SYSTEM/TASK-SIZE/RUN/model)."
        )
    names = [description["name"] for description in tasks]
    if name not in names and (name or len(names) > 1):
        hint = did_you_mean(name, names) if name else " Name one of them."
        raise UserError(f"--task {name or ''}: {folder} is fine-tuned on {', '.join(names)}.{hint}")
    index = names.index(name) if name else 0
    if tasks[index]["num_choices"] or tasks[index]["num_spans"]:
        raise UserError(
            f"task {names[index]} is more than texts (choices or marked words): only run.py predicts it."
        )
    return TrainedTask(task_of(tasks[index]), index, int(tasks[index]["max_length"]))


def predict(folder: str, trained: TrainedTask, examples: Sequence[Example]) -> Array:
    """Returns the outputs (N, C) of the saved model for the rows."""
    from finetune.encoding import Encoded
    from finetune.heads.build import find_checkpoint, load_fine_tuned, load_tokenizer
    from finetune.training import EVAL_BATCH_SIZE, find_device, predict_rows

    checkpoint = find_checkpoint(folder)
    tokenizer = load_tokenizer(checkpoint, trained.max_length)
    rows = Encoded(trained.task, examples, tokenizer, trained.max_length)
    model, (device, bf16) = load_fine_tuned(checkpoint), find_device()
    return predict_rows(model, rows, trained.index, device, EVAL_BATCH_SIZE, bf16)


def answers_of(task: Task, outputs: Array) -> DataFrame:
    """Returns the new columns: `label` and a probability `p_LABEL` of each label, or `score`."""
    import pandas as pd
    from scipy.special import expit, softmax

    from finetune.metrics import predictions_of

    predicted, outputs = predictions_of(task, outputs), outputs.astype(float)
    if task.is_regression:
        return pd.DataFrame({"score": (outputs[:, 0] * task.label_scale).round(6)})
    probabilities = expit(outputs) if task.multi_label else softmax(outputs, axis=1)
    labels = np.array(task.labels, dtype=object)
    answers = pd.DataFrame(probabilities.round(6), columns=[f"p_{name}" for name in labels])
    chosen = (
        [labels[row == 1].tolist() for row in predicted] if task.multi_label else labels[predicted]
    )
    answers.insert(0, "label", chosen)
    return answers


def _write(output: Path, rows: RawRows, full: RawRows, answers: DataFrame) -> None:
    """Writes the rows with the new columns, which are empty for rows without a text.

    A new column is called predicted_X if the rows have a column X, predicted_predicted_X if they have that, too.
    """
    import pandas as pd

    places, cells = zip(*rows, strict=True)
    table = pd.DataFrame(cells, places, dtype=object)
    new = answers.set_axis([where for where, _ in full])
    while taken := set(new) & set(table):
        new = new.rename(columns={name: f"predicted_{name}" for name in taken})
    table = table.join(new)
    with atomic_write(output) as file:
        if output.suffix == ".jsonl":  # pandas would round numbers and write dates as numbers
            lines = table.astype(object).where(table.notna(), None).to_dict("records")
            file.writelines(
                json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines
            )
        else:
            is_list = table.map(lambda cell: isinstance(cell, (list, dict)))
            texts = table.map(lambda cell: json.dumps(cell, ensure_ascii=False, default=str))
            table.mask(is_list, texts).to_csv(file, index=False)


def _summary(task: Task, answers: DataFrame) -> str:
    if task.is_regression:
        return f"scores from {answers['score'].min():g} to {answers['score'].max():g}"
    names = ["+".join(label) if task.multi_label else label for label in answers["label"]]
    return ", ".join(f"{n} {name or '(no label)'}" for name, n in Counter(names).most_common())


if __name__ == "__main__":
    run_command(main)
