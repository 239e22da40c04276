"""Labels new rows with a fine-tuned model.

python finetune/predict.py results/k5-mean/tickets-full/p1-d1-s1/model new.csv
python finetune/predict.py MODEL new.jsonl --text_column body --output labelled.csv
python finetune/predict.py comparison/model new.csv --precision 0.95
"""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

import numpy as np
from pydantic import Field
from pydantic_settings import CliPositionalArg

from finetune.own_data import example_of, find_columns, with_texts
from finetune.tasks import Array, Example, Task, task_of
from multicls.console import count, print_line, print_summary
from multicls.errors import UserError, run_command
from multicls.files import atomic_write, read_json
from multicls.settings import Settings, parse
from multicls.tables import RawRows, read_table

if TYPE_CHECKING:
    from pandas import DataFrame


ENDINGS = (".csv", ".jsonl", ".parquet")


class PredictOptions(Settings):
    """Options of the command."""

    model: CliPositionalArg[str] = Field(
        description="a model that compare.py, or run.py --save_model, has saved"
    )
    rows: CliPositionalArg[str] = Field(description="rows: CSV, TSV, JSON lines or Parquet")
    output: str | None = Field(None, description="file; default: ROWS.predictions.csv")
    text_column: str | None = Field(None, description="text or text1,text2; default: training's")
    task: str | None = Field(None, description="which task, if the model was fine-tuned on several")
    precision: float | None = Field(
        None, gt=0.0, lt=1.0, description="label only rows that are right so often: 0.95"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(PredictOptions, argv, prog="finetune/predict.py", doc=__doc__)
    output = Path(options.output or Path(options.rows).with_suffix(".predictions.csv"))
    if output.suffix not in ENDINGS or output.resolve() == Path(options.rows).resolve():
        raise UserError(f"--output {output}: pass another file, ending in {', '.join(ENDINGS)}.")
    rows = read_table(Path(options.rows))
    with atomic_write(output, "wb") as file:  # before the work: it may not be possible
        answers, places = label_rows(options, rows)
        sure = int((answers.iloc[:, 0].map(str) != "").sum())
        write_rows(file, output.suffix, rows, answers.set_axis(places))
    labelled = count(sure, "row") + (f" of {len(places):,}" if sure < len(places) else "")
    print_summary([("labelled", labelled), ("written", output)])
    return 0


def label_rows(options: PredictOptions, rows: RawRows) -> tuple["DataFrame", list[str]]:
    """Returns the new columns, and the place of each of their rows; rows without a text have none."""
    folder = Path(options.model)
    if (folder / "system.json").exists():
        from finetune.saved import SavedSystem

        system = SavedSystem(folder)
        examples = read_examples(system.task, rows, options.text_column)
        answers = answers_of(system.task, system.predict(examples))
        if options.precision:
            answers = without_unsure(answers, system.threshold(options.precision))
    else:
        if options.precision:
            raise UserError("--precision: is for models of finetune/compare.py.")
        index, task = find_task(options.model, options.task)
        examples = read_examples(task, rows, options.text_column)
        thresholds = read_json(folder / "config.json").get("thresholds") or [[]]
        outputs = predict(options.model, index, task, examples)
        answers = answers_of(task, outputs, thresholds[index])
    return answers, [row.place for row in examples]


def without_unsure(answers: "DataFrame", threshold: float) -> "DataFrame":
    """Returns the answers with an empty label where no probability reaches the threshold."""
    unsure = answers.filter(regex="^p_").max(axis=1) < threshold
    return answers.assign(predicted_label=answers["predicted_label"].mask(unsure, ""))


def read_examples(task: Task, rows: RawRows, text_column: str | None) -> list[Example]:
    """Returns the rows that have a text in each of the columns, by default the task's; prints notes on the others."""
    fields = text_column.split(",") if text_column else task.fields
    if len(fields) != len(task.fields):
        raise UserError(f"--text_column: the model reads {count(len(task.fields), 'text')} a row.")
    full, notes = with_texts(rows, find_columns(*rows[0], [fields]), "row")
    for note in notes:
        print_line(f"note: {note}")
    return [example_of(task, fields, row, where, where) for where, row in full]


def predict_command(model: Path, record: Mapping[str, Any], rows: str = "ROWS.csv") -> str:
    """Returns the command that labels rows with the saved model of a run; "" if its task is not one of plain texts."""
    first, *others = (entry["description"] for entry in record["tasks"])
    if first["num_choices"] or first["num_spans"]:
        return ""
    task = f" --task {first['name']}" if others else ""
    return f"python finetune/predict.py {shlex.join([str(model), rows])}{task}"


def find_task(folder: str, name: str | None = None) -> tuple[int, Task]:
    """Returns number and task of a fine-tuned model; one that is not of plain texts is a `UserError`."""
    path = Path(folder) / "config.json"
    tasks = (read_json(path) if path.exists() else {}).get("tasks")
    if not tasks:
        raise UserError(f"{folder}: not a fine-tuned model; pass RUN/model, made by --save_model.")
    names = [description["name"] for description in tasks]
    if name not in names and (name or len(names) > 1):
        known = ", ".join(names)
        raise UserError(f"--task {name or ''}: {folder} is fine-tuned on {known}; name one.")
    index = names.index(name) if name else 0
    try:
        task = task_of(tasks[index])
    except TypeError:
        raise UserError(f"{folder}: saved by another version; fine-tune it again.") from None
    if task.num_choices or task.num_spans:
        raise UserError(f"task {task.name} has choices or marked words: only run.py predicts it.")
    return index, task


def predict(folder: str, index: int, task: Task, examples: Sequence[Example]) -> Array:
    """Returns the outputs (N, C) of the saved model for examples of its task number `index`."""
    from finetune.encoding import Encoded, notes_on_cuts
    from finetune.heads.build import load_fine_tuned
    from finetune.training import predict_rows

    model, tokenizer = load_fine_tuned(folder)
    rows = Encoded(task, examples, tokenizer)
    for note in notes_on_cuts({"": rows}, hint="; training has set the limit"):
        print_line(f"note: {note}")
    return predict_rows(model, rows, index)


def answers_of(task: Task, outputs: Array, thresholds: Sequence[float] = ()) -> "DataFrame":
    """Returns the new columns: `predicted_label` and a probability `p_LABEL` of each label, or `predicted_score`.

    Of several labels a row has those whose probability reaches their threshold, 0.5 if there are none.
    """
    import pandas as pd
    from scipy.special import expit, softmax

    outputs = outputs.astype(float)
    if task.is_regression:
        return pd.DataFrame({"predicted_score": task.to_label(outputs[:, 0]).round(6)})
    probabilities = expit(outputs) if task.multi_label else softmax(outputs, axis=1)
    answers = pd.DataFrame(probabilities.round(6), columns=[f"p_{name}" for name in task.labels])
    labels = np.array(task.labels, dtype=object)
    chosen: Any = labels[outputs.argmax(axis=1)]
    if task.multi_label:
        chosen = [labels[row].tolist() for row in probabilities >= np.array(thresholds or [0.5])]
    answers.insert(0, "predicted_label", chosen)
    return answers


def write_rows(file: IO[bytes], ending: str, rows: RawRows, answers: "DataFrame") -> None:
    """Writes the rows with the answers by place, empty for rows without a text.

    Where the rows have a column of such a name, theirs is kept and the new one gets a number.
    """
    import pandas as pd

    def as_text(cell: Any) -> Any:
        is_json = isinstance(cell, (list, dict))
        return json.dumps(cell, ensure_ascii=False, default=str) if is_json else cell

    index, cells = zip(*rows, strict=True)
    table = pd.DataFrame(cells, index, dtype=object)
    taken = set(map(str, table.columns))
    names = {name: _free_name(str(name), taken) for name in answers.columns}
    table = table.join(answers.rename(columns=names))
    if ending == ".csv":
        table.map(as_text).to_csv(file, index=False)
    elif ending == ".jsonl":
        for row in table.astype(object).where(table.notna(), None).to_dict("records"):
            file.write(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n")
    else:
        table = table.map(as_text).infer_objects()
        mixed = [name for name in table if not pd.api.types.is_numeric_dtype(table[name])]
        table[mixed] = table[mixed].map(str, na_action="ignore")  # a column has one type
        table.to_parquet(file, index=False)


def _free_name(name: str, taken: set[str]) -> str:
    names = [name, *(f"{name}_{number}" for number in range(2, len(taken) + 3))]
    return next(free for free in names if free not in taken)


if __name__ == "__main__":
    run_command(main)
