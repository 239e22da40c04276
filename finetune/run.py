"""Fine-tunes a model on a task and keeps scores, predictions and curves in one folder.

python finetune/run.py --model runs/sample/hf --task rte --train_size 100 --head mean --seed 1 --data_dir glue
python finetune/run.py --model runs/sample/hf --train_file tickets.csv --head mean --save_model
deepspeed --num_gpus 2 finetune/run.py --config ds_configs/zero2.json --model sample --task rte --head cls
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

from finetune.heads import FITTED
from finetune.settings import SHORTCUTS, OwnDataSettings, RunSettings
from finetune.tasks import TASKS
from multicls.console import print_line, print_summary
from multicls.distributed import leave_deepspeed, on_rank_0, prepare_deepspeed, rank_and_world
from multicls.errors import UserError, run_command
from multicls.files import locked
from multicls.settings import parse, to_yaml

if TYPE_CHECKING:
    from finetune.heads.build import Checkpoint
    from finetune.results import Record
    from finetune.tasks import TaskData


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    settings = parse(
        RunSettings,
        argv,
        prog="finetune/run.py",
        doc=__doc__,
        shortcuts=SHORTCUTS,
        recipes="finetune/recipes",
    )
    record = run_finetune(settings)
    if rank_and_world()[0] == 0:
        _summarize(record, settings.output_dir)
    if rank_and_world()[1] > 1 or settings.config:
        leave_deepspeed()
    return 0


def run_finetune(settings: RunSettings) -> Record:
    """Makes one run, from the rows to its record; a finished run is not repeated.

    Raises:
        FolderInUse: Another process makes this run.
        Incompatible: The head does not work on the model.
        UserError: Model, data or settings do not fit; no record is written then.
    """
    from finetune.heads.build import find_checkpoint
    from finetune.results import is_finished, read_record

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products
    if settings.config or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        prepare_deepspeed()
    data = load_tasks(settings)
    checkpoint = find_checkpoint(settings.model) if settings.model else None
    with ExitStack() as stack:

        def start() -> Record | None:
            stack.enter_context(locked(settings.folder))
            return read_record(settings.folder)

        record = on_rank_0(start)
        identity = run_identity(settings, data, checkpoint)
        if record:
            check_identity(record, identity)
        if record and is_finished(settings, record):
            _print(f"already finished: {record['path']}")
        else:
            record = _run(settings, data, checkpoint, identity)
    for entry in record["tasks"]:
        for split, scores in {"dev": entry["scores"], **entry["tests"]}.items():
            values = "  ".join(f"{name} {100 * value:.2f}" for name, value in scores.items())
            _print(f"{record['system']} on {entry['task']}, {split}: {values}")
        if entry["score"] <= entry["baseline"]:
            value = f"{100 * entry['baseline']:.2f}"
            _print(f"warning: {entry['task']}: always giving the same answer scores {value}")
    return record


def load_tasks(settings: RunSettings) -> list[TaskData]:
    """Returns all examples of the tasks of a run, or of the user's own rows; a process reads them once."""
    data_dir, own, with_test = settings.data_dir, settings.own, settings.predict_test
    return [_load_task(name, data_dir, own, with_test) for name in settings.task_names or [""]]


@lru_cache(maxsize=8)
def _load_task(name: str, data_dir: str | None, own: OwnDataSettings, with_test: bool) -> TaskData:
    from finetune.benchmarks import read_task
    from finetune.own_data import load_own

    return load_own(own) if own.source else read_task(TASKS[name], data_dir, with_test)


def run_identity(
    settings: RunSettings, data: Sequence[TaskData], checkpoint: Checkpoint | None
) -> dict[str, Any]:
    """Returns all that decides the numbers of a run, for its record and its checkpoints."""
    return {
        "settings": settings.compared(),
        "weights_sha256": checkpoint.sha256 if checkpoint else "",
        "data_sha256": "+".join(part.sha256 for part in data),
        "tests_sha256": data[0].tests_sha256 if settings.own.source else "",
    }


def check_identity(record: Record, identity: Mapping[str, Any]) -> None:
    """Checks that the record is of a run of this identity.

    Raises:
        UserError: It is of another run; the message names both values of each setting that differs.
    """
    before, now = ({**run["settings"], **run} for run in (record, identity))
    keys = {*record["settings"], *now} - {"settings"}
    different = sorted(key for key in keys if before.get(key) != now.get(key))
    if pairs := [f"{key} {before.get(key)}, not {now.get(key)}" for key in different]:
        other = ", ".join(pairs)
        raise UserError(f"{record['path']}: holds another run ({other}); set another --name.")


def _run(
    settings: RunSettings,
    data: Sequence[TaskData],
    checkpoint: Checkpoint | None,
    identity: dict[str, Any],
) -> Record:
    from finetune.encoding import Encoded
    from finetune.heads.build import build_model, load_tokenizer
    from finetune.results import make_record, write_run
    from finetune.subsets import select_rows
    from finetune.tasks import example_arrays

    began, holdout = time.perf_counter(), settings.selection == "holdout"
    rows = [select_rows(part, settings.train_size, settings.subset, holdout) for part in data]
    _print(f"{settings.system} in {settings.folder}")
    for line in chain.from_iterable(part.report() for part in rows):
        _print(line)
    complete = settings.resolved([len(part.train) for part in rows])
    model, tokenizer, encoded = None, None, list[dict[str, Encoded]]()
    if checkpoint:
        lengths = [settings.max_length or part.task.max_length for part in rows]
        tokenizer = load_tokenizer(checkpoint, max(lengths))
        model = build_model(settings, checkpoint, [part.task for part in rows])
        for part, length in zip(rows, lengths, strict=True):
            splits = {"train": part.train, **part.splits()}
            encode = partial(Encoded, part.task, tokenizer=tokenizer, max_length=length)
            encoded.append({name: encode(examples) for name, examples in splits.items()})
    if settings.head in FITTED:
        from finetune.fitted import fit_head

        outputs, training = fit_head(rows[0], model, encoded, settings.seed)
    else:
        from finetune.training import TaskTrainer

        assert model is not None
        outputs, training = TaskTrainer(model, encoded, complete, identity).run()
    predictions = {
        f"{part.task.name}/{split}": example_arrays(examples, logits)
        for part, of_task in zip(rows, outputs, strict=True)
        for (split, examples), logits in zip(part.splits().items(), of_task, strict=True)
    }
    record = make_record(settings, rows, predictions) | identity | training
    record["seconds"] = round(time.perf_counter() - began, 3)
    if rank_and_world()[0] == 0:
        if settings.save_model and model and tokenizer:
            from finetune.cards import model_card
            from finetune.saving import save_model

            card = model_card(record, rows, complete, predictions)
            save_model(model, tokenizer, settings.folder / "model", card)
        write_run(settings.folder, to_yaml(settings), record, predictions)
    return record


def _summarize(record: Record, results: str) -> None:
    """Prints what the run has made, and the next command."""
    from finetune.predict import predict_command

    model = Path(record["path"], "model")
    made: list[tuple[str, object]] = [("run", record["path"])]
    next_command = ""
    if model.is_dir():
        made.insert(0, ("model", model))
        tasks = record["tasks"]
        next_command = predict_command(model, tasks[0]["description"], len(tasks) > 1)
    print_summary(made, next_command or f"python finetune/report.py {results}")


def _print(text: str) -> None:
    if rank_and_world()[0] == 0:
        print_line(text)


if __name__ == "__main__":
    run_command(main)
