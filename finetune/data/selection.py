"""Selects the rows of a run: reads, draws, adds label noise and holds out. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from finetune.data.examples import LabeledExample, TaskData, fingerprint
from finetune.data.reading import has_test_files, read_task, read_test
from finetune.data.splits import draw_balanced, draw_rows, hold_out, noisy_labels
from finetune.data.tasks import Task, find_task, label_list
from finetune.settings import FinetuneSettings, OwnDataSettings
from multicls.errors import UserError
from multicls.words import counted

FIELDS = ("data_dir", "own", "train_from_dev", "predict_test", "train_size", "sampling", "data_seed",
          "label_noise", "selection", "holdout")  # fmt: skip


@dataclass(frozen=True)
class TaskRows:
    """The rows of one task in one run."""

    task: Task
    drawn: list[int]  # indices of the rows drawn, ascending: into `split`, from 0
    split: str  # "train", or "dev" with `train_from_dev`
    split_rows: int  # number of rows in it
    train: list[LabeledExample]  # to learn from
    train_rows: list[int]  # their indices
    held: list[LabeledExample]  # held out of the drawn ones; empty with `selection` dev
    held_rows: list[int]  # their indices
    dev: list[LabeledExample]  # to report on
    test: list[tuple[Task, list[LabeledExample]]]  # to predict: test set and diagnostics; of own rows the test split
    notes: list[str]  # what a reader of the result has to know
    warnings: list[str]  # what is probably a mistake
    content: str  # fingerprint of train and dev, the same for each draw


def select_rows(settings: FinetuneSettings) -> list[TaskRows]:
    """Returns the rows of each task of a run; runs that share them read and draw them once in a process.

    Raises:
        UserError: Rows are missing or do not parse, or an option makes no sense for a task.
    """
    read: dict[str, Any] = {name: getattr(settings, name) for name in FIELDS}
    return [_select(FinetuneSettings(model="-", head="-", task=name, **read)) for name in settings.task_names or [""]]


@lru_cache(maxsize=8)
def _select(settings: FinetuneSettings) -> TaskRows:
    where = settings.data_dir, settings.own, settings.train_from_dev, settings.predict_test
    task, data, test, content = _read(settings.task, *where)
    if settings.train_from_dev and data.train is not None:
        raise UserError(f"--train_from_dev: {task.name} has train rows of its own; leave it out.")
    notes = ([task.about] if task.about else []) + data.notes
    source = data.dev if data.train is None else data.train
    drawn = _draw(task, source, settings)
    dev = data.dev if data.train is not None else _rest_of(source, drawn, settings, notes)
    examples = _with_noise(task, [source[row] for row in drawn], drawn, settings)
    held = _hold_out(task, examples, drawn, settings)
    kept = [place for place, row in enumerate(drawn) if row not in held]
    away = [place for place, row in enumerate(drawn) if row in held]
    train, split = [examples[place] for place in kept], "dev" if data.train is None else "train"
    warnings = _unlearnable(task, train, {"dev": dev, **{f"test ({other.name})": rows for other, rows in test}})
    size = settings.train_size
    if not isinstance(size, str) and size > len(source):
        warnings.append(f"--train_size {size}: there are {counted(len(source), 'row')}, and all are taken. Reports "
                        f"show such runs as {size} train rows, apart from those of --train_size full.")  # fmt: skip
    return TaskRows(
        task, drawn, split, len(source), train, [drawn[place] for place in kept],
        [examples[place] for place in away], [drawn[place] for place in away],
        dev, test, notes, warnings, content,
    )  # fmt: skip


def _unlearnable(
    task: Task, train: Sequence[LabeledExample], evaluated: Mapping[str, Sequence[LabeledExample]]
) -> list[str]:
    """Returns in words which labels the train rows cannot teach; `evaluated` holds the other rows by their name."""
    if task.is_regression or task.num_choices:
        return []
    known = {label for row in train for label in row.classes}
    found = []
    if len(known) == 1 and all(row.classes for row in train):
        found.append(f"all train rows have the label {task.labels[min(known)]!r}")
    for name, rows in evaluated.items():
        unseen = [row for row in rows if not known.issuperset(row.classes)]
        labels = [task.labels[label] for label in sorted({one for row in unseen for one in row.classes} - known)]
        if unseen:
            found.append(f"{counted(len(unseen), f'{name} row')} of {len(rows)} cannot be right: no train row has the "
                         f"{'labels' if len(labels) > 1 else 'label'} {label_list(labels)}")  # fmt: skip
    return found


@lru_cache(maxsize=4)
def _read(
    name: str, data_dir: str | None, own: OwnDataSettings, train_from_dev: bool, with_test: bool
) -> tuple[Task, TaskData, list[tuple[Task, list[LabeledExample]]], str]:
    """Returns the task, its rows, the test rows to predict, and the fingerprint of the rows."""
    if own.source:
        from finetune.data.own_rows import read_own

        task, data = read_own(own)
        test = [(task, data.test)] if data.test else []
    else:
        task = find_task(name)
        data = read_task(task, data_dir, train_from_dev)
        test = [(task, read_test(task, data_dir))] if with_test else []
        for other in map(find_task, task.diagnostics if with_test else ()):
            if has_test_files(other, data_dir):
                test.append((other, read_test(other, data_dir)))
            else:
                data.notes.append(f"{other.name} is not in {data_dir}: not predicted")
    rows = [*(data.train or ()), *data.dev]
    return task, data, test, fingerprint(rows, task.labels, task.label_scale)


def _rest_of(
    source: Sequence[LabeledExample], drawn: Sequence[int], settings: FinetuneSettings, notes: list[str]
) -> list[LabeledExample]:
    """Returns the rows of dev that share no question and no passage with the rows drawn from it."""
    taken = set(drawn)
    groups, passages = {source[row].group for row in drawn} - {""}, {source[row].passage for row in drawn} - {""}
    dev = [row for index, row in enumerate(source)
           if index not in taken and row.group not in groups and row.passage not in passages]  # fmt: skip
    if not dev:
        raise UserError(f"--train_size {settings.train_size}: leaves no row of dev to evaluate on.")
    notes.append(f"not the protocol: train rows drawn from dev, the other {len(dev)} evaluate")
    return dev


def _draw(task: Task, source: Sequence[LabeledExample], settings: FinetuneSettings) -> list[int]:
    size = settings.train_size
    if settings.train_from_dev and (isinstance(size, str) or size >= len(source)):
        raise UserError(f"--train_from_dev: --train_size {size} must be a number below the {len(source)} dev rows.")
    if isinstance(size, str):
        return list(range(len(source)))
    if settings.sampling == "uniform":
        return draw_rows(len(source), size, settings.data_seed)
    _check_one_class_a_row(task, "--sampling balanced")
    return draw_balanced([example.label for example in source], size, settings.data_seed)


def _with_noise(
    task: Task, examples: list[LabeledExample], rows: Sequence[int], settings: FinetuneSettings
) -> list[LabeledExample]:
    if not settings.label_noise:
        return examples
    _check_one_class_a_row(task, "--label_noise")
    labels = [example.label for example in examples]
    noisy = noisy_labels(rows, labels, task.num_choices or len(task.labels), settings.label_noise, settings.data_seed)
    return [replace(example, label=label) for example, label in zip(examples, noisy, strict=True)]


def _check_one_class_a_row(task: Task, option: str) -> None:
    if task.is_regression or task.multi_label:
        kind = "scores for labels" if task.is_regression else "several labels a row"
        raise UserError(f"{option}: task {task.name} has {kind}; leave the option out. It needs one class a row.")


def _hold_out(
    task: Task, examples: Sequence[LabeledExample], rows: Sequence[int], settings: FinetuneSettings
) -> set[int]:
    """Returns the rows held out: whole passages (or questions), the classes in proportion if a row has one class."""
    if settings.selection == "dev":
        return set()
    mixed = task.shape == "multi_answer" or task.is_regression
    classes = [0 if mixed else example.label for example in examples]
    units = [example.passage or example.group or example.id for example in examples]
    if len(set(units)) < 2:
        raise UserError(f"--selection holdout: {len(set(units))} train row(s) or passage(s) cannot be divided.")
    return hold_out(rows, classes, units, settings.holdout, settings.data_seed)
