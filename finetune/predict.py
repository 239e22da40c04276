"""Labels new rows with a fitted model.

python finetune/predict.py comparison/model new.csv --precision 0.95
python finetune/predict.py results/k5-mean/rte-full/p1-d1-s1/model new.jsonl --text_column body1,body2
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

import numpy as np
from pydantic import Field
from pydantic_settings import CliPositionalArg

from multicls.console import count, print_line, print_summary
from multicls.errors import UserError, run_command
from multicls.files import atomic_write
from multicls.labels import LabelType, find_columns, texts_of, with_texts
from multicls.measures import Array
from multicls.settings import Settings, parse
from multicls.tables import RawRows, read_table

if TYPE_CHECKING:
    from pandas import DataFrame

    from finetune.saved import SavedSystem

ENDINGS = (".csv", ".jsonl", ".parquet")


class PredictOptions(Settings):
    """Options of the command."""

    model: CliPositionalArg[str] = Field(
        description="a model that compare.py, or run.py --save_model, has saved"
    )
    rows: CliPositionalArg[str] = Field(description="rows: CSV, TSV, JSON lines or Parquet")
    output: str | None = Field(None, description="file; default: ROWS.predictions.csv")
    text_column: str | None = Field(None, description="text or text1,text2; default: training's")
    precision: float | None = Field(
        None, gt=0.0, lt=1.0, description="label only rows that are right so often: 0.95"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(PredictOptions, argv, prog="finetune/predict.py", doc=__doc__)
    output = Path(options.output or Path(options.rows).with_suffix(".predictions.csv"))
    if output.suffix not in ENDINGS or output.resolve() == Path(options.rows).resolve():
        raise UserError(f"--output {output}: pass another file, ending in {', '.join(ENDINGS)}.")
    from finetune.saved import SavedSystem  # after --help

    rows = read_table(Path(options.rows))
    with atomic_write(output, "wb") as file:  # before the work: it may not be possible
        system = SavedSystem(options.model)
        texts, places = read_texts(system.fields, rows, options.text_column)
        answers = label_texts(system, texts, options.precision)
        sure = int((answers.iloc[:, 0].map(str) != "").sum())
        write_rows(file, output.suffix, rows, answers.set_axis(places))
    labelled = count(sure, "row") + (f" of {len(places):,}" if sure < len(places) else "")
    print_summary([("labelled", labelled), ("written", output)])
    return 0


def label_texts(
    system: "SavedSystem", texts: Sequence[tuple[str, ...]], precision: float | None = None
) -> "DataFrame":
    """Returns the new columns of rows of texts; with a `precision`, a row that is not sure has "" as its label."""
    threshold = system.threshold(precision) if precision else 0.0
    answers = answers_of(system.kind, system.classes, system.predict(texts), system.shift)
    if precision:
        unsure = answers.filter(regex="^p_").max(axis=1) < threshold
        answers["predicted_label"] = answers["predicted_label"].mask(unsure, "")
    return answers


def read_texts(
    fields: Sequence[str], rows: RawRows, text_column: str | None = None
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Returns the texts and places of the rows that have a text in each of the columns; prints notes on the others.

    The columns are those of training, or `text_column`.
    """
    columns = text_column.split(",") if text_column else fields
    if len(columns) != len(fields):
        raise UserError(f"--text_column: the model reads {count(len(fields), 'text')} a row.")
    full, notes = with_texts(rows, find_columns(*rows[0], [columns]), "row")
    for note in notes:
        print_line(f"note: {note}")
    return [texts_of(row, columns, where) for where, row in full], [where for where, _ in full]


def answers_of(
    kind: LabelType, classes: Sequence[str], outputs: Array, shift: Array
) -> "DataFrame":
    """Returns the new columns: `predicted_label` and a probability `p_LABEL` of each label, or `predicted_score`.

    Of several labels a row has those whose output is above 0. `shift` was subtracted from the outputs.
    """
    import pandas as pd
    from scipy.special import expit, softmax

    if kind == "score":
        return pd.DataFrame({"predicted_score": outputs[:, 0].round(6)})
    several = kind == "multi_label"
    probabilities = expit(outputs + shift) if several else softmax(outputs, axis=1)
    answers = pd.DataFrame(probabilities.round(6), columns=[f"p_{name}" for name in classes])
    labels = np.array(classes, dtype=object)
    chosen: Any = labels[outputs.argmax(axis=1)]
    if several:
        chosen = [labels[row].tolist() for row in outputs > 0]
    answers.insert(0, "predicted_label", chosen)
    return answers


def write_rows(file: IO[bytes], ending: str, rows: RawRows, answers: "DataFrame") -> None:
    """Writes the rows with the answers by place, empty for rows without a text.

    Where the rows have a column of such a name, theirs is kept and the new one ends in _2.
    """
    import pandas as pd

    def as_text(cell: Any) -> Any:
        is_json = isinstance(cell, (list, dict))
        return json.dumps(cell, ensure_ascii=False, default=str) if is_json else cell

    index, cells = zip(*rows, strict=True)
    table = pd.DataFrame(cells, index, dtype=object)
    names = {name: str(name) for name in answers.columns}
    for name in names:
        while names[name] in table:
            names[name] += "_2"
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


if __name__ == "__main__":
    run_command(main)
