"""Continues the pretraining of a BERT with several CLS tokens: corpus folder in, run folder with an HF model out.

deepspeed pretrain/run.py --recipe base --model bert-base-uncased --corpus CORPUS --output_dir runs/base
deepspeed pretrain/run.py --recipe base --recipe k1 --corpus CORPUS --steps 1000 --dry_run
python pretrain/run.py                       # the embedded sample, in minutes
python pretrain/run.py --recipe base --corpus CORPUS --set model.num_facets=3 --print_config
"""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field

from multicls.command_line import CommandLine, RecipeOptions
from multicls.console import print_line
from multicls.corpus import Corpus
from multicls.ds_config import load_ds_config, resolve_ds_config
from multicls.errors import UserError, run_command
from multicls.files import REPOSITORY
from multicls.sample import SAMPLE, SAMPLE_CORPUS, SAMPLE_MODEL, SAMPLE_TEXT
from multicls.settings import load_settings, to_yaml
from pretrain.run_folder import status
from pretrain.settings import LENGTHS, PretrainSettings, TrainSettings, batch_arithmetic

UNFINISHED = 3  # exit code of --status


class RunOptions(RecipeOptions):
    """Options of the command that are no settings of the run."""

    config: str = Field("ds_configs/zero2.json", description="DeepSpeed JSON")
    resume: Literal["auto", "never"] = Field("auto", description="auto: go on from the newest checkpoint, if any")
    dry_run: bool = Field(False, description="make four steps, keep nothing, print what the run will take")
    status: bool = Field(False, description="print how far the run is; exit code 0: finished, 3: not")


COMMAND = CommandLine(  # no flag begins like an option of the deepspeed launcher, which reads abbreviations
    "pretrain/run.py", __doc__, RunOptions, settings=PretrainSettings, recipes="pretrain/recipes",
    groups={
        "model and data": {"model": "model.checkpoint", "corpus": "data.corpus"},
        "training": ("train.epochs", "train.steps", "train.global_batch_size", "train.micro_batch_size",
                     "train.learning_rate", "train.seed"),
        "output": ("run.output_dir",),
    },
)  # fmt: skip


def is_embedded_default(options: RunOptions, flags: Mapping[str, Any]) -> bool:
    """Returns True if no recipe, model or corpus was given."""
    return not (options.recipe or {"model.checkpoint", "data.corpus"} & flags.keys())


def parse(argv: Sequence[str] | None) -> tuple[RunOptions, PretrainSettings, dict[str, Any]]:
    """Returns the options, the settings, and those of the settings that flags give, by dotted key."""
    options, (settings, flags) = COMMAND.parse_with(argv, lambda *given: (read_settings(*given), given[1]))
    return options, settings, flags


def read_settings(options: RunOptions, flags: Mapping[str, Any]) -> PretrainSettings:
    """Returns the settings of recipes and flags; without recipe, model and corpus those of the embedded default."""
    recipes = ["pretrain/recipes/sample.yaml"] if is_embedded_default(options, flags) else options.recipe
    if flags.keys() & {"train.steps", "train.epochs"}:  # they replace the length of a recipe
        flags = {f"train.{name}": 0 for name in LENGTHS} | dict(flags)
    settings = load_settings(PretrainSettings, recipes, options.set, flags, COMMAND.names)
    if settings.run.output_dir is None:
        name = Path(recipes[-1]).stem if recipes else "pretrain"
        settings = settings.model_copy(update={"run": settings.run.model_copy(update={"output_dir": f"runs/{name}"})})
    return settings


def recipe_settings(options: RunOptions, flags: Mapping[str, Any]) -> TrainSettings | None:
    """Returns the training settings of the recipes without flags; None if there are none."""
    if not options.recipe:
        return None
    needed = {key: value for key, value in flags.items() if key in ("model.checkpoint", "data.corpus")}
    model_and_data = [text for text in options.set if text.startswith(("model.", "data."))]
    try:
        return load_settings(PretrainSettings, options.recipe, model_and_data, needed).train
    except UserError:  # the recipes are whole only with the flags
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Checks everything that needs no torch, then trains. Returns the exit code."""
    args, settings, flags = parse(argv)
    embedded = is_embedded_default(args, flags)
    if args.print_config:
        print(to_yaml(settings), end="")
        return 0
    run_folder = Path(str(settings.run.output_dir))
    if args.status:
        text, finished = status(run_folder)
        print(text)
        return 0 if finished else UNFINISHED
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    settings = fit_ranks(settings, world_size) if embedded else settings
    ds_config = load_ds_config(args.config)
    resolve_ds_config(ds_config, where=args.config, **batch_arithmetic(settings, world_size), precision=None)
    if args.resume == "never" and (run_folder / "settings.yaml").exists():
        raise UserError(f"--resume never: {run_folder} holds a run already; give another --output_dir.")
    if settings.data.corpus != SAMPLE:
        Corpus.open(settings.data.corpus)
    if rank == 0:
        for line in opening_lines(args.config, settings, embedded):
            print_line(line)
        if settings.data.corpus == SAMPLE:
            prepare_sample_corpus()

    from pretrain.job import dry_run, run_job  # import torch and deepspeed, so not before everything above is right

    if args.dry_run:
        dry_run(settings, ds_config, args.config)
    else:
        run_job(settings, ds_config, args.config, recipe_settings(args, flags))
    return 0


def fit_ranks(settings: PretrainSettings, world_size: int) -> PretrainSettings:
    """Returns the embedded default for any number of ranks: its batch grows until they can share it out."""
    train = settings.train
    groups = math.lcm(train.global_batch_size // train.negatives_group, world_size)
    changed = train.model_copy(update={"global_batch_size": groups * train.negatives_group})
    return settings.model_copy(update={"train": changed})


def opening_lines(config: str, settings: PretrainSettings, embedded: bool) -> list[str]:
    """Returns the lines that say which model, corpus and run folder are used."""
    model = SAMPLE_MODEL if settings.model.checkpoint == SAMPLE else settings.model.checkpoint
    corpus = SAMPLE_TEXT if settings.data.corpus == SAMPLE else settings.data.corpus
    about = [
        "no --recipe, --model or --corpus given: training the embedded default, a small sample.",
        "for the real thing: --recipe base --model bert-base-uncased "
        "--corpus FOLDER (written by data_prep/run.py) --output_dir FOLDER",
    ]
    run = f"run folder: {settings.run.output_dir}, DeepSpeed: {config}"
    return [*(about if embedded else []), f"model: {model}", f"corpus: {corpus}", run]


def prepare_sample_corpus() -> None:
    """Runs data_prep on the sample's corpus if that has not been done: stages pass files, not objects."""
    if not (SAMPLE_CORPUS / "manifest.json").exists():
        print_line("preparing the sample's corpus (once)")
        command = [sys.executable, str(REPOSITORY / "data_prep" / "run.py"), "--sample", "--output", str(SAMPLE_CORPUS)]
        if subprocess.run(command, check=False).returncode:
            raise UserError(f"preparing the sample's corpus failed: {shlex.join(command)}")


if __name__ == "__main__":
    run_command(main)
