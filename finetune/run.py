"""Fine-tunes a model on a task and writes one line of results.

python finetune/run.py --model RUN/hf --task rte --train_size 100 --head multicls --seed 1 --data_dir glue
deepspeed --num_gpus 2 finetune/run.py --config ds_configs/zero2.json ...
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/, whose names must not hide packages

from finetune.data.tasks import TASKS
from finetune.heads import HEADS
from finetune.settings import POOLED, FinetuneSettings, OwnDataSettings, TrainSettings, check_names, resolve
from finetune.store import results
from multicls.distributed import leave_deepspeed, on_rank_0, prepare_deepspeed, rank_and_world
from multicls.ds_config import load_ds_config
from multicls.environment import environment_record
from multicls.errors import run_command
from multicls.files import atomic_folder
from multicls.settings import Settings, load_settings, to_yaml

if TYPE_CHECKING:
    from finetune.data.encoding import Encoded
    from finetune.data.examples import LabeledExample
    from finetune.data.selection import TaskRows
    from finetune.heads.checkpoint import Checkpoint
    from finetune.train.loop import Array, FinetuneResult

    Encode = Callable[[int, Sequence[LabeledExample]], Encoded]

log = logging.getLogger("finetune")
SEVERAL_RANKS = "ds_configs/zero0.json"  # what trains on several ranks when no --config is given


@dataclass(frozen=True)
class PlannedRun:
    """A run before it is run; lists have one entry a task.

    Attributes:
        run_ids: of its lines in results.jsonl.
        title: what it is, for people.
        finished: all that it is to leave is there.
        identities: all that decides its numbers.
        rows: to learn from and to report on.
        checkpoint: to start from.
        train: the settings of the training, resolved.
    """

    run_ids: list[str]
    title: str
    finished: bool
    identities: list[dict[str, Any]]
    rows: list[TaskRows]
    checkpoint: Checkpoint
    train: TrainSettings


@dataclass(frozen=True)
class Predicted:
    """What a run has learnt: for each task the outputs (N, C) for its held-out rows, its dev rows, and its tests."""

    outcome: FinetuneResult
    held: list[Array]
    dev: list[Array]
    test: list[list[Array]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    args = vars(_parser().parse_args(argv))
    args.pop("local_rank")
    recipes, assignments, print_config = args.pop("recipe"), args.pop("set"), args.pop("print_config")
    settings = load_settings(FinetuneSettings, recipes, assignments, args)
    check_names(settings)
    if settings.config:
        load_ds_config(settings.config)
    if print_config:
        print(to_yaml(settings), end="")
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    run(settings)
    if rank_and_world()[1] > 1 or settings.config:
        leave_deepspeed()
    return 0


def plan_run(settings: FinetuneSettings) -> PlannedRun:
    """What a run would do, without the model's weights; nothing is written.

    Raises:
        UserError: model, data, head or settings do not fit, or the results folder is of another protocol.
    """
    from finetune.data.selection import select_rows
    from finetune.heads.building import check_head
    from finetune.train.loop import find_device

    done = {record["run_id"] for record in results.read_results(settings.output_dir)}
    checkpoint = _checkpoint(settings.model, settings.trust_remote_code)
    check_head(settings, checkpoint)
    rows = select_rows(settings)
    train = resolve(settings, [len(own.train) for own in rows], find_device()[1])
    identities = [_identity(settings, own, rows, checkpoint, train) for own in rows]
    run_ids = [results.run_id_of(identity) for identity in identities]
    wanted = [results.model_path(settings.output_dir, run_ids[0])] if settings.save_model else []
    wanted += [results.submission_path(settings.output_dir, run_id) for run_id in run_ids if settings.predict_test]
    names = ",".join(own.task.name for own in rows)
    head = settings.head + (f"/{settings.pooling}" if settings.head in POOLED and settings.pooling != "cls" else "")
    title = f"{names}, {settings.train_size} train rows, head {head}, seed {settings.seed}"
    finished = done.issuperset(run_ids) and all(path.exists() for path in wanted)
    return PlannedRun(run_ids, title, finished, identities, rows, checkpoint, train)


def run(settings: FinetuneSettings) -> list[dict[str, Any]]:
    """One run, from the rows to the lines of results; a run that is finished already is not repeated.

    Returns:
        The lines of results, one a task.

    Raises:
        Busy: another process is at it.
        UserError: model, data or settings do not fit; no line is written then.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products; read at CUDA's start
    if settings.config or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        prepare_deepspeed()
    planned = plan_run(settings)
    with ExitStack() as stack:
        if not on_rank_0(lambda: planned.finished):
            on_rank_0(lambda: stack.enter_context(results.claim(settings.output_dir, planned.run_ids[0])))
            if not on_rank_0(lambda: plan_run(settings).finished):  # nor has another process finished it just now
                return _run(settings, planned)
    done = {record["run_id"]: record for record in results.read_results(settings.output_dir)}
    records = [done[run_id] for run_id in planned.run_ids]
    _tell(f"already finished: {planned.title}: {_scores(records)} ({_where(settings, records)})")
    return records


def _run(settings: FinetuneSettings, planned: PlannedRun) -> list[dict[str, Any]]:
    from finetune.train.loop import find_device

    rank, encoder = rank_and_world()[0], _encoder(planned)  # it refuses a wrong --max_length before anything is written
    _announce(settings, planned, find_device()[0].type)
    predicted = (_probe if settings.head == "probe" else _train)(settings, planned, *encoder)
    records = [_record(settings, planned, predicted, task) for task in range(len(planned.rows))]
    if rank == 0:
        for task, record in enumerate(records):
            _publish(settings, planned.rows[task])
            _submit(settings, planned, predicted, task)
            results.write_result(settings.output_dir, record, _predictions(planned.rows[task], predicted, task))
    outcome = predicted.outcome
    best = f"best of {len(outcome.history)} evaluations, step {outcome.best_step} of {outcome.steps}; "
    _tell(f"{planned.title}: {_scores(records)} ({best * bool(outcome.history)}{_where(settings, records)})")
    return records


def _train(settings: FinetuneSettings, planned: PlannedRun, tokenizer: Any, encode: Encode) -> Predicted:
    """The training loop, and what its best model says of the rows that did not choose it."""
    from finetune.data.metrics import score_examples
    from finetune.heads.building import build_head
    from finetune.heads.saving import save_model
    from finetune.train import loop as training

    device, _ = training.find_device()
    training.seed_everything(settings.seed, device)
    model = build_head(settings, planned.checkpoint, [own.task for own in planned.rows])
    parts = []
    for task, own in enumerate(planned.rows):
        choosing = own.held or own.dev
        score = partial(score_examples, own.task, choosing)
        parts.append(training.TaskSplit(encode(task, own.train), encode(task, choosing), score))
    holds_out = settings.selection == "holdout"
    outcome = training.fine_tune(
        model, parts, planned.train, settings.seed, device,
        sampling=settings.cln.sampling,
        keep_weights=holds_out or settings.save_model or settings.predict_test,
        ds_config=_ds_config(settings),
    )  # fmt: skip
    if outcome.weights:
        training.load_weights(model, outcome.weights)

    def outputs_of(task: int, examples: Sequence[LabeledExample]) -> Array:
        return training.predict(model, encode(task, examples), device, planned.train, task)

    held, dev = outcome.outputs, outcome.outputs
    if holds_out:
        dev = [outputs_of(task, own.dev) for task, own in enumerate(planned.rows)]
    test = [[outputs_of(task, examples) for _, examples in own.test] for task, own in enumerate(planned.rows)]
    if settings.save_model:
        with training.gathered(model):
            if rank_and_world()[0] == 0:
                save_model(model, tokenizer, results.model_path(settings.output_dir, planned.run_ids[0]))
    return Predicted(outcome, held, dev, test)


def _probe(settings: FinetuneSettings, planned: PlannedRun, tokenizer: Any, encode: Encode) -> Predicted:
    """The frozen encoder's regression: nothing is chosen, so all rows to predict are predicted at once."""
    import numpy as np

    from finetune.heads.probe import fit_probe
    from finetune.train.loop import FinetuneResult, find_device

    started, (own,) = time.perf_counter(), planned.rows
    blocks = [own.held, own.dev, *(examples for _, examples in own.test)]
    asked = encode(0, [example for block in blocks for example in block])
    outputs = fit_probe(planned.checkpoint, encode(0, own.train), asked, own.task, settings, find_device()[0])
    held, dev, *test = np.split(outputs, np.cumsum([len(block) for block in blocks])[:-1])
    return Predicted(FinetuneResult(seconds=time.perf_counter() - started), [held], [dev], [test])


def _encoder(planned: PlannedRun) -> tuple[Any, Encode]:
    """The tokenizer, and a function that encodes rows of the planned run's n-th task."""
    from finetune.data.encoding import Encoded
    from finetune.heads.checkpoint import load_tokenizer

    lengths = [identity["max_length"] for identity in planned.identities]
    tokenizer = load_tokenizer(planned.checkpoint, max(lengths))

    def encode(task: int, examples: Sequence[LabeledExample]) -> Encoded:
        return Encoded(planned.rows[task].task, examples, tokenizer, lengths[task])

    return tokenizer, encode


def _ds_config(settings: FinetuneSettings) -> tuple[str, dict[str, Any]] | None:
    name = settings.config or (SEVERAL_RANKS if rank_and_world()[1] > 1 else None)
    return (name, load_ds_config(name)) if name else None


@lru_cache(maxsize=4)
def _checkpoint(name: str, trust_remote_code: bool) -> Checkpoint:
    """Found and fingerprinted once in a process: a grid has many cells of one model."""
    from finetune.heads.checkpoint import find_checkpoint

    return find_checkpoint(name, trust_remote_code)


def _identity(
    settings: FinetuneSettings, own: TaskRows, rows: Sequence[TaskRows], checkpoint: Checkpoint, train: TrainSettings
) -> dict[str, Any]:
    """All that decides the numbers of a run for one of its tasks."""
    names = {"train_size", "head", "seed", "data_seed", "sampling", "label_noise", "selection", "train_from_dev"}
    names |= {"holdout"} if settings.selection == "holdout" else set()
    names |= {"pooling"} if settings.head in POOLED else set()
    options = getattr(settings, settings.head, None)
    joint = [other.task.name for other in rows if other is not own]
    fingerprints = [other.fingerprint for other in rows]
    return {
        "task": own.task.name,
        **settings.model_dump(include=names),
        "options": options.model_dump(mode="json") if isinstance(options, Settings) else {},
        "max_length": settings.max_length or own.task.max_length,
        "model": checkpoint.fingerprint,
        "data": "+".join(fingerprints),
        "train": train.model_dump(mode="json"),
        **({"joint": joint} if joint else {}),
    }


def _record(settings: FinetuneSettings, planned: PlannedRun, predicted: Predicted, task: int) -> dict[str, Any]:
    """The line of results of one task."""
    from finetune.data.metrics import score_examples
    from finetune.train.loop import find_device

    own, outcome = planned.rows[task], predicted.outcome
    scores = score_examples(own.task, own.dev, predicted.dev[task])
    held = {}
    if own.held:
        held = {
            "holdout_rows": len(own.held),
            "holdout_scores": score_examples(own.task, own.held, predicted.held[task]),
        }
    return {
        "run_id": planned.run_ids[task],
        "identity": planned.identities[task],
        **settings.model_dump(include={"model", "model_name", "pretraining_seed"}),
        "benchmark": own.task.benchmark,
        "metric": own.task.metrics[0],
        "score": scores[own.task.metrics[0]],
        "scores": scores,
        **held,
        "best_step": outcome.best_step,
        "steps": outcome.steps,
        "dev_rows": len(own.dev),
        "train_rows": len(own.train),
        "history": [(step, loss, mains[task]) for step, loss, mains in outcome.history],
        "seconds": round(outcome.seconds, 2),
        "device": find_device()[0].type,
        "ranks": rank_and_world()[1],
        "notes": own.notes,
        **environment_record(),
    }


def _predictions(own: TaskRows, predicted: Predicted, task: int) -> dict[str, Any]:
    """The arrays of one task's predictions."""
    name, scale = ("scores", own.task.label_scale) if own.task.is_regression else ("logits", 1.0)

    def outputs(values: Array) -> Array:
        return values[:, 0] * scale if own.task.is_regression else values

    arrays: dict[str, Any] = {
        "ids": [example.id for example in own.dev],
        "parts": [example.part for example in own.dev],
        "groups": [example.group for example in own.dev],
        "answers": [example.answer for example in own.dev],
        "labels": [example.label for example in own.dev],
        name: outputs(predicted.dev[task]),
        "train_rows": own.train_rows,
    }
    if own.held:
        arrays |= {
            "holdout_labels": [example.label for example in own.held],
            f"holdout_{name}": outputs(predicted.held[task]),
            "holdout_rows": own.held_rows,
        }
    return arrays


def _publish(settings: FinetuneSettings, own: TaskRows) -> None:
    """The index file of the rows drawn, in the results folder."""
    from finetune.data.splits import publish

    where = "-of-dev" if own.split == "dev" else ""
    name = f"{own.task.name}-{settings.train_size}-{settings.sampling}-seed{settings.data_seed}{where}.json"
    publish(Path(settings.output_dir) / "splits" / name, own.drawn, own.split_rows, own.split, own.content)


def _submit(settings: FinetuneSettings, planned: PlannedRun, predicted: Predicted, task: int) -> None:
    """Writes the files for the benchmark's site; the folder takes its name when it is whole."""
    from finetune.data.submissions import write_submission

    if not settings.predict_test:
        return
    folder = results.submission_path(settings.output_dir, planned.run_ids[task])
    with atomic_folder(folder) as fresh:
        for (other, examples), outputs in zip(planned.rows[task].test, predicted.test[task], strict=True):
            write_submission(other, examples, outputs, fresh)


def _announce(settings: FinetuneSettings, planned: PlannedRun, device: str) -> None:
    train = planned.train
    log.info("%s: run %s on %s in %s", planned.title, planned.run_ids[0], device, train.precision)
    for own in planned.rows:
        held = f", {len(own.held)} held out to choose" if own.held else ""
        log.info("%s: %d train rows%s, %d dev rows", own.task.name, len(own.train), held, len(own.dev))
        for note in own.notes:
            log.info("note: %s", note)
    if settings.head != "probe":
        log.info("%d steps of %d rows, evaluated every %d", train.max_steps, train.batch_size, train.eval_every)


def _scores(records: Sequence[dict[str, Any]]) -> str:
    tasks = ["  ".join(f"{name} {100 * value:.2f}" for name, value in record["scores"].items()) for record in records]
    if len(tasks) > 1:
        tasks = [f"{record['identity']['task']} {text}" for record, text in zip(records, tasks, strict=True)]
    return "; ".join(tasks)


def _where(settings: FinetuneSettings, records: Sequence[dict[str, Any]]) -> str:
    return f"run {' '.join(record['run_id'] for record in records)} in {settings.output_dir}"


def _tell(text: str) -> None:
    if rank_and_world()[0] == 0:
        print(text, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)  # fmt: skip
    parser.add_argument("--recipe", action="append", default=[], metavar="FILE", help="YAML file of settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="any setting, for instance isobn.beta=1"
    )
    parser.add_argument("--print_config", action="store_true", help="print the settings as a recipe and stop")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # appended by the launcher
    choices = {"task": ", ".join(TASKS), "head": "; ".join(f"{name}: {about}" for name, about in HEADS.items())}
    for kind, prefix in ((FinetuneSettings, ""), (OwnDataSettings, "own."), (TrainSettings, "train.")):
        for name, field in kind.model_fields.items():
            if isinstance(field.default, Settings):  # of one head, or "train": --set reaches them
                continue
            default = "required" if field.is_required() else f"default {field.default}" if field.default else ""
            text = "; ".join(filter(None, (field.description, choices.get(name, default))))
            switch: dict[str, Any] = (
                {"action": "store_true", "default": None} if field.default is False else {"metavar": "X"}
            )
            parser.add_argument(f"--{name}", dest=prefix + name, help=text.replace("%", "%%"), **switch)
    return parser


if __name__ == "__main__":
    run_command(main)
