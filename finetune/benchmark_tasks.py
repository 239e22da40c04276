"""Reads the rows of the benchmarks' tasks, from official files or the Hub."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.tasks import Example, Task, TaskData, passage_id
from multicls.console import count
from multicls.errors import UserError
from multicls.tables import RawRows, Row, load_hub, read_table

SUFFIXES = {"superglue": (".jsonl",), "cs224n": (".csv",), "glue": (".tsv", ".jsonl")}
QUESTIONS = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}  # COPA


def read_task(task: Task, data_dir: str | None) -> TaskData:
    """Returns the examples of a task of the benchmarks, from the Hub if `data_dir` is None.

    `data_dir` has a folder for each task, or for each benchmark one with those (glue/, superglue/, cs224n/). A missing
    file, or a row that does not parse, is a `UserError`.
    """
    splits, notes = dict[str, Any](), list[str]()
    for name in ("train", "dev"):
        splits[name], left_out = read_split(task, name, data_dir)
        if left_out:
            notes.append(f"{name}: {count(left_out, 'row')} without a label left out")
    return TaskData(task, **splits, notes=notes)


def read_split(task: Task, split: str, data_dir: str | None) -> tuple[list[Example], int]:
    """Returns the examples of "train" or "dev", and the number of rows left out for having no label."""
    examples, left_out = list[Example](), 0
    convert = _FORMS.get(task.name) or _FORMS.get(task.benchmark) or (lambda row: iter([row]))
    for stem, part in getattr(task, split):
        rows = _file_rows(task, stem, Path(data_dir)) if data_dir else _hub_rows(task, stem)
        for number, (where, row) in enumerate(rows):
            if row.get("label", "-") in (None, ""):
                left_out += 1
                continue
            try:
                for flat in convert(row):
                    key = flat.get("key", flat.get("idx", flat.get("index", number)))
                    examples.append(_example(task, f"{stem}:{key}", flat, part))
            except KeyError as error:
                known = ", ".join(map(repr, row))
                raise UserError(f"{where}: no {error}; there is {known}.") from None
            except (TypeError, ValueError, AttributeError, IndexError) as error:
                raise UserError(f"{where}: not a row of {task.name}: {error}.") from None
    if not examples:
        raise UserError(f"task {task.name}: no row of {split} has a label.")
    return examples, left_out


def _file_rows(task: Task, stem: str, data_dir: Path) -> RawRows:
    """Returns the rows of an official file, with the Hub's names of the columns."""
    folders = (data_dir / task.folder, data_dir / task.benchmark / task.folder)
    paths = [folder / f"{stem}{end}" for folder in folders for end in SUFFIXES[task.benchmark]]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        names = " or ".join(map(str, paths))
        raise UserError(f"--data_dir {data_dir}: task {task.name} needs {names}: no such file.")
    rows = read_table(path, task.header, allow_short=True, raw=True)
    hub_names = dict(zip(task.file_columns, (*task.fields, "label"), strict=False))
    return [(where, {hub_names.get(k, k): v for k, v in row.items()}) for where, row in rows]


def _hub_rows(task: Task, stem: str) -> RawRows:
    if task.hub is None:
        raise UserError(f"task {task.name} is not on the Hub: set --data_dir, its files' folder.")
    name, configuration = task.hub
    split = re.sub("^(dev|val)", "validation", stem)
    # SuperGLUE's data set is a script, which `datasets` no longer runs; the Hub's own conversion has a folder each.
    options: dict[str, Any] = {"name": configuration}
    if task.benchmark == "superglue":
        options = {"data_dir": configuration, "revision": "refs/convert/parquet"}
    hint = f" Without network, set --data_dir, a folder that holds {task.folder}/."
    table = load_hub(name, hint, split=split, **options)
    return [(f"{name} {configuration} {split}:{i}", row) for i, row in enumerate(table)]


def _example(task: Task, key: str, row: Row, part: str) -> Example:
    texts, choices = tuple(row[name] for name in task.fields), row.get("choices", ())
    if not all(isinstance(text, str) for text in (*texts, *choices)):
        raise ValueError(f"{' and '.join(task.fields)} must be text")
    passage = "" if task.passage is None else passage_id(texts[task.passage])
    shape = {name: row[name] for name in ("spans", "group", "answer") if name in row}
    return Example(key, texts, _label(task, row["label"]), part, choices, passage=passage, **shape)


def _label(task: Task, value: Any) -> float:
    """Returns the class index or score. JSON and Hub rows may hold the index itself."""
    if task.is_regression:
        if not 0.0 <= float(value) <= task.label_scale:
            raise ValueError(f"score {value!r} is not a number in 0..{task.label_scale:g}")
        return float(value)
    if type(value) is int and 0 <= value < len(task.labels):
        return value
    names = [name.lower() for name in task.labels]  # JSON's true is "true" or "True" in files
    if (name := str(value).strip().lower()) not in names:
        raise ValueError(f"label {value!r} is none of {', '.join(task.labels)}")
    return names.index(name)


# The form of each official row, of files or the Hub, as rows with the texts and the label of the table of tasks and, if
# the task needs them, `choices`, `spans`, `group`, `answer` and `key` (what identifies the row in its file).


def _stripped(row: Row) -> Iterator[Row]:
    yield {name: (value or "").strip() for name, value in row.items()}


def _copa(row: Row) -> Iterator[Row]:
    choices = (row["choice1"], row["choice2"])
    yield {**row, "question": QUESTIONS[row["question"]], "choices": choices}


def _multirc(row: Row) -> Iterator[Row]:
    if "paragraph" in row:  # from the Hub: a row is an answer
        number, question, answer = row["idx"].values()
        answers = [{"idx": answer, "text": row["answer"], "label": row.get("label")}]
        questions = [{"idx": question, "question": row["question"], "answers": answers}]
        row = {"idx": number, "passage": {"text": row["paragraph"], "questions": questions}}
    for question in row["passage"]["questions"]:
        group = f"{row['idx']}:{question['idx']}"
        for answer in question["answers"]:
            yield {
                "passage": row["passage"]["text"],
                "question": f"{question['question']} {answer['text']}",
                "label": answer.get("label"),
                "group": group,
                "key": f"{group}:{answer['idx']}",
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
    spans = ((n - 1, int(row[f"start{n}"]), int(row[f"end{n}"])) for n in (1, 2))
    yield {**row, "spans": tuple(spans)}


def _wsc(row: Row) -> Iterator[Row]:
    target, text = row.get("target", row), row["text"]
    spans = [_mention(text, target[f"span{n}_text"], target[f"span{n}_index"]) for n in (1, 2)]
    yield {**row, "spans": tuple((0, *span) for span in spans)}


def _mention(text: str, words: str, index: int) -> tuple[int, int]:
    """Returns begin and end of the mention `words` nearest to word `index`: a few official indices are off by one."""
    starts = [match.start() for match in re.finditer(r"\S+", text)]
    pattern = r"\s+".join(map(re.escape, words.split()))
    matches = re.finditer(rf"(?<!\w){pattern}(?!\w)", text, re.IGNORECASE)
    spans = [match.span() for match in matches]
    if not spans:
        raise ValueError(f"{words!r} is not in the text")
    return min(spans, key=lambda span: abs(span[0] - starts[index]))


_FORMS: dict[str, Callable[[Row], Iterator[Row]]] = {
    "copa": _copa,
    "multirc": _multirc,
    "record": _record,
    "wic": _wic,
    "wsc": _wsc,
    "cs224n": _stripped,
}
