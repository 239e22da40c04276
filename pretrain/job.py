"""One pretraining job on one rank: set up, train, export."""

from __future__ import annotations

import gc
import platform
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data_prep.examples import ExampleStream, SpecialIds
from multicls.cards import inherited_metadata
from multicls.command_line import curves_line, fine_tuning_command, print_summary
from multicls.configuration_multicls import MultiClsBertConfig
from multicls.console import print_line
from multicls.corpus import Corpus, tokenizer_fingerprint
from multicls.distributed import leave_deepspeed, on_rank_0, prepare_deepspeed, rank_and_world
from multicls.ds_config import Precision, check_with_deepspeed, resolve_ds_config
from multicls.environment import environment_record, peak_memory_gb
from multicls.errors import UserError
from multicls.files import FolderLock, atomic_write, read_json, read_jsonl, sha256_of, write_json
from multicls.from_bert import checkpoint_fingerprint, from_bert, load_config
from multicls.optim import choose_precision
from multicls.sample import SAMPLE, SAMPLE_CORPUS, SAMPLE_TEXT, sample_model
from multicls.settings import to_yaml
from multicls.tokenization import facet_ids
from multicls.words import duration
from pretrain.card import origin_of
from pretrain.checkpoints import Checkpoints
from pretrain.engine import build_engine
from pretrain.export import describe_model, export
from pretrain.length import settle_length
from pretrain.log import Log
from pretrain.run_folder import DONE, STOPPED, lock_patience
from pretrain.scaling import Schedule, batch_note
from pretrain.settings import LENGTHS, PretrainSettings, TrainSettings, batch_arithmetic, settle_micro_batch
from pretrain.staging import stage
from pretrain.stopping import DRY_RUN, Stopped, StopRequest
from pretrain.training import Trainer
from pretrain.turns import first_rank_first

NO_INTERVAL = 1_000_000_000  # steps; only the last step ends such an interval
DRY_STEPS = 4
# Settings that change no number of a run, or as little as the number of ranks does.
FREE = {
    "model": {"checkpoint"},  # its fingerprint counts
    "data": {"corpus", "num_workers", "local_copy", "warm_up"},  # the corpus's manifest counts
    # epochs are resolved to steps
    "train": {"epochs", "precision", "activation_checkpointing", "compile", "unpad", "skip_nonfinite"}
    | {"micro_batch_size", "micro_batch_tokens"},
}


def run_job(
    settings: PretrainSettings, ds_config: dict[str, Any], where: str, recipe: TrainSettings | None = None
) -> None:
    """Trains from the newest checkpoint of the run folder, or from the beginning, and exports the model.

    Args:
        ds_config: DeepSpeed JSON as loaded, with its "auto" values.
        where: Name of the JSON in messages.
        recipe: Training settings of the recipes alone; the log says how the learning rate goes with another batch.

    Raises:
        UserError: Tokenizer and corpus do not match, the run folder is in use, holds another run or no whole
            checkpoint, or the disk is too small.
    """
    deepspeed = prepare_deepspeed()  # all ranks meet here; rank 0 has prepared the sample's corpus before
    stop = StopRequest(settings.run.time_limit)  # before the meeting nothing is to save: a signal ends the process
    run_folder = Path(str(settings.run.output_dir))
    lock = FolderLock(run_folder)
    on_rank_0(lambda: lock.acquire(lock_patience()))
    try:
        pretrain(deepspeed, settings, ds_config, where, stop, recipe)
    finally:
        lock.release()
    if dist.get_rank() == 0 and (run_folder / DONE).exists():
        print_summary([("model", run_folder / "hf"), *curves_line(run_folder)], fine_tuning_command(run_folder / "hf"))
    leave_deepspeed()


def pretrain(
    deepspeed: Any,
    settings: PretrainSettings,
    ds_config: dict[str, Any],
    where: str,
    stop: StopRequest,
    recipe: TrainSettings | None = None,
) -> None:
    """Sets up and trains, within a process group. Arguments and errors are those of `run_job`."""
    torch.set_float32_matmul_precision("high")  # TF32 for fp32, on GPUs that have it
    notes: list[str] = []  # for the log, which opens when all checks have passed
    settings = settle(settings, recipe, notes)
    run_folder, world_size = Path(str(settings.run.output_dir)), dist.get_world_size()
    resolved = resolve_ds_config(
        ds_config, where=where, precision=_precision(settings), **batch_arithmetic(settings, world_size)
    )
    check_with_deepspeed(resolved, where)
    checkpoints = Checkpoints(
        run_folder / "checkpoints",
        settings.run.keep_checkpoints,
        identity(settings, world_size),
        world_size,
        zero_stage=resolved.get("zero_optimization", {}).get("stage", 0),
        milestone_every=settings.run.milestone_every,
    )
    if on_rank_0((run_folder / DONE).exists):
        checkpoints.check_identity()
        if dist.get_rank() == 0:
            print(f"already finished at step {read_json(run_folder / DONE)['step']}")
        return
    start = checkpoints.newest()
    on_rank_0(lambda: _check_lost(run_folder, start, settings.run.save_every))
    notes[:0] = [*checkpoints.new_notes(), f"resuming from step {start}" if start else "fresh run", _device(settings)]

    engine, streams = _build(deepspeed, settings, resolved, checkpoints, start, notes)
    if dist.get_rank() == 0:
        _describe_run(run_folder, settings, resolved)
    log = Log(run_folder, dist.get_rank() == 0, start, settings.run.wandb_project, settings.model_dump(mode="json"))
    for note in notes + checkpoints.new_notes():
        log.say(note)
    state = checkpoints.load(engine, start) if start else {}
    size = settings.train.micro_batch_size
    if (before := state.get("micro_batch_size", size)) != size:
        log.say(f"micro-batches had {before} examples and have {size} now: the same examples with other dropout")
    trainer = Trainer(
        engine, settings, streams["train"], streams["validation"], checkpoints, log, stop,
        lambda step: export(engine, run_folder, step),
    )  # fmt: skip
    _train(trainer, start, state, run_folder)
    log.close()


def _build(
    deepspeed: Any,
    settings: PretrainSettings,
    ds_config: dict[str, Any],
    checkpoints: Checkpoints,
    start: int,
    notes: list[str],
) -> tuple[Any, dict[str, ExampleStream]]:
    """Returns the engine and the streams of examples by split; adds what there is to say to `notes`."""
    torch.manual_seed(settings.train.seed)
    model, tokenizer = load_model(settings, notes.append)
    corpus = Corpus.open(stage(_corpus_folder(settings), settings.data.local_copy, settings.data.warm_up))
    streams = build_streams(settings, corpus, tokenizer, model.config)
    parameters = sum(p.numel() for p in model.parameters())
    checkpoints.check_space(parameters)
    notes += _data_notes(settings, corpus, streams["validation"])
    notes.append(f"model: {parameters / 1e6:.1f} M parameters")
    converted = checkpoints.prepare(start) if start else False
    if not start:
        run_folder = Path(str(settings.run.output_dir))
        on_rank_0(lambda: describe_model(model, tokenizer, run_folder, _origin(settings, corpus)))
    return build_engine(deepspeed, model, settings, ds_config, universal=converted), streams


def _train(trainer: Trainer, start: int, state: dict[str, Any], run_folder: Path) -> None:
    """Trains to the end, or until asked to leave; marks the run folder and says what is there."""
    log, steps = trainer.log, trainer.settings.train.steps
    try:
        metrics = trainer.run(start, state)
    except Stopped as stopped:
        leaving = stopped
        on_rank_0(lambda: _mark_stopped(run_folder, leaving, trainer.checkpoints.warning))
        log.say(f"stopped by {stopped.reason}, checkpoint at step {stopped.step}; the same command goes on")
        return
    trainer.export(steps)
    if dist.get_rank() == 0:
        write_json(run_folder / DONE, {"step": steps, "validation": metrics})
        log.say(f"done: {steps:,} steps, peak memory {peak_memory_gb(trainer.device.type):.1f} GB on rank 0")


def dry_run(settings: PretrainSettings, ds_config: dict[str, Any], where: str) -> None:
    """Makes some steps with a save, a reload, an evaluation and an export; prints what the run will take.

    It writes to a folder beside the run folder, and removes it. Errors are those of `run_job`.
    """
    run_folder = Path(str(settings.run.output_dir))
    folder = run_folder.with_name(f".{run_folder.name}.dry_run")
    changed = dict.fromkeys(("eval_every", "save_every"), NO_INTERVAL) | {"log_every": 1, "output_dir": str(folder)}
    run = settings.run.model_copy(update=changed | {"milestone_every": None, "wandb_project": None})
    train = settings.train.model_copy(update=dict.fromkeys(LENGTHS, 0) | {"steps": DRY_STEPS})
    short = settings.model_copy(update={"run": run, "train": train})
    deepspeed = prepare_deepspeed()
    length = on_rank_0(lambda: settle_length(settings, Corpus.open(_corpus_folder(settings))))[1]
    lock = FolderLock(folder)
    on_rank_0(lock.acquire)
    on_rank_0(lock.clear_folder)
    try:
        for asked in (True, False):  # stops after the first step, then goes on from its checkpoint
            stop = StopRequest()
            if asked:
                stop.ask(DRY_RUN)
            pretrain(deepspeed, short, ds_config, where, stop)
            gc.collect()  # the first engine
        if dist.get_rank() == 0:
            records = [record for record in read_jsonl(folder / "metrics.jsonl") if record["split"] == "train"]
            seconds = records[-1]["speed/seconds_per_step"]  # the first steps after a start are slow
            memory = max(record["memory/peak_gb"] for record in records)
            for line in length.words():
                print_line(line)
            print_line(
                f"dry run: {seconds:.3f} s a step, peak memory {memory:.1f} GB on rank 0; {length.steps:,} steps will "
                f"take {duration(seconds * length.steps)} without evaluations and checkpoints. Everything works; "
                "nothing is kept."
            )
    finally:
        if dist.get_rank() == 0:
            lock.clear_folder()
        lock.release()
    leave_deepspeed()


def settle(settings: PretrainSettings, recipe: TrainSettings | None, notes: list[str]) -> PretrainSettings:
    """Returns the settings with steps and micro-batch size as numbers, and adds what they come from to `notes`."""
    world_size = dist.get_world_size()
    in_steps, length = on_rank_0(lambda: settle_length(settings, Corpus.open(_corpus_folder(settings))))
    settings = settle_micro_batch(in_steps, world_size)
    train, batch = settings.train, batch_arithmetic(settings, world_size)
    notes.append(
        f"batch: {batch['micro_batch_size']} examples x {world_size} ranks x {batch['accumulation']} accumulation = "
        f"{train.global_batch_size} examples of {settings.model.num_parts} parts x {settings.data.seq_length} tokens a "
        f"step, in groups of {train.negatives_group}"
    )
    notes += length.words()
    if recipe and (note := batch_note(_schedule(recipe), _schedule(train))):
        notes.append(note)
    return settings


def _schedule(train: TrainSettings) -> Schedule:
    return Schedule(train.global_batch_size, train.learning_rate, train.warmup_ratio, train.steps)


def load_model(settings: PretrainSettings, report: Callable[[str], None]) -> tuple[Any, Any]:
    """Returns the model and its tokenizer; one rank fetches them from the Hub, the others find the files."""
    options = settings.model.model_dump(exclude={"checkpoint"})
    with first_rank_first() as may_fetch:
        if may_fetch:  # the checkpoint's card, into the local cache
            inherited_metadata(settings.model.checkpoint, local_files_only=False)
        return from_bert(_checkpoint(settings), **options, local_files_only=not may_fetch, report=report)


def build_streams(
    settings: PretrainSettings, corpus: Corpus, tokenizer: Any, config: MultiClsBertConfig
) -> dict[str, ExampleStream]:
    """Returns the streams of training and validation examples by split.

    Raises:
        UserError: The corpus was written by another tokenizer than the model's, the sequences are too long for the
            model, or a weight belongs to a source that the corpus does not have.
    """
    data = settings.data
    if data.seq_length > config.max_position_embeddings:
        raise UserError(
            f"data.seq_length = {data.seq_length}: {settings.model.checkpoint} has {config.max_position_embeddings} "
            "positions; give at most that."
        )
    theirs = tokenizer_fingerprint(tokenizer.backend_tokenizer)
    if theirs != corpus.tokenizer_fingerprint:
        raise UserError(
            f"data.corpus = {settings.data.corpus}: its tokens are of another tokenizer (fingerprint "
            f"{corpus.tokenizer_fingerprint[:12]}) than the model's, {settings.model.checkpoint} ({theirs[:12]}); "
            "prepare the corpus with --tokenizer set to the model."
        )
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "pad", "mask")}
    special = SpecialIds(**ids, facets=facet_ids(tokenizer))
    return {
        split: ExampleStream(
            corpus,
            special,
            seq_length=data.seq_length,
            seed=settings.train.seed,
            split=split,
            validation_fraction=data.validation_fraction,
            num_parts=config.num_parts,
            mlm_probability=data.mlm_probability,
            source_weights=data.source_weights if split == "train" else None,  # validation stays comparable
        )
        for split in ("train", "validation")
    }


def identity(settings: PretrainSettings, world_size: int) -> dict[str, Any]:
    """Returns what a checkpoint must agree on to be resumed: everything that decides the numbers, by name."""
    groups = settings.model_dump(mode="json", exclude={"run": True, **FREE})
    flat = {f"{group}.{name}": value for group, fields in groups.items() for name, value in fields.items()}
    flat["train.precision"] = _precision(settings)
    flat["fingerprint of model.checkpoint"] = _fingerprint(settings)
    if settings.train.gather_negatives:  # MCQT's candidates come from the micro-batches of all ranks
        flat["number of ranks (train.gather_negatives)"] = world_size
        flat["train.micro_batch_size"] = settings.train.micro_batch_size
    return flat | {"manifest of the corpus": sha256_of(_corpus_folder(settings) / "manifest.json")}


def _checkpoint(settings: PretrainSettings) -> str:
    return str(sample_model()) if settings.model.checkpoint == SAMPLE else settings.model.checkpoint


def _fingerprint(settings: PretrainSettings) -> str:
    """Returns rank 0's fingerprint of the checkpoint, without a time limit: it may have to be downloaded first."""
    found = ""
    with first_rank_first():
        if rank_and_world()[0] == 0:
            load_config(_checkpoint(settings))  # tells a wrong model before its weights are looked for
            found = checkpoint_fingerprint(_checkpoint(settings), weights=not settings.model.random_weights)[:16]
    return on_rank_0(lambda: found)


def _corpus_folder(settings: PretrainSettings) -> Path:
    return SAMPLE_CORPUS if settings.data.corpus == SAMPLE else Path(settings.data.corpus)


def _precision(settings: PretrainSettings) -> Precision:
    return choose_precision(settings.train.precision, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _origin(settings: PretrainSettings, corpus: Corpus) -> dict[str, Any]:
    """Returns what the model card says about the start of the run."""
    metadata = {} if settings.model.random_weights else inherited_metadata(settings.model.checkpoint)
    about = {"about": SAMPLE_TEXT} if settings.data.corpus == SAMPLE else {}
    return origin_of(metadata, corpus.manifest) | about


def _data_notes(settings: PretrainSettings, corpus: Corpus, validation: ExampleStream) -> list[str]:
    found, group = validation.examples_per_epoch, settings.train.negatives_group
    notes = [
        f"data: {corpus.num_documents:,} documents, {validation.num_documents:,} of them held out: {found:,} examples, "
        f"of which a validation takes {max(group, min(found, settings.run.eval_examples) // group * group):,}"
    ]
    if found < group:
        notes.append(
            f"warning: the documents held out give {found} examples, and a validation repeats them to {group}: its "
            "MCQT says nothing. Hold out more with --set data.validation_fraction=0.1"
        )
    return notes


def _device(settings: PretrainSettings) -> str:
    """Returns the device of each rank, their number and the precision, in words."""
    ranks = dist.get_world_size()
    cpu = f"CPU with {torch.get_num_threads()} thread(s){' (no GPU was found)' * (ranks > 1)}"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return f"device: {name} x {ranks} rank(s), {_precision(settings)}"


def _check_lost(run_folder: Path, start: int, save_every: float) -> None:
    """Refuses to begin again, without a word, where a run has come far enough to have saved."""
    reported = max((record["step"] for record in read_jsonl(run_folder / "metrics.jsonl")), default=0)
    if not start and reported > save_every:
        raise UserError(
            f"{run_folder}: metrics.jsonl reports step {reported}, but there is no checkpoint to go on from. Put the "
            "checkpoints back, or give another --output_dir to start from the beginning."
        )


def _mark_stopped(run_folder: Path, stopped: Stopped, warning: str) -> None:
    if warning:
        raise OSError(f"stopped by {stopped.reason}, but nothing was saved. {warning}")
    write_json(run_folder / STOPPED, {"step": stopped.step, "reason": stopped.reason})


def _describe_run(folder: Path, settings: PretrainSettings, ds_config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STOPPED).unlink(missing_ok=True)
    with atomic_write(folder / "settings.yaml") as file:
        file.write(to_yaml(settings))
    write_json(folder / "ds_config.json", ds_config)
    with atomic_write(folder / "command.txt") as file:
        file.write(shlex.join(sys.argv) + "\n")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    write_json(folder / "env.json", environment_record() | {"world_size": dist.get_world_size(), "device": device})
