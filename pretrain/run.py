"""Continues the pretraining of a BERT with several CLS tokens: corpus folder in, run folder with an HF model out.

deepspeed pretrain/run.py --config ds_configs/zero2.json --recipe pretrain/recipes/base.yaml --corpus CORPUS
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from multicls.console import print_line
from multicls.corpus import Corpus
from multicls.ds_config import load_ds_config, resolve_ds_config
from multicls.errors import UserError, run_command
from multicls.files import REPOSITORY
from multicls.sample import SAMPLE, SAMPLE_CORPUS, SAMPLE_MODEL, SAMPLE_TEXT
from multicls.settings import load_settings, to_yaml
from pretrain.run_folder import status
from pretrain.settings import LENGTHS, RENAMED, PretrainSettings, TrainSettings, batch_arithmetic

UNFINISHED = 3  # exit code of --status
SAMPLE_RECIPE = "pretrain/recipes/sample.yaml"
FLAGS = {  # command-line flag -> setting
    "model": "model.checkpoint",
    "corpus": "data.corpus",
    "output_dir": "run.output_dir",
    "steps": "train.steps",
    "epochs": "train.epochs",
    "global_batch_size": "train.global_batch_size",
    "micro_batch_size": "train.micro_batch_size",
    "learning_rate": "train.learning_rate",
    "seed": "train.seed",
}


def size(text: str) -> int | str:
    """Reads a number of examples, or "auto"."""
    return text if text == "auto" else int(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line. No flag begins like an option of the deepspeed launcher, which reads abbreviations."""
    parser = argparse.ArgumentParser(prog="pretrain/run.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="ds_configs/zero2.json", help="DeepSpeed JSON (default: %(default)s)")
    parser.add_argument("--recipe", action="append", default=[], help="YAML settings; may be given several times")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. --set model.num_facets=3")
    parser.add_argument("--model", help="Hub id or folder of any BERT checkpoint, e.g. bert-base-uncased")
    parser.add_argument("--corpus", help="folder written by data_prep/run.py")
    parser.add_argument("--output_dir", help="run folder (default: runs/NAME_OF_RECIPE)")
    parser.add_argument("--steps", type=int, help="optimizer steps")
    parser.add_argument("--epochs", type=float, help="passes over the training documents, instead of steps")
    parser.add_argument("--global_batch_size", type=int, help="examples of an optimizer step, over all ranks")
    parser.add_argument("--micro_batch_size", type=size, help="examples of a forward pass, or auto")
    parser.add_argument("--learning_rate", type=float, help="peak learning rate")
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--resume", choices=["auto", "never"], default="auto", help="auto: go on from the newest checkpoint, if any"
    )
    parser.add_argument("--print_config", action="store_true", help="print the settings and leave")
    parser.add_argument(
        "--dry_run", action="store_true", help="make two steps, keep nothing, and print what the run will take"
    )
    parser.add_argument("--status", action="store_true", help="print how far the run is; exit code 0: finished, 3: not")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # appended by the launcher
    parser.add_argument("--micro_batches", help=argparse.SUPPRESS)  # of earlier versions
    return parser.parse_args(argv)


def is_embedded_default(args: argparse.Namespace) -> bool:
    """Returns True if no recipe, model or corpus was given."""
    return not (args.recipe or args.model or args.corpus)


def read_settings(args: argparse.Namespace) -> PretrainSettings:
    """Returns the settings of recipes and flags; without recipe, model and corpus those of the embedded default."""
    recipes = list(args.recipe)
    if is_embedded_default(args):
        recipes = [SAMPLE_RECIPE]
    flags = {setting: getattr(args, flag) for flag, setting in FLAGS.items()}
    if args.steps is not None or args.epochs is not None:  # they replace the length of a recipe
        flags |= {f"train.{name}": getattr(args, name, None) or 0 for name in LENGTHS}
    settings = load_settings(PretrainSettings, recipes, args.set, flags)
    if settings.run.output_dir is None:
        name = Path(recipes[-1]).stem if recipes else "pretrain"
        settings = settings.model_copy(update={"run": settings.run.model_copy(update={"output_dir": f"runs/{name}"})})
    return settings


def recipe_settings(args: argparse.Namespace) -> TrainSettings | None:
    """Returns the training settings of the recipes without flags; None if there are none."""
    if not args.recipe:
        return None
    needed = {"model.checkpoint": args.model, "data.corpus": args.corpus}
    model_and_data = [text for text in args.set if text.startswith(("model.", "data."))]
    try:
        return load_settings(PretrainSettings, args.recipe, model_and_data, needed).train
    except UserError:  # the recipes are whole only with the flags
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Checks everything that needs no torch, then trains. Returns the exit code."""
    args = parse(argv)
    if args.micro_batches is not None:
        raise UserError(f"--micro_batches is now --global_batch_size {RENAMED['micro_batches'].partition(' ')[2]}.")
    settings = read_settings(args)
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
    settings = fit_ranks(settings, world_size) if is_embedded_default(args) else settings
    ds_config = load_ds_config(args.config)
    resolve_ds_config(ds_config, where=args.config, **batch_arithmetic(settings, world_size), precision=None)
    if args.resume == "never" and (run_folder / "settings.yaml").exists():
        raise UserError(f"--resume never: {run_folder} holds a run already; give another --output_dir.")
    if settings.data.corpus != SAMPLE:
        Corpus.open(settings.data.corpus)
    if rank == 0:
        for line in opening_lines(args, settings):
            print_line(line)
        if settings.data.corpus == SAMPLE:
            prepare_sample_corpus()

    from pretrain.job import dry_run, run_job  # import torch and deepspeed, so not before everything above is right

    job = dry_run if args.dry_run else run_job
    job(settings, ds_config, where=args.config, run_folder=run_folder, recipe=recipe_settings(args))
    return 0


def fit_ranks(settings: PretrainSettings, world_size: int) -> PretrainSettings:
    """Returns the embedded default for any number of ranks: its batch grows until they can share it out."""
    train = settings.train
    groups = math.lcm(train.global_batch_size // train.negatives_group, world_size)
    changed = train.model_copy(update={"global_batch_size": groups * train.negatives_group})
    return settings.model_copy(update={"train": changed})


def opening_lines(args: argparse.Namespace, settings: PretrainSettings) -> list[str]:
    """Returns the lines that say which model, corpus and run folder are used."""
    model = SAMPLE_MODEL if settings.model.checkpoint == SAMPLE else settings.model.checkpoint
    corpus = SAMPLE_TEXT if settings.data.corpus == SAMPLE else settings.data.corpus
    lines = [f"model: {model}", f"corpus: {corpus}", f"run folder: {settings.run.output_dir}, DeepSpeed: {args.config}"]
    if is_embedded_default(args):
        lines[:0] = [
            "no --recipe, --model or --corpus given: training the embedded default, a small sample.",
            "for the real thing: --recipe pretrain/recipes/base.yaml --model bert-base-uncased "
            "--corpus FOLDER (written by data_prep/run.py) --output_dir FOLDER",
        ]
    return lines


def prepare_sample_corpus() -> None:
    """Runs data_prep on the sample's corpus if that has not been done: stages pass files, not objects."""
    if not (SAMPLE_CORPUS / "manifest.json").exists():
        print_line("preparing the sample's corpus (once)")
        command = [sys.executable, str(REPOSITORY / "data_prep" / "run.py"), "--sample", "--output", str(SAMPLE_CORPUS)]
        if subprocess.run(command, check=False).returncode:
            raise UserError(f"preparing the sample's corpus failed: {shlex.join(command)}")


if __name__ == "__main__":
    run_command(main)
