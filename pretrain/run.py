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

from multicls.ds_config import load_ds_config, resolve_ds_config
from multicls.errors import UserError, run_command
from multicls.files import REPOSITORY
from multicls.sample import SAMPLE_CORPUS, SAMPLE_MODEL, SAMPLE_TEXT
from multicls.settings import load_settings, to_yaml
from multicls.shards import Corpus
from pretrain.run_folder import status
from pretrain.settings import SAMPLE, PretrainSettings, batch_arithmetic

UNFINISHED = 3  # exit code of --status
SAMPLE_RECIPE = "pretrain/recipes/sample.yaml"
FLAGS = {  # command-line flag -> setting
    "model": "model.checkpoint",
    "corpus": "data.corpus",
    "output_dir": "run.output_dir",
    "steps": "train.steps",
    "micro_batches": "train.micro_batches",
    "learning_rate": "train.learning_rate",
    "seed": "train.seed",
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. No flag begins like an option of the deepspeed launcher, which reads abbreviations of those."""
    parser = argparse.ArgumentParser(prog="pretrain/run.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="ds_configs/zero2.json", help="DeepSpeed JSON (default: %(default)s)")
    parser.add_argument("--recipe", action="append", default=[], help="YAML settings; may be given several times")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. --set model.num_facets=3")
    parser.add_argument("--model", help="Hub id or folder of any BERT checkpoint, e.g. bert-base-uncased")
    parser.add_argument("--corpus", help="folder written by data_prep/run.py")
    parser.add_argument("--output_dir", help="run folder (default: runs/NAME_OF_RECIPE)")
    parser.add_argument("--steps", type=int, help="optimizer steps")
    parser.add_argument("--micro_batches", type=int, help="micro-batches of a step, shared out among the ranks")
    parser.add_argument("--learning_rate", type=float, help="peak learning rate")
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--resume", choices=["auto", "never"], default="auto", help="auto: go on from the newest checkpoint, if any"
    )
    parser.add_argument("--print_config", action="store_true", help="print the settings and leave")
    parser.add_argument(
        "--dry_run", action="store_true", help="two steps of everything, kept nowhere; what it will take"
    )
    parser.add_argument("--status", action="store_true", help="print how far the run is; exit code 0: finished, 3: not")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # appended by the launcher
    return parser.parse_args(argv)


def is_embedded_default(args: argparse.Namespace) -> bool:
    """Whether nothing says what to train on what."""
    return not (args.recipe or args.model or args.corpus)


def read_settings(args: argparse.Namespace) -> PretrainSettings:
    """Settings of recipes and flags; without any recipe, model and corpus, those of the embedded default."""
    recipes = list(args.recipe)
    if is_embedded_default(args):
        recipes = [SAMPLE_RECIPE]
    flags = {setting: getattr(args, flag) for flag, setting in FLAGS.items()}
    if args.steps is not None:
        flags["train.tokens"] = 0  # --steps replaces a recipe's tokens
    settings = load_settings(PretrainSettings, recipes, args.set, flags)
    if settings.run.output_dir is None:
        name = Path(recipes[-1]).stem if recipes else "pretrain"
        settings = settings.model_copy(update={"run": settings.run.model_copy(update={"output_dir": f"runs/{name}"})})
    return settings


def main(argv: Sequence[str] | None = None) -> int:
    """Checks everything that can be checked, then trains. Returns the exit code."""
    args = parse(argv)
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
    check_ranks(settings, world_size)
    ds_config = load_ds_config(args.config)
    resolve_ds_config(ds_config, where=args.config, **batch_arithmetic(settings, world_size), precision=None)
    if args.resume == "never" and (run_folder / "settings.yaml").exists():
        raise UserError(f"--resume never: {run_folder} holds a run already; give another --output_dir.")
    if settings.data.corpus != SAMPLE:
        Corpus.open(settings.data.corpus)
    if rank == 0:
        for line in opening_lines(args, settings):
            print(line, flush=True)
        if settings.data.corpus == SAMPLE:
            prepare_sample_corpus()

    from pretrain.job import dry_run, run_job  # import torch and deepspeed, so not before everything above is right

    (dry_run if args.dry_run else run_job)(settings, ds_config, where=args.config, run_folder=run_folder)
    return 0


def fit_ranks(settings: PretrainSettings, world_size: int) -> PretrainSettings:
    """The embedded default runs on any number of ranks: its step grows to a multiple of them."""
    count = math.lcm(settings.train.micro_batches, world_size)
    return settings.model_copy(update={"train": settings.train.model_copy(update={"micro_batches": count})})


def check_ranks(settings: PretrainSettings, world_size: int) -> None:
    """Refuses a number of ranks among which a step's micro-batches cannot be shared out."""
    count = settings.train.micro_batches
    if count % world_size:
        divisors = [str(n) for n in range(1, count + 1) if count % n == 0]
        raise UserError(
            f"train.micro_batches = {count}: cannot be shared out among {world_size} ranks; launch "
            f"{' or '.join(divisors)} rank(s), or give --micro_batches a multiple of {world_size}."
        )


def opening_lines(args: argparse.Namespace, settings: PretrainSettings) -> list[str]:
    """What is about to run on what; for the embedded default also how to get the real thing."""
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
    """Has data_prep prepare the sample's corpus where that has not been done: stages pass files, not objects."""
    if not (SAMPLE_CORPUS / "manifest.json").exists():
        print("preparing the sample's corpus (once)", flush=True)
        command = [sys.executable, str(REPOSITORY / "data_prep" / "run.py"), "--sample", "--output", str(SAMPLE_CORPUS)]
        if subprocess.run(command, check=False).returncode:
            raise UserError(f"preparing the sample's corpus failed: {shlex.join(command)}")


if __name__ == "__main__":
    run_command(main)
