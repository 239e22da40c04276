"""One pretraining job on one rank: set up, train, export."""

import hashlib
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save

from data_prep.examples import ExampleStream, SpecialIds
from multicls.build import NEW_MLM_HEAD
from multicls.console import print_summary
from multicls.corpus import MANIFEST, Corpus, tokenizer_fingerprint
from multicls.deepspeed_config import Precision, check_with_deepspeed, complete_deepspeed_config
from multicls.distributed import (
    leave_deepspeed,
    on_rank_0,
    prepare_deepspeed,
    ranks_here,
    uses_cuda,
)
from multicls.environment import environment_record
from multicls.errors import UserError
from multicls.files import atomic_write, locked, read_json, read_jsonl, write_json
from multicls.modeling_multicls import TopicTable
from multicls.optim import choose_precision
from multicls.settings import to_yaml
from multicls.tokenization import facet_ids
from multicls.topics import fit_topics
from pretrain.batches import start_loader_server
from pretrain.checkpoints import Checkpoints
from pretrain.engine import build_engine, fp32_weights, prepare_layers
from pretrain.export import build_model, describe_model, load_topics, next_command, restore_model
from pretrain.log import Log
from pretrain.probing import PLAN, build_probe
from pretrain.run_folder import (
    BEST,
    DONE,
    SETTINGS,
    STOPPED,
    TOPICS,
    checkpoint_path,
    disk_errors_reported,
    refuse_foreign,
    saved_steps,
)
from pretrain.settings import PretrainSettings, batch_arithmetic, resolve_length
from pretrain.stopping import StopRequest
from pretrain.training import Job, Trainer

# Settings that change the numbers of a run not at all, or by rounding only, as the number of ranks does.
NOT_PART_OF_IDENTITY = {
    "data": {"corpus", "num_workers"},  # the corpus's manifest counts
    "train": {"precision", "micro_batch_size", "compile", "unpad"}
    | {"activation_checkpointing", "skip_nonfinite"},
}
DEEPSPEED_IDENTITY = ["data_types", "communication_data_type", "bf16", "fp16"]
DEEPSPEED_IDENTITY += ["prescale_gradients", "gradient_predivide_factor"]
# Keys of zero_optimization that change speed and memory only. Any other may also change what a checkpoint's files mean.
HARMLESS = {"overlap_comm", "reduce_bucket_size", "allgather_bucket_size", "allgather_partitions"}
HARMLESS |= {"reduce_scatter", "stage3_prefetch_bucket_size", "stage3_max_live_parameters"}
HARMLESS |= {"stage3_max_reuse_distance", "log_trace_cache_warnings"}


def run_job(settings: PretrainSettings, ds_config: dict[str, Any], corpus: Path) -> None:
    """Trains from the newest checkpoint of the run folder, or from the beginning, and exports the model.

    Args:
        settings: With the micro-batch size as a number.
        ds_config: DeepSpeed JSON as loaded, with its "auto" values.

    Raises:
        UserError: Tokenizer and corpus do not match, the run folder is in use, holds another run or no whole
            checkpoint, or the disk is full.
    """
    if settings.data.num_workers:
        start_loader_server()
    deepspeed = prepare_deepspeed()  # all ranks meet here
    run_folder = Path(settings.run.output_dir)
    with ExitStack() as stack:
        on_rank_0(lambda: stack.enter_context(locked(run_folder)))
        stack.enter_context(disk_errors_reported(run_folder))
        job = prepare(settings, ds_config, Corpus(corpus))
        if job:
            start(deepspeed, job)
        elif dist.get_rank() == 0:
            print(f"already finished at step {read_json(run_folder / DONE)['step']}")
    if dist.get_rank() == 0 and (run_folder / DONE).exists():
        view = read_json(run_folder / DONE).get("view", "")
        rows = "" if (run_folder / PLAN).exists() else " --probe_file ROWS.csv"  # no recall
        made = {
            "model": run_folder / "hf",
            "curves": f"tensorboard --logdir {run_folder / 'tb'}",
            "next": next_command(run_folder / "hf", settings.probe, view),
            "what changed": f"python tools/first_look.py {shlex.quote(str(run_folder))}{rows}",
        }
        print_summary(made.items())
    leave_deepspeed()


def prepare(settings: PretrainSettings, ds_config: dict[str, Any], corpus: Corpus) -> Job | None:
    """Builds or restores all parts of a run and checks them; None if the run has finished. Needs the process group.

    It writes nothing. Arguments and errors are those of `run_job`.
    """
    torch.set_float32_matmul_precision("high")  # TF32 for fp32, on GPUs that have it
    run_folder, stop = Path(settings.run.output_dir), StopRequest(settings.run.time_limit)
    end = on_rank_0(
        lambda: read_json(run_folder / DONE)["step"] if (run_folder / DONE).exists() else 0
    )
    notes: list[str] = []
    torch.manual_seed(settings.train.seed)
    if end or on_rank_0(lambda: saved_steps(run_folder / "checkpoints")):
        model, tokenizer = restore_model(run_folder / "model")
    else:
        on_rank_0(lambda: refuse_foreign(run_folder))
        model, tokenizer = build_model(settings.model, notes.append)
    streams = build_streams(settings, corpus, tokenizer, model.config.max_tokens)
    settings, length = resolve_length(settings, streams["train"])
    precision = choose_precision(
        settings.train.precision, torch.device("cuda" if uses_cuda() else "cpu")
    )
    length += prepare_layers(model, settings.train, precision)
    batch = batch_arithmetic(settings.train, dist.get_world_size())
    completed = complete_deepspeed_config(ds_config, precision=precision, **batch)
    check_with_deepspeed(completed, settings.config)
    numbers = identity(settings, ds_config, precision, corpus.path)  # the length is in steps
    checkpoints = Checkpoints(run_folder / "checkpoints", numbers, settings.train, settings.run)
    start_step = on_rank_0(checkpoints.resume_step)
    if end and (end >= settings.train.steps or not start_step):
        return None
    notes.insert(0, f"resuming from step {start_step}" if start_step else "fresh run")
    notes += [*length, *describe_machine(), *_notes_on_held_out(settings, streams["validation"])]
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    notes.append(f"model: {size:.1f} M parameters, {precision}")
    base = partial(build_model, settings.model, facets=False)
    untouched = None if settings.model.random_weights else base
    probe, lines = build_probe(
        settings, corpus, tokenizer, resumes=start_step > 0, untouched=untouched
    )
    notes += [*lines, *_notes_on_objectives(settings, notes)]
    parts = (settings, completed, corpus, model, tokenizer, streams, checkpoints, start_step)
    return Job(*parts, notes, probe, stop)


def _notes_on_held_out(settings: PretrainSettings, held_out: ExampleStream) -> list[str]:
    """Returns a line on the validation split, and a warning if it is smaller than a group of negatives."""
    sources, group = held_out.corpus.validation_sources, settings.train.negatives_group
    examples = held_out.examples_per_epoch
    of = f" (of {', '.join(sorted(sources))})" if sources else ""
    lines = [f"data: {held_out.num_documents:,} documents held out{of}, {examples:,} examples"]
    if examples < group:
        lines.append(
            f"warning: only {examples} examples are held out, so MCQT is validated among them, not among {group} "
            "(train.negatives_group). Set a larger --data.validation_fraction."
        )
    return lines


def _notes_on_objectives(settings: PretrainSettings, notes: Sequence[str]) -> list[str]:
    """Returns a line with the weights of the loss and chance, and a warning if a new MLM head drowns the others."""
    weights = settings.objective.in_use
    terms = " + ".join(f"{weight:g} {name}" for name, weight in weights.items())
    group, chance = settings.train.negatives_group, ""
    if "mcqt" in weights:  # both directions among the other two parts, or one
        value = 2 * math.log(2 * group) if settings.num_parts == 3 else math.log(group)
        chance = f"; chance of mcqt is {value:.2f}"
    lines = [f"loss = {terms}{chance}"]
    is_new = any(NEW_MLM_HEAD in note for note in notes)
    if is_new and weights.get("mlm", 0.0) > 0.1 * weights.get("mcqt", math.inf):
        lines.append(
            "warning: the checkpoint has no MLM head; the loss of a new one drowns MCQT, and the embeddings get worse. "
            "Set --objective.mlm to a tenth of --objective.mcqt, or to 0."
        )
    return lines


def start(deepspeed: Any, job: Job) -> None:
    """Describes the run in its folder, loads its checkpoint if there is one, and trains."""
    settings, step, checkpoints = job.settings, job.start_step, job.checkpoints
    on_rank_0(lambda: _describe(job))
    notes = [*job.notes, *_prepare_topics(job)]
    converted = on_rank_0(lambda: checkpoints.convert_if_needed(step)) if step else ""
    if converted and dist.get_rank() == 0:
        # DeepSpeed's universal form holds no frozen weights; DeepSpeed sends those of rank 0 to all ranks.
        job.model.load_state_dict(fp32_weights(checkpoint_path(checkpoints.folder, step)))
    weights, universal = settings.objective.in_use, bool(converted)
    engine = build_engine(deepspeed, job.model, job.completed, settings.train, weights, universal)
    discarded = ""
    if step:
        checkpoints.load(engine, step)
        discarded = on_rank_0(lambda: checkpoints.discard_after(step))
    log = Log(job.run_folder, dist.get_rank() == 0, step)
    for note in filter(None, [*notes, converted, discarded]):
        log.info(note)
    Trainer(engine, job, log).run()
    log.close()


def _prepare_topics(job: Job) -> list[str]:
    """Makes the topics of the corpus, if the run has them, and gives them to the probe of labels; returns log lines."""
    number, path = job.settings.model.num_topics, job.run_folder / TOPICS

    def write() -> None:
        if not job.start_step:  # a run that ended before its first checkpoint may have left others
            path.unlink(missing_ok=True)
        if number and not path.exists():
            sizes: Any = {"vocabulary": job.model.config.vocab_size}
            sizes["validation_fraction"] = job.settings.data.validation_fraction
            with atomic_write(path, "wb") as file:
                file.write(save(fit_topics(job.corpus, number, **sizes)))

    on_rank_0(write)
    state = load_topics(job.run_folder)
    if not state:
        return []
    if job.probe and job.settings.probe.file:
        job.probe.topics = TopicTable.of(state)
    made = state["table"].shape[1]
    few = f" (of {number}: there are few documents)" if made < number else ""
    return [f"topics: {made}{few}, from the words of the training documents"]


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
    theirs = tokenizer_fingerprint(tokenizer.backend_tokenizer.to_str())
    if theirs != corpus.tokenizer_fingerprint:
        raise UserError(
            f"data.corpus = {data.corpus}: another tokenizer wrote its tokens (fingerprint "
            f"{corpus.tokenizer_fingerprint[:12]}) than that of {model} ({theirs[:12]}); prepare the corpus with "
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
    settings: PretrainSettings, ds_config: Mapping[str, Any], precision: Precision, corpus: Path
) -> dict[str, Any]:
    """Returns what a checkpoint must agree on to be resumed: everything that decides the numbers, by name.

    Args:
        ds_config: DeepSpeed JSON as loaded. What completes it follows from the settings.
        precision: The one that "auto" means here.
    """
    groups = settings.model_dump(
        mode="json", exclude={"run": True, "probe": True, **NOT_PART_OF_IDENTITY}
    )
    values = {f"{group}.{name}": groups[group][name] for group in groups for name in groups[group]}
    values["train.precision"] = precision
    for name in DEEPSPEED_IDENTITY:
        value = ds_config.get(name)
        if name in ("bf16", "fp16"):  # their "enabled" is the precision
            value = {key: v for key, v in (value or {}).items() if key != "enabled"} or None
        values[f"DeepSpeed's {name}"] = value
    zero = ds_config["zero_optimization"].items()
    values |= {f"DeepSpeed's zero_optimization.{key}": v for key, v in zero if key not in HARMLESS}
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


def _describe(job: Job) -> None:
    """Writes to the run folder: the model of a new run, settings, DeepSpeed JSON, software and command."""
    settings = job.settings
    if not job.start_step:
        steps = [record["step"] for record in read_jsonl(job.run_folder / "metrics.jsonl")]
        if max(steps, default=0) > settings.run.save_every:  # it has come far enough to have saved
            raise UserError(
                f"{job.run_folder}: reports step {max(steps)}, but holds no checkpoint: put it back, or set "
                "--output_dir."
            )
    old = [STOPPED, DONE]  # a finished run may continue with more steps
    if not job.start_step:
        old.append(BEST)  # of checkpoints that are gone
    for name in old:
        (job.run_folder / name).unlink(missing_ok=True)
    with atomic_write(job.run_folder / SETTINGS) as file:
        file.write(to_yaml(settings))
    if not job.start_step:
        source = "" if settings.model.random_weights else settings.model.checkpoint
        describe_model(job.model, job.tokenizer, job.run_folder, source, job.corpus.manifest)
    write_json(job.run_folder / "ds_config.json", job.completed)
    name = torch.cuda.get_device_name() if uses_cuda() else platform.machine()
    record = {"command": shlex.join(sys.argv), "world_size": dist.get_world_size(), "device": name}
    write_json(job.run_folder / "env.json", environment_record() | record)
