"""Reads the rows of the benchmarks' tasks, from official files or the Hub."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.examples import Example, TaskData, passage_id
from finetune.tables import RawRows, Row, read_table
from finetune.tasks import TASKS, Task
from multicls.console import count
from multicls.errors import UserError, first_line

SUFFIXES = {"superglue": (".jsonl",), "cs224n": (".csv",), "glue": (".tsv", ".jsonl")}
QUESTIONS = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}  # COPA


def read_task(task: Task, data_dir: str | None, with_test: bool = False) -> TaskData:
    """Returns the examples of a task of the benchmarks.

    Args:
        task: the task.
        data_dir: folder with one folder a task, or with such a folder for each benchmark (glue/, superglue/,
            cs224n/); None: the Hub.
        with_test: read the unlabelled test set, too, for a submission.

    Raises:
        UserError: A file is missing, or a row does not parse.
    """
    if not task.dev:
        raise UserError(
            f"--task {task.name} has test rows only: run `--task mnli --predict_test`, which predicts it."
        )
    if with_test and not task.test:
        raise UserError(f"--predict_test: task {task.name} has no test rows to submit.")
    notes, parts = list[str](), {"train": ((task.train, ""),), "dev": task.dev}
    splits: dict[str, list[Example]] = {"train": [], "dev": []}
    for split, stems in parts.items():
        for stem, part in stems:
            examples, dropped = read_split(task, stem, part, data_dir)
            splits[split] += examples
            if dropped:
                notes.append(f"{stem}: {count(dropped, 'row')} without all columns left out")
    tests = [(task, read_test(task, data_dir))] if with_test else []
    if with_test and task.diagnostic:
        diagnostic = TASKS[task.diagnostic]
        tests.append((diagnostic, read_test(diagnostic, data_dir)))
    return TaskData(task, splits["train"], splits["dev"], tests, notes)


def read_test(task: Task, data_dir: str | None) -> list[Example]:
    """Returns the test rows of a task, without labels."""
    parts = [read_split(task, stem, part, data_dir, True)[0] for stem, part in task.test]
    return [example for examples in parts for example in examples]


def read_split(
    task: Task, stem: str, part: str, data_dir: str | None, hidden: bool = False
) -> tuple[list[Example], int]:
    """Returns the examples of one file or split, and the number of rows left out for missing columns.

    Args:
        task: the task.
        stem: the file's name without its suffix.
        part: the part of dev or test that the rows belong to.
        data_dir: as in `read_task`.
        hidden: True for a test set: labels are not read.
    """
    rows = _file_rows(task, stem, Path(data_dir), hidden) if data_dir else _hub_rows(task, stem)
    examples, dropped = list[Example](), 0
    for number, (where, row) in enumerate(rows):
        labelled = any(row.get(name) not in (None, "") for name in task.label)
        if task.drops_short_rows and not labelled and not hidden:
            dropped += 1
            continue
        for flat in _flat_rows(task.name, row, where):
            index = flat.get("idx", flat.get("index", number)) if hidden else len(examples)
            key = f"{stem}:{flat.get('key', index)}"
            examples.append(_example(task, key, flat, where, part, hidden))
    return examples, dropped


def _file_rows(task: Task, stem: str, data_dir: Path, hidden: bool) -> RawRows:
    """Returns the rows of an official file: `.tsv` (no quoting), `.csv` (tabs, quoted) or `.jsonl`."""
    folders = (data_dir / task.folder, data_dir / task.benchmark / task.folder)
    paths = [folder / f"{stem}{end}" for folder in folders for end in SUFFIXES[task.benchmark]]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        places = " or ".join(map(str, paths))
        raise UserError(f"--data_dir {data_dir}: task {task.name} needs {places}: no such file.")
    columns = () if hidden else task.columns
    rows = read_table(path, columns, allow_short=task.drops_short_rows)
    if task.benchmark == "cs224n":
        return [(where, {k: (v or "").strip() for k, v in row.items()}) for where, row in rows]
    return rows


def _hub_rows(task: Task, stem: str) -> RawRows:
    if task.hub is None:
        raise UserError(
            f"task {task.name} is not on the Hub: give --data_dir, a folder of its files."
        )
    name, configuration = task.hub
    split = "test" if task.name == "ax" else re.sub("^(dev|val)", "validation", stem)
    # SuperGLUE's data set is a script, which `datasets` no longer runs; the Hub's own conversion has a folder each.
    options: dict[str, Any] = {"name": configuration}
    if task.benchmark == "superglue":
        options = {"data_dir": configuration, "revision": "refs/convert/parquet"}
    try:
        import datasets

        table = datasets.load_dataset(name, split=split, **options)
    except Exception as error:  # datasets, the Hub's client and sockets raise kinds of their own
        raise UserError(
            f"task {task.name}: {name} is not available from the Hub: {first_line(error)} "
            f"Without network, give --data_dir, a folder that holds {task.folder}/."
        ) from None
    return [(f"{name} {configuration} {split}:{i}", row) for i, row in enumerate(table)]


def _example(task: Task, key: str, row: Row, where: str, part: str, hidden: bool) -> Example:
    texts = tuple(_value(row, names, where) for names in task.fields)
    choices = tuple(row.get("choices", ()))
    if not all(isinstance(text, str) for text in (*texts, *choices)):
        raise UserError(f"{where}: {' and '.join(n[-1] for n in task.fields)} must be text.")
    return Example(
        key,
        texts,
        math.nan if hidden else _label(task, _value(row, task.label, where), where),
        part,
        choices,
        row.get("spans", ()),
        row.get("group", ""),
        row.get("answer", ""),
        passage="" if task.passage is None else passage_id(texts[task.passage]),
    )


def _value(row: Row, names: tuple[str, ...], where: str) -> Any:
    for name in names:
        if name in row:
            return row[name]
    known = ", ".join(map(repr, row))
    raise UserError(f"{where}: no {' or '.join(map(repr, names))}; there is {known}.")


def _label(task: Task, value: Any, where: str) -> float:
    """Returns the class index or score. JSON and Hub rows may hold the index itself."""
    if task.is_regression:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0.0 <= number <= task.label_scale:
            raise UserError(f"{where}: score {value!r} is not a number in 0..{task.label_scale:g}.")
        return number
    if type(value) is int and 0 <= value < len(task.labels):
        return value
    # SuperGLUE's JSON has booleans; submissions spell them "true" here and "True" there.
    names = [name.lower() if isinstance(value, bool) else name for name in task.labels]
    name = str(value).lower() if isinstance(value, bool) else str(value).strip()
    if name not in names:
        raise UserError(f"{where}: label {value!r} is none of {', '.join(task.labels)}.")
    return names.index(name)


# SuperGLUE: from the rows of files or the Hub to flat rows with the texts and the label of the table of tasks and, if
# the task needs them, `choices`, `spans`, `group`, `answer` and `key` (what identifies the row in its file).


def _flat_rows(task: str, row: Row, where: str) -> Iterator[Row]:
    """Yields the flat rows of the row at `where`; refuses one that does not have the official form."""
    try:
        yield from _FORMS[task](row) if task in _FORMS else (row,)
    except KeyError as error:
        known = ", ".join(map(repr, row))
        raise UserError(f"{where}: no {error.args[0]!r}; there is {known}.") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{where}: not a row of {task} in the official form: {error}.") from None


def _copa(row: Row) -> Iterator[Row]:
    if row["question"] not in QUESTIONS:
        raise ValueError(f"question {row['question']!r} is none of {', '.join(QUESTIONS)}")
    choices = (row["choice1"], row["choice2"])
    yield {**row, "question": QUESTIONS[row["question"]], "choices": choices}


def _multirc(row: Row) -> Iterator[Row]:
    if isinstance(row.get("passage", ""), str):  # from the Hub: flat already
        index = list(row["idx"].values())
        rows = [(row["paragraph"], row["question"], row["answer"], row.get("label"), index)]
    else:
        passage = row["passage"]
        rows = [
            (
                passage["text"],
                question["question"],
                answer["text"],
                answer.get("label"),
                [row["idx"], question["idx"], answer["idx"]],
            )
            for question in passage["questions"]
            for answer in question["answers"]
        ]
    for text, question, answer, label, index in rows:
        yield {
            "passage": text,
            "question": f"{question} {answer}",
            "label": label,
            "group": ":".join(map(str, index[:2])),
            "key": ":".join(map(str, index)),
        }


def _record(row: Row) -> Iterator[Row]:
    if "qas" not in row:  # from the Hub
        passage, number, entities = row["passage"], row["idx"]["passage"], row["entities"]
        queries = [(row["query"], row["idx"]["query"], row["answers"])]
    else:
        passage, number = row["passage"]["text"], row["idx"]
        spans = row["passage"]["entities"]
        entities = [passage[span["start"] : span["end"] + 1] for span in spans]  # end: inclusive
        queries = [
            (qa["query"], qa["idx"], [answer["text"] for answer in qa.get("answers", ())])
            for qa in row["qas"]
        ]
    for query, index, answers in queries:
        for entity in dict.fromkeys(entities):
            yield {
                "passage": passage,
                "query": query.replace("@placeholder", entity),
                "label": int(entity in answers),
                "group": f"{number}:{index}",
                "key": f"{number}:{index}:{entity}",
                "answer": entity,
            }


def _wic(row: Row) -> Iterator[Row]:
    spans = [(text, int(row[f"start{text + 1}"]), int(row[f"end{text + 1}"])) for text in (0, 1)]
    for text, start, end in spans:
        if not 0 <= start < end <= len(row[f"sentence{text + 1}"]):
            raise ValueError(f"characters {start}..{end} are not in sentence{text + 1}")
    yield {**row, "spans": tuple(spans)}


def _wsc(row: Row) -> Iterator[Row]:
    target, text = row.get("target", row), row["text"]
    spans = [_mention(text, target[f"span{n}_text"], target[f"span{n}_index"]) for n in (1, 2)]
    yield {**row, "spans": tuple((0, *span) for span in spans)}


def _mention(text: str, words: str, index: int) -> tuple[int, int]:
    """Returns the characters of the mention `words` that begins in the `index`-th word between blanks.

    A few indices of the official files are off by one: the nearest occurrence counts.
    """
    starts = [match.start() for match in re.finditer(r"\S+", text)]
    pattern = r"\s+".join(map(re.escape, words.split()))
    matches = re.finditer(rf"(?<!\w){pattern}(?!\w)", text, re.IGNORECASE)
    spans = [match.span() for match in matches]
    if not spans or not words.strip() or not 0 <= index < len(starts):
        raise ValueError(f"{words!r} (word {index}) is not in the text")
    return min(spans, key=lambda span: abs(span[0] - starts[index]))


_FORMS: dict[str, Callable[[Row], Iterator[Row]]] = {
    "copa": _copa,
    "multirc": _multirc,
    "record": _record,
    "wic": _wic,
    "wsc": _wsc,
}
