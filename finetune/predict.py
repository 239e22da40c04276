"""Labels new rows with a fine-tuned model.

python finetune/predict.py results/models/RUN_ID new.csv
python finetune/predict.py results/models/RUN_ID new.jsonl --text_column body --output labelled.jsonl
"""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/, whose names must not hide packages

from pydantic import Field, PositiveInt

from finetune.data.own_rows import DEFAULTS, METRICS, TEXTS, example_of, label_format, nearest_column, text_columns
from finetune.data.tables import RawRows, Row, read_table
from finetune.data.tasks import TASKS, Task
from multicls.command_line import CommandLine, print_summary
from multicls.console import Progress
from multicls.errors import UserError, did_you_mean, run_command
from multicls.files import atomic_write, read_json
from multicls.settings import Settings
from multicls.words import counted

if TYPE_CHECKING:
    from finetune.data.examples import LabeledExample
    from finetune.data.metrics import Array

SLICE = 4096  # rows that are tokenized at a time
MODEL_TYPE = "encoder-with-head"


class PredictOptions(Settings):
    """Options of the command."""

    model: str = Field(description="a folder that finetune/run.py --save_model has saved")
    rows: str = Field(description="rows to label: CSV, TSV, JSON lines, JSON array or Parquet")
    output: str | None = Field(None, description=".csv, .jsonl or - for stdout; default: ROWS.predictions.csv")
    text_column: str | None = Field(None, description="the text's column, or text1,text2; default: the training's")
    task: str | None = Field(None, description="which task, if the model was fine-tuned on several")
    batch_size: PositiveInt = Field(64, description="rows of a forward pass")


COMMAND = CommandLine("finetune/predict.py", __doc__, PredictOptions, positional=("model", "rows"))


@dataclass(frozen=True)
class TrainedTask:
    """The task that a saved model was fine-tuned on."""

    task: Task  # `fields` is empty if the model does not know its columns
    index: int  # among the tasks of the model
    max_length: int  # longest sequence in tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    args = COMMAND.parse(argv)
    trained = load_task(args.model, args.task)
    rows = read_table(Path(args.rows), _wanted(args.text_column, trained.task))
    output = _output(args.rows, args.output)
    fields = _fields(args.rows, rows[0][1], args.text_column, trained.task)
    hidden = [example_of(trained.task, fields, row, where, str(n)) for n, (where, row) in enumerate(rows)]
    outputs = predict(args.model, trained, hidden, args.batch_size)
    answers = answers_of(trained.task, outputs)
    with atomic_write(output) if output else nullcontext(sys.stdout) as file:
        _write(file, rows, answers, as_json=output is not None and output.suffix == ".jsonl")
    made = [
        ("labelled", f"{counted(len(rows), 'row')}: {_summary(trained.task, answers)}"),
        ("scores", _scores(trained.task, fields, rows, outputs)),
        ("written", output),
    ]
    print_summary([(name, value) for name, value in made if value], file=sys.stdout if output else sys.stderr)
    return 0


def load_task(folder: str, name: str | None = None) -> TrainedTask:
    """Returns the task that the saved model in `folder` was fine-tuned on.

    Raises:
        UserError: The folder is not a fine-tuned model, or its task is not one of plain texts.
    """
    path = Path(folder) / "config.json"
    config = read_json(path) if path.exists() else {}
    if config.get("model_type") != MODEL_TYPE or not config.get("tasks"):
        raise UserError(
            f"{folder}: not a fine-tuned model. Give a folder that `python finetune/run.py ... --save_model` has saved "
            "(OUTPUT_DIR/models/RUN_ID)."
        )
    names = [about["name"] for about in config["tasks"]]
    if name is None and len(names) > 1:
        raise UserError(f"{folder}: fine-tuned on several tasks; add --task, one of {', '.join(names)}.")
    if name is not None and name not in names:
        raise UserError(f"--task {name}: {folder} is fine-tuned on {', '.join(names)}.{did_you_mean(name, names)}")
    index = names.index(name) if name else 0
    about = config["tasks"][index]
    task, positions = _task(about), config.get("encoder", {}).get("max_position_embeddings", 512)
    return TrainedTask(task, index, int(about.get("max_length") or min(task.max_length, positions)))


def _task(about: Mapping[str, Any]) -> Task:
    """Returns the task that a saved model's configuration describes."""
    name, known = about["name"], TASKS.get(about["name"])
    if about.get("num_choices") or about.get("num_spans"):
        what = "chooses between sentences" if about.get("num_choices") else "judges marked words"
        raise UserError(f"task {name} {what}, which rows of plain texts do not have: only run.py predicts it.")
    if known:
        return known
    kind = "multi_label" if about.get("multi_label") else "score" if about["is_regression"] else "class"
    scale = about.get("label_scale")
    if scale is None and kind == "score":
        raise UserError(f"the model for task {name} does not hold the scale of its scores: save it anew with run.py.")
    fields = tuple((column,) for column in about.get("text_columns") or ())
    return Task(
        name, fields, tuple(map(str, about["labels"])), DEFAULTS.get(kind, METRICS[kind]),
        "pair" if len(fields) == 2 else "single", "own", label=(about.get("label_column") or "label",),
        label_scale=float(scale or 1.0), multi_label=kind == "multi_label",
    )  # fmt: skip


def predict(folder: str, trained: TrainedTask, examples: Sequence[LabeledExample], batch_size: int) -> Array:
    """Returns the outputs (N, C) of the saved model for the rows."""
    import numpy as np

    from finetune.data.encoding import Encoded
    from finetune.heads.checkpoint import find_checkpoint, load_tokenizer
    from finetune.heads.modeling_heads import TaskModel
    from finetune.settings import TrainSettings
    from finetune.train import loop
    from multicls.from_bert import quiet_transformers

    tokenizer = load_tokenizer(find_checkpoint(folder), trained.max_length)
    device, precision = loop.find_device()
    with quiet_transformers():
        model: Any = TaskModel.from_pretrained(folder)
    model.to(device)
    settings, outputs = TrainSettings(precision=precision, eval_batch_size=batch_size), []
    with closing(Progress("predicting", len(examples), unit="rows")) as progress:
        for start in range(0, len(examples), SLICE):
            rows = Encoded(trained.task, examples[start : start + SLICE], tokenizer, trained.max_length)
            outputs.append(loop.predict(model, rows, device, settings, trained.index))
            progress.update(start + len(rows))
    return np.concatenate(outputs)


def answers_of(task: Task, outputs: Array) -> dict[str, list[Any]]:
    """Returns the new columns: `label` and a probability `p_LABEL` for each label, or `score` of a regression."""
    from scipy.special import expit, softmax

    from finetune.data.metrics import predictions_of

    predicted = predictions_of(task, outputs)
    if task.is_regression:
        return {"score": [round(float(value) * task.label_scale, 6) for value in predicted]}
    probabilities = expit(outputs) if task.multi_label else softmax(outputs, axis=1)
    if task.multi_label:
        labels = ["|".join(name for name, one in zip(task.labels, row, strict=True) if one) for row in predicted]
    else:
        labels = [task.labels[index] for index in predicted]
    columns = zip(task.labels, probabilities.T, strict=True)
    return {"label": labels} | {f"p_{name}": [round(float(value), 6) for value in column] for name, column in columns}


def _wanted(asked: str | None, task: Task) -> Sequence[Iterable[str]]:
    """Returns the sets of columns of which a CSV file must have one."""
    if asked:
        return [[name.strip() for name in asked.split(",")], [asked]]
    return [[names[0] for names in task.fields], [names[-1] for names in task.fields]] if task.fields else TEXTS


def _fields(source: str, row: Row, asked: str | None, task: Task) -> tuple[str, ...]:
    """Returns the columns of the texts: those asked for, else those that the model was trained with."""
    if not asked and task.fields:
        if missing := [names[0] for names in task.fields if not set(names) & set(row)]:
            known = ", ".join(map(repr, row))
            problems = [f"{source}: no column {name!r}, which the model was trained with; the columns are {known}."
                        f"{nearest_column(name, row)} Or name it by --text_column." for name in missing]  # fmt: skip
            raise UserError(*problems)
        return tuple(next(name for name in names if name in row) for names in task.fields)
    found = text_columns(source, row, asked)
    if task.fields and len(found) != len(task.fields):
        raise UserError(f"--text_column {asked}: the model reads {len(task.fields)} text(s) a row, not {len(found)}.")
    return found


def _output(rows: str, asked: str | None) -> Path | None:
    """Returns the file to write; None: stdout."""
    if asked == "-":
        return None
    path = Path(asked) if asked else Path(rows).with_suffix(".predictions.csv")
    if path.suffix not in (".csv", ".jsonl"):
        raise UserError(f"--output {path}: the name must end in .csv or .jsonl, or be -, for stdout.")
    if path.resolve() == Path(rows).resolve():
        raise UserError(f"--output {path}: these are the rows to label; give another name.")
    return path


def _write(file: IO[str], rows: RawRows, answers: Mapping[str, list[Any]], as_json: bool) -> None:
    """Writes the input columns and the new ones; a new one is called predicted_X if the rows have a column X."""
    columns = list(dict.fromkeys(name for _, row in rows for name in row))
    names = {name: f"predicted_{name}" if name in columns else name for name in answers}
    table = [dict(row) | {names[name]: answers[name][n] for name in answers} for n, (_, row) in enumerate(rows)]
    if as_json:
        file.writelines(f"{json.dumps(row, ensure_ascii=False, default=str)}\n" for row in table)
        return
    writer = csv.DictWriter(file, [*columns, *names.values()], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in table)


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value


def _summary(task: Task, answers: Mapping[str, list[Any]]) -> str:
    if task.is_regression:
        return f"scores from {min(answers['score']):g} to {max(answers['score']):g}"
    return ", ".join(f"{count} {name or '(no label)'}" for name, count in Counter(answers["label"]).most_common())


def _scores(task: Task, fields: Sequence[str], rows: RawRows, outputs: Array) -> str:
    """Returns the scores in words, or why there are none; "" if the rows have no labels."""
    from finetune.data.metrics import score_examples

    column = next((name for name in task.label if name in rows[0][1]), None)
    if column is None:
        return ""
    kind = "multi_label" if task.multi_label else "score" if task.is_regression else "class"
    try:
        form = label_format(column, kind, [row.get(column) for _, row in rows])
        labelled = [example_of(task, fields, row, where, "", form.read(row, where)) for where, row in rows]
    except UserError as error:
        return f"not scored: {error}"
    scores = score_examples(task, labelled, outputs)
    return f"against column {column!r}: " + "  ".join(f"{name} {100 * value:.2f}" for name, value in scores.items())


if __name__ == "__main__":
    run_command(main)
