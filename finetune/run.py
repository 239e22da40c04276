"""Fine-tunes a model on a task and writes one line of results.

python finetune/run.py --model runs/sample/hf --task rte --train_size 100 --head multicls --seed 1 --data_dir glue
python finetune/run.py --model runs/sample/hf --train_file tickets.csv --head mean --save_model
deepspeed --num_gpus 2 finetune/run.py --config ds_configs/zero2.json --model sample --task rte --head cls
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/, whose names must not hide packages

from finetune.heads import FITTED_HEADS
from finetune.settings import FinetuneSettings, OwnDataSettings, TrainSettings, check_names, resolve
from finetune.store.records import PlannedRun, Predicted, make_predictions, make_record
from finetune.store.results import Record, Store, short_hash
from multicls.command_line import CommandLine, RecipeOptions, curves_line, print_summary
from multicls.console import fold, show_log
from multicls.distributed import leave_deepspeed, on_rank_0, prepare_deepspeed, rank_and_world
from multicls.ds_config import load_ds_config
from multicls.environment import reset_peak_memory
from multicls.errors import print_stderr, run_command
from multicls.settings import load_settings, to_yaml
from multicls.words import counted

if TYPE_CHECKING:
    from finetune.data.encoding import Encoded
    from finetune.data.examples import LabeledExample
    from finetune.train.loop import Array

    Encode = Callable[[int, Sequence[LabeledExample]], Encoded]

log = logging.getLogger("finetune")
SEVERAL_RANKS = "ds_configs/zero0.json"  # what trains on several ranks when no --config is given
OWN = {name: f"own.{name}" for name in OwnDataSettings.model_fields}
COMMAND = CommandLine(
    "finetune/run.py", __doc__, RecipeOptions, settings=FinetuneSettings, recipes="finetune/recipes",
    sibling="finetune/grid.py",
    groups={
        "model and head": ("model", "model_name", "pretraining_seed", "trust_remote_code", "head", "pooling", "seed"),
        "task and rows": ("task", "data_dir", "train_size", "sampling", "data_seed", "label_noise", "train_from_dev",
                          "selection", "holdout", "max_length"),
        "your own rows, instead of --task": OWN,
        "training": [f"train.{name}" for name in TrainSettings.model_fields] + ["config"],
        "output": ("output_dir", "save_model", "predict_test"),
    },
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options, settings = COMMAND.parse_with(argv, read_settings)
    if options.print_config:
        print(to_yaml(settings), end="")
        return 0
    show_log(log.name, logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    try:
        records = run(settings)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print_stderr(fold(f"stopped; finished runs are kept in {settings.output_dir}, and the same command goes on "
                              "from this run's last snapshot, or from its start if it has none"))  # fmt: skip
        raise
    if rank_and_world()[0] == 0:
        _summarize(settings, records)
    if rank_and_world()[1] > 1 or settings.config:
        leave_deepspeed()
    return 0


def read_settings(options: RecipeOptions, flags: Mapping[str, Any]) -> FinetuneSettings:
    """Returns the settings of recipes and flags, with names that are known and go together."""
    settings = load_settings(FinetuneSettings, options.recipe, options.set, flags, COMMAND.names)
    check_names(settings)
    if settings.config:
        load_ds_config(settings.config)
    return settings


def _summarize(settings: FinetuneSettings, records: Sequence[Record]) -> None:
    store = Store(settings.output_dir)
    made: list[tuple[str, object]] = [("results", store.folder), *curves_line(store.folder)]
    report = ["python", "finetune/report.py", str(store.folder)]
    model = store.model_path(records[0]["run_id"])
    if model.is_dir():
        made.insert(0, ("model", model))
        report = ["python", "finetune/predict.py", str(model), "ROWS.csv"]
    print_summary(made, shlex.join(report))


def run(settings: FinetuneSettings) -> list[Record]:
    """Does one run, from the rows to the lines of results; a run that is finished already is not repeated.

    Returns:
        The lines of results, one for each task.

    Raises:
        Busy: Another process is at this run.
        UserError: Model, data or settings do not fit; no line is written then.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products; read at CUDA's start
    if settings.config or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        prepare_deepspeed()
    planned = plan_run(settings)
    with ExitStack() as stack:
        if on_rank_0(planned.records) is None:
            on_rank_0(lambda: stack.enter_context(planned.store.claim(planned.run_ids[0])) and None)
            if on_rank_0(planned.records) is None:  # nor has another process finished it just now
                return _run(planned)
    records = on_rank_0(planned.records)
    assert records is not None
    _tell(f"already finished: {planned.title}: {_scores(records)} ({_where(planned)})")
    return records


def plan_run(settings: FinetuneSettings) -> PlannedRun:
    """Returns what a run would do; reads the rows and not the model's weights, and writes nothing.

    Raises:
        UserError: Model, data, head or settings do not fit, the results folder is of another protocol, or its runs read
            other data.
    """
    from finetune.data.selection import select_rows
    from finetune.heads.checkpoint import find_checkpoint

    Store(settings.output_dir).check(write=True)
    rows = select_rows(settings)  # a misspelt file or folder is told before torch and transformers are imported
    checkpoint = find_checkpoint(settings.model, settings.trust_remote_code)

    from finetune.heads.building import check_head
    from finetune.train.loop import find_device

    check_head(settings, checkpoint)
    device, precision = find_device()
    train = resolve(settings, [len(own.train) for own in rows], precision)
    ds_config = _ds_config(settings)
    numeric = {
        "device": device.type,
        "precision": train.precision,
        "deepspeed": short_hash(ds_config[1]) if ds_config else None,
    }
    request_ids = request_ids_of(settings, checkpoint.fingerprint)
    run_ids = [short_hash([request_id, numeric]) for request_id in request_ids]
    planned = PlannedRun(settings, train, numeric, rows, checkpoint, request_ids, run_ids)
    _publish(planned, write=False)
    return planned


def request_ids_of(settings: FinetuneSettings, fingerprint: str) -> list[str]:
    """Returns a hash of all that was requested of a run and its model's fingerprint, for each of its tasks."""
    requested = settings.requested() | {"fingerprint": fingerprint}
    return [short_hash(requested | {"scored": task}) for task in settings.task_names or [settings.own.name]]


def _run(planned: PlannedRun) -> list[Record]:
    settings, store = planned.settings, planned.store
    tokenizer, encode = _encoder(planned)  # it refuses a wrong --max_length before anything is written
    _announce(planned)
    reset_peak_memory(planned.numeric["device"])  # a process of a grid has made other runs before
    predicted = (_fit if settings.head in FITTED_HEADS else _train)(planned, encode)
    records: list[Record] = [make_record(planned, predicted, task) for task in range(len(planned.rows))]
    if settings.save_model:
        _save(planned, predicted, tokenizer, records)
    if rank_and_world()[0] == 0:
        _publish(planned, write=True)
        for task, record in enumerate(records):
            store.write(record, make_predictions(planned.rows[task], predicted, task))
        store.remove_snapshots(planned.run_ids[0])
    result = predicted.result
    best = f"best of {counted(len(result.history), 'evaluation')}, step {result.best_step} of {result.steps}; "
    _tell(f"{planned.title}: {_scores(records)} ({best * bool(result.history)}{_where(planned)})")
    for text in _advice(records):
        _tell(text)
    return records


def _train(planned: PlannedRun, encode: Encode) -> Predicted:
    """Runs the training loop; predicts with its best weights the rows that did not choose them."""
    from finetune.data.metrics import score_examples
    from finetune.heads.building import build_head
    from finetune.train import loop

    settings, store, run_id = planned.settings, planned.store, planned.run_ids[0]
    device, _ = loop.find_device()
    loop.seed_everything(settings.seed, device)
    model = build_head(settings, planned.checkpoint, [own.task for own in planned.rows])
    splits, several = [], len(planned.rows) > 1
    for task, own in enumerate(planned.rows):
        choosing = own.held or own.dev
        score, curve = partial(score_examples, own.task, choosing), f"dev/{own.task.name}" if several else "dev"
        splits.append(loop.TaskSplit(encode(task, own.train), encode(task, choosing), score, curve))
    holds_out, tested = settings.selection == "holdout", any(own.test for own in planned.rows)
    result = loop.fine_tune(
        model, splits, planned.train, settings.seed, device,
        sampling=settings.cln.sampling,
        keep_weights=holds_out or settings.save_model or tested,
        ds_config=_ds_config(settings),
        snapshots=store.snapshot_path(run_id) / short_hash([own.content for own in planned.rows]),
        tensorboard=store.tensorboard_path(run_id),
    )  # fmt: skip
    if result.weights:
        loop.load_weights(model, result.weights)

    def outputs_of(task: int, examples: Sequence[LabeledExample]) -> Array:
        return loop.predict(model, encode(task, examples), device, planned.train, task)

    held, dev = result.outputs, result.outputs
    if holds_out:
        dev = [outputs_of(task, own.dev) for task, own in enumerate(planned.rows)]
    test = [[outputs_of(task, examples) for _, examples in own.test] for task, own in enumerate(planned.rows)]
    return Predicted(result, held, dev, test, model)


def _fit(planned: PlannedRun, encode: Encode) -> Predicted:
    """Fits a head by a library; nothing is chosen, so all rows to predict are predicted at once."""
    import numpy as np

    from finetune.heads.building import build_head
    from finetune.heads.probe import fit_probe
    from finetune.heads.setfit import fit_setfit
    from finetune.train.loop import FinetuneResult, find_device

    started, (own,) = time.perf_counter(), planned.rows
    blocks = [own.held, own.dev, *(examples for _, examples in own.test)]
    asked, device = [example for block in blocks for example in block], find_device()[0]
    settings = planned.settings.model_copy(update={"train": planned.train})  # in the precision that the record names
    if settings.head == "setfit":
        outputs = fit_setfit(planned.checkpoint, own.train, asked, own.task, settings, device)
    else:
        model = build_head(settings, planned.checkpoint, [own.task])
        outputs = fit_probe(model, encode(0, own.train), encode(0, asked), own.task, settings, device)
    held, dev, *test = np.split(outputs, np.cumsum([len(block) for block in blocks])[:-1])
    return Predicted(FinetuneResult(seconds=time.perf_counter() - started), [held], [dev], [test])


def _save(planned: PlannedRun, predicted: Predicted, tokenizer: Any, records: Sequence[Record]) -> None:
    from finetune.heads.saving import save_model
    from finetune.show.cards import model_card
    from finetune.train.loop import gathered
    from multicls.cards import inherited_metadata

    with gathered(predicted.model):
        if rank_and_world()[0] == 0:
            inherited = inherited_metadata(planned.checkpoint.name)
            card = model_card(records, planned.rows, inherited, planned.store.records())
            save_model(predicted.model, tokenizer, planned.model_path, card)


def _encoder(planned: PlannedRun) -> tuple[Any, Encode]:
    """Returns the tokenizer, and a function that encodes rows of the planned run's n-th task."""
    from finetune.heads.checkpoint import encode_rows, load_tokenizer

    lengths = [planned.settings.max_length or own.task.max_length for own in planned.rows]
    tokenizer = load_tokenizer(planned.checkpoint, max(lengths))

    def encode(task: int, examples: Sequence[LabeledExample]) -> Encoded:
        return encode_rows(planned.checkpoint, planned.rows[task].task, examples, lengths[task])

    return tokenizer, encode


def _ds_config(settings: FinetuneSettings) -> tuple[str, dict[str, Any]] | None:
    name = settings.config or (SEVERAL_RANKS if rank_and_world()[1] > 1 else None)
    return (name, load_ds_config(name)) if name else None


def _publish(planned: PlannedRun, write: bool) -> None:
    """Writes which rows were drawn from what, or only checks that earlier runs of the folder saw the same data."""
    from finetune.data.examples import fingerprint
    from finetune.data.splits import publish

    settings = planned.settings
    for own in planned.rows:
        name = own.task.name + ("-of-dev" if own.split == "dev" else "")
        drawn = f"{name}-{settings.train_size}-{settings.sampling}-seed{settings.data_seed}"
        for file, rows in ((name, range(own.split_rows)), (drawn, own.drawn)):
            publish(planned.store.rows_path(file), rows, own.split_rows, own.split, own.content, write)
        for task, examples in own.test if settings.own.source else ():
            path, content = planned.store.rows_path(f"{task.name}-test"), fingerprint(examples, task.labels)
            publish(path, range(len(examples)), len(examples), "test", content, write)


def _announce(planned: PlannedRun) -> None:
    settings, train = planned.settings, planned.train
    device = planned.numeric["device"]
    log.info("%s: run %s on %s in %s", planned.title, planned.run_ids[0], device, train.precision)
    for own in planned.rows:
        held = f", {len(own.held)} held out to choose" if own.held else ""
        test = "".join(f", {counted(len(rows), 'test row')} of {task.name}" for task, rows in own.test)
        rows, dev = counted(len(own.train), "train row"), counted(len(own.dev), "dev row")
        log.info("%s: %s%s, %s%s", own.task.name, rows, held, dev, test)
        for note in own.notes:
            log.info("note: %s", note)
        for warning in own.warnings if rank_and_world()[0] == 0 else ():  # the other ranks log warnings, too
            log.warning("warning: %s", warning)
    if settings.head not in FITTED_HEADS:
        steps, rows = counted(train.max_steps or 0, "step"), counted(train.batch_size or 0, "row")
        log.info("%s of %s, evaluated every %d", steps, rows, train.eval_every)


def _advice(records: Sequence[Record]) -> list[str]:
    """Returns what a reader of the scores has to know: scores on test sets, and that a constant answer is as good."""
    lines = []
    for record in records:
        constant = record["constant"].get(record["metric"], -1.0)
        if record["score"] <= constant:
            lines.append(f"warning: {record['task']}: always giving the same answer scores {100 * constant:.2f}, which "
                         "is as good or better.")  # fmt: skip
        lines += [f"test, {name}: {_percents(scores)}" for name, scores in record["test_scores"].items()]
    return lines


def _scores(records: Sequence[Record]) -> str:
    tasks = [_percents(record["scores"]) for record in records]
    if len(tasks) > 1:
        tasks = [f"{record['task']} {text}" for record, text in zip(records, tasks, strict=True)]
    return "; ".join(tasks)


def _percents(scores: dict[str, float]) -> str:
    return "  ".join(f"{name} {100 * value:.2f}" for name, value in scores.items())


def _where(planned: PlannedRun) -> str:
    return f"run {' '.join(planned.run_ids)} in {planned.store.folder}"


def _tell(text: str) -> None:
    if rank_and_world()[0] == 0:
        print(fold(text), flush=True)


if __name__ == "__main__":
    run_command(main)
