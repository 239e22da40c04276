"""The rows of a run: read, drawn, given wrong labels where asked for, and some held out. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from finetune.data.examples import LabeledExample, TaskData, fingerprint
from finetune.data.reading import read_task
from finetune.data.splits import draw_balanced, draw_rows, hold_out, noisy_labels
from finetune.data.tasks import Task, find_task
from finetune.settings import FinetuneSettings, OwnDataSettings
from multicls.errors import UserError

FIELDS = ("data_dir", "own", "train_from_dev", "predict_test", "train_size", "sampling", "data_seed",
          "label_noise", "selection", "holdout")  # fmt: skip


@dataclass(frozen=True)
class TaskRows:
    """The rows of one task in one run.

    Attributes:
        task: whose rows they are.
        drawn: indices of the rows drawn, ascending: into `split`, from 0.
        split: "train", or "dev" with `train_from_dev`.
        split_rows: rows that it has.
        train: the rows to learn from, and in `train_rows` their indices.
        held: the rows held out of the drawn ones, and in `held_rows` their indices; empty with `selection` dev.
        dev: the rows to report on.
        test: (task, rows) to predict: of the task itself and of its diagnostics.
        notes: what a reader of the result has to know.
        fingerprint: of all drawn rows and dev.
    """

    task: Task
    drawn: list[int]
    split: str
    split_rows: int
    train: list[LabeledExample]
    train_rows: list[int]
    held: list[LabeledExample]
    held_rows: list[int]
    dev: list[LabeledExample]
    test: list[tuple[Task, list[LabeledExample]]]
    notes: list[str]
    fingerprint: str


def select_rows(settings: FinetuneSettings) -> list[TaskRows]:
    """The rows of each task of a run; a grid's cells that share them read and draw them once.

    Raises:
        UserError: rows are missing or do not parse, or an option makes no sense for a task.
    """
    values = tuple(getattr(settings, name) for name in FIELDS)
    return [_select(name, values) for name in settings.task_names or [""]]


@lru_cache(maxsize=8)
def _select(name: str, values: tuple[object, ...]) -> TaskRows:
    settings = FinetuneSettings.model_validate(
        {"model": "-", "head": "-", "task": name} | dict(zip(FIELDS, values, strict=True))
    )
    task, data, test = _read(name, settings.data_dir, settings.own, settings.train_from_dev, settings.predict_test)
    notes = ([task.about] if task.about else []) + data.notes
    source = data.dev if data.train is None else data.train
    drawn = _draw(task, source, settings, notes)
    dev = data.dev
    if settings.train_from_dev and data.train is not None:
        raise UserError(f"--train_from_dev: {task.name} has train rows of its own; leave it out.")
    if data.train is None:
        taken, groups = set(drawn), {source[row].group or None for row in drawn} - {None}
        dev = [row for index, row in enumerate(source) if index not in taken and row.group not in groups]
        if not dev:
            raise UserError(f"--train_size {settings.train_size}: leaves no row of dev to evaluate on.")
        notes.append(f"not the protocol: train rows drawn from dev, the other {len(dev)} evaluate")
    examples = _with_noise(task, [source[row] for row in drawn], drawn, settings)
    held = _hold_out(task, examples, drawn, settings)
    kept = [place for place, row in enumerate(drawn) if row not in held]
    away = [place for place, row in enumerate(drawn) if row in held]
    return TaskRows(
        task, drawn, "dev" if data.train is None else "train", len(source),
        [examples[place] for place in kept], [drawn[place] for place in kept],
        [examples[place] for place in away], [drawn[place] for place in away],
        dev, test, notes, fingerprint([*examples, *dev]),
    )  # fmt: skip


@lru_cache(maxsize=4)
def _read(
    name: str, data_dir: str | None, own: OwnDataSettings, train_from_dev: bool, with_test: bool
) -> tuple[Task, TaskData, list[tuple[Task, list[LabeledExample]]]]:
    if own.train_file and own.dev_file:
        from finetune.data.own_rows import read_own

        return *read_own(own.train_file, own.dev_file), []
    task = find_task(name)
    data = read_task(task, data_dir, train_from_dev, with_test)
    test = [(task, data.test)] if with_test else []
    for other in map(find_task, task.diagnostics if with_test else ()):
        test.append((other, read_task(other, data_dir, with_test=True).test))
    return task, data, test


def _draw(task: Task, source: Sequence[LabeledExample], settings: FinetuneSettings, notes: list[str]) -> list[int]:
    size = settings.train_size
    if settings.train_from_dev and (isinstance(size, str) or size >= len(source)):
        raise UserError(f"--train_from_dev: --train_size {size} must be a number below the {len(source)} dev rows.")
    if isinstance(size, str):
        return list(range(len(source)))
    if size > len(source):
        notes.append(f"{size} train rows asked for, {len(source)} exist: all taken")
    if settings.sampling == "uniform":
        return draw_rows(len(source), size, settings.data_seed)
    if task.is_regression:
        raise UserError(f"--sampling balanced: task {task.name} has scores for labels, no classes.")
    return draw_balanced([example.label for example in source], size, settings.data_seed)


def _with_noise(
    task: Task, examples: list[LabeledExample], rows: Sequence[int], settings: FinetuneSettings
) -> list[LabeledExample]:
    if not settings.label_noise:
        return examples
    if task.is_regression:
        raise UserError(f"--label_noise: task {task.name} has scores for labels, there is no other class to give.")
    labels = [example.label for example in examples]
    noisy = noisy_labels(rows, labels, task.num_choices or len(task.labels), settings.label_noise, settings.data_seed)
    return [replace(example, label=label) for example, label in zip(examples, noisy, strict=True)]


def _hold_out(
    task: Task, examples: Sequence[LabeledExample], rows: Sequence[int], settings: FinetuneSettings
) -> set[int]:
    if settings.selection == "dev":
        return set()
    grouped = task.shape == "multi_answer"
    classes = [0 if grouped or task.is_regression else example.label for example in examples]
    units = [example.group if grouped else example.id for example in examples]
    if len(set(units)) < 2:
        raise UserError(f"--selection holdout: {len(set(units))} train row(s) or question(s) cannot be divided.")
    return hold_out(rows, classes, units, settings.holdout, settings.data_seed)
