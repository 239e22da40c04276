"""Writes the zip file for the site of GLUE or SuperGLUE from runs made with --predict_test.

python finetune/submit.py results --benchmark glue --system k5-multicls --output glue.zip
"""

import json
import sys
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

from pydantic import Field
from pydantic_settings import CliPositionalArg

from finetune.tasks import TASKS, Task
from multicls.console import print_summary
from multicls.errors import UserError, run_command
from multicls.files import atomic_write
from multicls.settings import Settings, parse


class SubmitOptions(Settings):
    """Options of the command."""

    results: CliPositionalArg[str] = Field(description="a results folder")
    benchmark: Literal["glue", "superglue"] = Field(description="glue or superglue")
    system: str = Field(description="the system's name in the report")
    output: str = Field(description="the zip file to upload")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file from the best run of each task, by the rows that pick; returns the exit code."""
    options = parse(SubmitOptions, argv, prog="finetune/submit.py", doc=__doc__)
    from finetune.results import load_predictions, load_results  # import pandas

    runs = load_results(Path(options.results)).sort_values("selection_score")
    files = dict[str, str]()
    for task in (task for task in TASKS.values() if task.benchmark == options.benchmark):
        of_task = runs[(runs["system"] == options.system) & (runs["task"] == task.name)]
        splits = load_predictions(Path(of_task.iloc[-1]["path"]), task.name) if len(of_task) else {}
        if "test" not in splits:
            raise UserError(f"{task.name}: no run of {options.system} with --predict_test.")
        files |= submission_files(task, splits["test"])
    with atomic_write(options.output, "wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content, zipfile.ZIP_DEFLATED)
    print_summary([("written", f"{options.output} ({len(files)} files)")])
    return 0


def submission_files(task: Task, predictions: Mapping[str, Any]) -> dict[str, str]:
    """Returns name and content of the files of one task. Raises UserError for missing or repeated rows."""
    from finetune.metrics import choose_answers, predictions_of

    columns = {n: predictions[n].tolist() for n in ("ids", "parts", "groups", "answers")}
    rows, files = list(range(len(columns["ids"]))), {}
    values = [_spelled(task, value) for value in predictions_of(task, predictions["logits"])]
    if task.name == "record":  # one answer for each query, whose group is PASSAGE:QUERY
        values, columns["ids"] = columns["answers"], columns["groups"]
        rows = list(choose_answers(predictions["logits"], columns["groups"]).values())
    for _, part, stem, number in task.test:
        of_part = [row for row in rows if columns["parts"][row] == part]
        answers = {columns["ids"][row].split(":", 1)[1]: values[row] for row in of_part}
        if not len(of_part) == len(answers) == number:
            raise UserError(f"{stem}: {len(answers)} different predictions instead of {number}.")
        name = f"{stem}.tsv" if task.benchmark == "glue" else f"{stem}.jsonl"
        files[name] = "".join(f"{line}\n" for line in _lines(task, answers))
    return files


def _spelled(task: Task, value: float) -> str | int | float:
    if task.is_regression:
        return round(float(min(max(value, 0.0), 1.0)) * task.label_scale, 4)
    label = task.labels[int(value)]
    return int(label) if label.isdigit() else label


def _lines(task: Task, answers: Mapping[str, Any]) -> list[str]:
    if task.benchmark == "glue":
        return ["index\tprediction", *(f"{index}\t{value}" for index, value in answers.items())]
    if task.name != "multirc":
        return [json.dumps({"idx": int(key), "label": value}) for key, value in answers.items()]
    passages = defaultdict[int, dict[int, list[Any]]](lambda: defaultdict(list))
    for key, value in answers.items():
        number, question, answer = map(int, key.split(":"))
        passages[number][question].append({"idx": answer, "label": value})
    lines = []
    for number, questions in passages.items():
        nested = [{"idx": question, "answers": marks} for question, marks in questions.items()]
        lines.append(json.dumps({"idx": number, "passage": {"questions": nested}}))
    return lines


if __name__ == "__main__":
    run_command(main)
