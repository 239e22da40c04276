"""Everything that a run needs before its first step: `Setup` checks and builds it, `start` loads a checkpoint.

`Setup` writes nothing, so that an error leaves no trace.
"""

import hashlib
import math
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save

from data_prep.examples import ExampleStream, SpecialIds
from multicls.build import MLM_HEAD, new_parts
from multicls.corpus import MANIFEST, Corpus, tokenizer_fingerprint
from multicls.deepspeed_config import Precision, check_with_deepspeed, complete_deepspeed_config
from multicls.distributed import on_rank_0, ranks_here, uses_cuda
from multicls.environment import environment_record
from multicls.errors import UserError
from multicls.files import atomic_write, read_jsonl, write_json
from multicls.modeling_multicls import TopicTable
from multicls.optim import choose_precision
from multicls.settings import to_yaml
from multicls.tokenization import facet_ids
from multicls.topics import fit_topics
from pretrain.anchor import Anchor, prepare_anchor
from pretrain.engine import (
    Engine,
    attention_dropout,
    convert_to_universal,
    fp32_weights,
    prepare_layers,
)
from pretrain.export import build_model, describe_model, load_topics, restore_model
from pretrain.folder import RunFolder
from pretrain.observe import Console, Observer, Profile
from pretrain.selection import ProbeRows, Selection, read_rows
from pretrain.settings import PretrainSettings, TrainSettings, resolve_length
from pretrain.stopping import StopRequest

# Settings that change the numbers of a run not at all, or by rounding or other dropout masks only.
NOT_PART_OF_IDENTITY = {
    "data": {"corpus", "num_workers"},  # the corpus's manifest counts
    "train": {"precision", "micro_batch_size", "compile", "unpad", "graph"}
    | {"activation_checkpointing", "skip_nonfinite"},
}
# Keys of the DeepSpeed JSON that change speed and memory only, and "enabled", which `train.precision` owns. Any other
# key may also change what a checkpoint's files mean.
HARMLESS = {"overlap_comm", "reduce_bucket_size", "allgather_bucket_size", "allgather_partitions"}
HARMLESS |= {"reduce_scatter", "stage3_prefetch_bucket_size", "stage3_max_live_parameters"}
HARMLESS |= {"stage3_max_reuse_distance", "log_trace_cache_warnings", "enabled"}


class Setup:
    """All parts of a run on this rank, built or restored, and checked. Needs the process group.

    Args:
        settings: With the micro-batch size as a number.
        ds_config: DeepSpeed JSON as loaded, with its "auto" values.

    Raises:
        UserError: Tokenizer, corpus, run folder, rows to probe or a setting does not fit.

    Attributes:
        settings: With sizes, steps and intervals as numbers, and what "auto" means here.
        ds_config: The DeepSpeed JSON with the values of the settings.
        streams: Streams of examples by split, "train" and "validation".
        identity: The values that decide the numbers of the run; a checkpoint must agree to be resumed. Flat.
        start_step: Step of the checkpoint to resume from; 0: a new run.
        is_finished: Nothing is left to do.
        rows: The rows that the run probes, if there are any.
        notes: Lines for the log.
        stop: Its time limit counts from here on.
    """

    def __init__(
        self,
        settings: PretrainSettings,
        ds_config: dict[str, Any],
        corpus: Corpus,
        folder: RunFolder,
    ) -> None:
        torch.set_float32_matmul_precision("high")  # TF32 for fp32, on GPUs that have it
        torch.manual_seed(settings.train.seed)
        self.folder, self.corpus = folder, corpus
        self.stop = StopRequest(settings.run.time_limit)
        self.is_finished = on_rank_0(lambda: folder.end > 0)
        self.notes: list[str] = []
        if self.is_finished or on_rank_0(lambda: folder.saved_steps):
            self.model, self.tokenizer = restore_model(folder)
        else:
            on_rank_0(folder.refuse_foreign)
            self.model, self.tokenizer = build_model(settings.model, self.notes.append)
        max_tokens = self.model.config.max_tokens
        self.streams = build_streams(settings, corpus, self.tokenizer, max_tokens)
        settings, lines = resolve_length(settings, self.streams["train"])
        device = torch.device("cuda" if uses_cuda() else "cpu")
        precision = choose_precision(settings.train.precision, device)
        train, more = prepare_layers(self.model, settings.train, precision)
        self.settings = settings.model_copy(update={"train": train})
        self.ds_config = complete_deepspeed_config(
            ds_config,
            micro_batch_size=int(train.micro_batch_size),
            accumulation=train.passes(dist.get_world_size()),
            world_size=dist.get_world_size(),
            max_grad_norm=train.max_grad_norm,
            precision=precision,
        )
        check_with_deepspeed(self.ds_config, settings.config)
        dropout = attention_dropout(self.model)
        self.identity = identity(self.settings, ds_config, precision, corpus.path, dropout)
        self.start_step = on_rank_0(lambda: folder.resume_step(self.identity))
        self.rows: ProbeRows | None = None
        if self.is_finished:
            return
        resumes = self.start_step > 0
        self.rows, of_rows = read_rows(self.settings, corpus, self.tokenizer, resumes=resumes)
        self.notes = [
            f"resuming from step {self.start_step}" if resumes else "fresh run",
            *self.notes,
            *lines,
            *more,
            *on_rank_0(lambda: _note_on_micro_batches(folder, self.start_step, train)),
            *describe_machine(),
            _note_on_held_out(self.streams["validation"]),
            f"model: {self.model.num_parameters() / 1e6:.1f} M parameters, {precision}",
            *of_rows,
            *(_notes_on_objectives(settings, self.model) if train.steps else []),
        ]

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the run that a checkpoint holds."""
        return {
            "ranks": dist.get_world_size(),
            "identity": self.identity,
            "micro_batch_size": self.settings.train.micro_batch_size,
        }


def start(deepspeed: Any, setup: Setup) -> tuple[Engine, list[Observer], Anchor | None]:
    """Describes the run in its folder, loads its checkpoint if there is one, and returns what the trainer needs.

    Raises:
        UserError: The folder reports more steps than it has checkpoints for, or cannot be written.
    """
    settings, folder, step = setup.settings, setup.folder, setup.start_step
    on_rank_0(lambda: _describe(setup))
    topics, lines = _prepare_topics(setup)
    build_base = partial(build_model, settings.model, facets=False)
    stream = setup.streams["train"]
    anchor = prepare_anchor(folder.anchor, settings, stream, setup.tokenizer, build_base, not step)
    engine, loaded = _start_engine(deepspeed, setup)
    console = Console(folder, step, settings.train.steps)
    for note in [*setup.notes, *lines, *loaded]:
        console.on_line(note)
    observers: list[Observer] = [console]
    if setup.rows:
        selection = Selection(
            settings,
            setup.rows,
            setup.tokenizer,
            untouched=None if settings.model.random_weights else build_base,
            reference=setup.model.config.pooling,
            topics=topics if settings.probe.file else None,
            report=console.on_line,
        )
        observers.append(selection)
    if settings.run.profile:
        observers.append(Profile(folder, settings.run.profile))
    return engine, observers, anchor


def _start_engine(deepspeed: Any, setup: Setup) -> tuple[Engine, list[str]]:
    """Returns the engine with the weights of the checkpoint to resume from, and lines for the log."""
    folder, step, ranks = setup.folder, setup.start_step, dist.get_world_size()
    saved, lines = on_rank_0(lambda: folder.meta(step)["ranks"]) if step else ranks, list[str]()
    is_converted = saved != ranks
    if is_converted:
        on_rank_0(lambda: convert_to_universal(folder.checkpoint(step), folder.universal))
        lines.append(f"checkpoint of {saved} rank(s) converted for {ranks}")
        if dist.get_rank() == 0:
            # DeepSpeed's universal form holds no frozen weights; DeepSpeed sends those of rank 0 to all ranks.
            setup.model.load_state_dict(fp32_weights(folder.checkpoint(step)))
    engine = Engine(deepspeed, setup.model, setup.ds_config, setup.settings, universal=is_converted)
    if step:
        path = folder.universal if is_converted else folder.checkpoint(step)
        engine.load(folder.checkpoints, path.name)
        dist.barrier()
        on_rank_0(lambda: shutil.rmtree(folder.universal, ignore_errors=True))
    return engine, [*lines, *engine.new_notes()]


def _prepare_topics(setup: Setup) -> tuple[TopicTable | None, list[str]]:
    """Returns the topics of the corpus, if the run has them, and a line for the log."""
    number, path = setup.settings.model.num_topics, setup.folder.topics

    def write() -> None:
        path.unlink(missing_ok=True)  # of a run that ended before its first checkpoint
        if number:
            state = fit_topics(
                setup.corpus,
                number,
                vocabulary=setup.model.config.vocab_size,
                validation_fraction=setup.settings.data.validation_fraction,
            )
            with atomic_write(path, "wb") as file:
                file.write(save(state))

    if not setup.start_step:
        on_rank_0(write)
    if not number:
        return None, []
    if not path.exists():
        raise UserError(f"{path}: is missing; put it back, or set another --output_dir.")
    state = load_topics(setup.folder)
    made = state["table"].shape[1]
    few = f" (of {number}: there are few documents)" if made < number else ""
    line = f"topics: {made}{few}, from the words of the training documents"
    return TopicTable.of(state), [line]


def _note_on_held_out(held_out: ExampleStream) -> str:
    """Returns a line on the validation split."""
    sources = held_out.corpus.validation_sources
    of = f" (of {', '.join(sorted(sources))})" if sources else ""
    number, examples = held_out.num_documents, held_out.examples_per_epoch
    return f"data: {number:,} documents held out{of}, {examples:,} examples"


def _note_on_micro_batches(folder: RunFolder, step: int, train: TrainSettings) -> list[str]:
    """Returns a line if the run continues with other micro-batches than it had."""
    size = train.micro_batch_size
    before = folder.meta(step)["micro_batch_size"] if step else size
    if before == size:
        return []
    return [
        f"train.micro_batch_size was {before} and is now {size}: the same examples, with other dropout masks"
    ]


def _notes_on_objectives(settings: PretrainSettings, model: Any) -> list[str]:
    """Returns a line with the weights of the loss and chance, and a warning if a new MLM head drowns the others."""
    weights = settings.objective.in_use
    terms = " + ".join(f"{weight:g} {name}" for name, weight in weights.items())
    chance = ""
    if "mcqt" in weights:  # both directions among the other two parts, or one
        group = settings.train.negatives_group
        value = 2 * math.log(2 * group) if settings.num_parts == 3 else math.log(group)
        chance = f"; chance of mcqt is {value:.2f}"
    lines = [f"loss = {terms}{chance}"]
    is_new = not settings.model.random_weights and MLM_HEAD in new_parts(model)
    if is_new and weights.get("mlm", 0.0) > 0.1 * weights.get("mcqt", math.inf):
        lines.append(
            "warning: the checkpoint has no MLM head; the loss of a new one drowns MCQT, and the embeddings get worse. "
            "Set --objective.mlm to a tenth of --objective.mcqt, or to 0."
        )
    return lines


def build_streams(
    settings: PretrainSettings, corpus: Corpus, tokenizer: Any, max_tokens: int | None
) -> dict[str, ExampleStream]:
    """Returns the streams of training and validation examples by split.

    Raises:
        UserError: The corpus was written by another tokenizer than the model's, the sequences are longer than the
            model's `max_tokens`, or a weight belongs to a source that the corpus does not have.
    """
    data, model = settings.data, settings.model.checkpoint
    if max_tokens and data.seq_length > max_tokens:
        raise UserError(f"data.seq_length = {data.seq_length}: {model} takes {max_tokens} at most.")
    found = tokenizer_fingerprint(tokenizer.backend_tokenizer.to_str())
    if found != corpus.tokenizer_fingerprint:
        raise UserError(
            f"data.corpus = {data.corpus}: another tokenizer wrote its tokens (fingerprint "
            f"{corpus.tokenizer_fingerprint[:12]}) than that of {model} ({found[:12]}); prepare the corpus with "
            "--tokenizer set to the model."
        )
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "pad", "mask")}
    special = SpecialIds(**ids, facets=facet_ids(tokenizer))
    stream = partial(
        ExampleStream,
        corpus,
        special,
        seq_length=data.seq_length,
        seed=settings.train.seed,
        validation_fraction=data.validation_fraction,
        num_parts=settings.num_parts,
        mlm_probability=data.mlm_probability,
    )
    train = stream(source_weights=data.source_weights)
    return {"train": train, "validation": stream(split="validation")}  # which stays comparable


def identity(
    settings: PretrainSettings,
    ds_config: Mapping[str, Any],
    precision: Precision,
    corpus: Path,
    dropout: float,
) -> dict[str, Any]:
    """Returns what a checkpoint must agree on to be resumed: everything that decides the numbers, by name.

    Args:
        ds_config: DeepSpeed JSON as loaded. What completes it follows from the settings, and its other groups change no
            number.
        precision: The one that "auto" means here.
        dropout: Rate of the attention weights that is applied; without padding it may be 0.
    """
    groups = settings.model_dump(
        mode="json", exclude={"run": True, "probe": True, **NOT_PART_OF_IDENTITY}
    )
    values = {f"{group}.{name}": groups[group][name] for group in groups for name in groups[group]}
    values["train.precision"] = precision
    values["dropout of attention (train.unpad)"] = dropout
    for name in ("data_types", "bf16", "fp16", "zero_optimization"):
        for key, value in (ds_config.get(name) or {}).items():
            if key not in HARMLESS:
                values[f"DeepSpeed's {name}.{key}"] = value
    manifest = hashlib.sha256((corpus / MANIFEST).read_bytes())
    return values | {"manifest of the corpus": manifest.hexdigest()}


def describe_machine() -> list[str]:
    """Returns a line on the devices, and a warning if other programs keep the cores busy."""
    on_gpu, threads = uses_cuda(), torch.get_num_threads()
    device = torch.cuda.get_device_name() if on_gpu else f"CPU with {threads} thread(s)"
    notes = [f"device: {device} x {dist.get_world_size()} rank(s)"]
    taken, cores, load = threads * ranks_here(), len(os.sched_getaffinity(0)), os.getloadavg()[0]
    if threads > 1 and not on_gpu and load + taken > cores + 1:
        notes.append(
            f"warning: this run takes {taken} of {cores} core(s), and other programs keep {load:.1f} busy. On a busy "
            "machine OMP_NUM_THREADS=1 is often several times as fast."
        )
    return notes


def _describe(setup: Setup) -> None:
    """Writes to the run folder: the model of a new run, settings, DeepSpeed JSON, software and command."""
    settings, folder = setup.settings, setup.folder
    is_new = not setup.start_step
    steps = [record["step"] for record in read_jsonl(folder.metrics)]
    if is_new and max(steps, default=0) > settings.run.save_every:
        raise UserError(
            f"{folder.path}: reports step {max(steps)}, but holds no checkpoint: put it back, or set --output_dir."
        )
    old = [folder.best, folder.done] if is_new else []  # of checkpoints that are gone, or no steps
    for path in [folder.stopped, *old]:
        path.unlink(missing_ok=True)
    with atomic_write(folder.settings) as file:
        file.write(to_yaml(settings))
    if is_new:
        shutil.rmtree(folder.before, ignore_errors=True)
        source = "" if settings.model.random_weights else settings.model.checkpoint
        describe_model(setup.model, setup.tokenizer, folder, source, setup.corpus.manifest)
    write_json(folder.path / "ds_config.json", setup.ds_config)
    name = torch.cuda.get_device_name() if uses_cuda() else platform.machine()
    record = {"command": shlex.join(sys.argv), "world_size": dist.get_world_size(), "device": name}
    write_json(folder.path / "env.json", environment_record() | record)
