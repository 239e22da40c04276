"""Prepares a corpus: documents in, shards out.

python data_prep/run.py --input PATH [PATH ...] --output DIR --tokenizer FOLDER_OR_HUB_ID
python data_prep/run.py --sample --output DIR
python data_prep/run.py stats DIR
python data_prep/run.py show DIR 123
python data_prep/run.py verify DIR
python data_prep/run.py vocabulary --input PATH [PATH ...] --output DIR --type wordpiece
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from data_prep.settings import (
    BuildOptions,
    CorpusOptions,
    InputSettings,
    ShowOptions,
    StatsOptions,
    VocabularyOptions,
)
from multicls.command_line import CommandLine, print_summary
from multicls.console import print_line
from multicls.errors import UserError, did_you_mean, run_command

OWN_TEXT = 100_000_000  # tokens; for fewer, the recipe own_text fits better than the paper's
INPUT = tuple(InputSettings.model_fields)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; plain flags mean `build`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    commands = {
        "build": build_command,
        "show": show_command,
        "stats": stats_command,
        "verify": verify_command,
        "vocabulary": vocabulary_command,
    }
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        text = " Give text with --input." if os.path.exists(argv[0]) else did_you_mean(argv[0], commands)
        raise UserError(f"{argv[0]}: no such command.{text}")
    command = commands[argv.pop(0)] if argv and argv[0] in commands else build_command
    command(argv)


def build_command(argv: Sequence[str]) -> None:
    """Prepares a corpus folder, or continues a run that was stopped."""
    slurm = ("executor", "workers", "partition", "time", "tasks_per_job", "sbatch")
    groups = {"input and cleaning": (*INPUT, "min_sentences", "near_duplicates"), "where the tasks run": slurm}
    options = CommandLine("data_prep/run.py", __doc__, BuildOptions, groups=groups).parse(argv)
    from data_prep.engine import ExecutorOptions
    from data_prep.prepare import prepare, print_plan

    sbatch = dict(option.lstrip("-").split("=", 1) for option in options.sbatch)
    executor = ExecutorOptions(
        options.executor, options.workers, options.partition, options.time, options.tasks_per_job, sbatch
    )
    if options.plan:
        print_plan(options.settings(), options.output, executor, print_line)
        return
    prepare(options.settings(), options.output, executor, print_line)
    _summarize(options)


def _summarize(options: BuildOptions) -> None:
    from data_prep.prepare import DROPPED
    from multicls.corpus import Corpus

    corpus = Corpus.open(options.output)
    size = f"{corpus.num_documents:,} documents, {corpus.manifest['tokens'] / 1e6:,.1f} M tokens"
    made = [("corpus", f"{options.output} ({size})"), ("left out", Path(options.output) / DROPPED)]
    folder = Path(options.tokenizer)
    model = options.tokenizer if not folder.exists() or (folder / "config.json").exists() else "CHECKPOINT"
    recipe = "own_text" if corpus.manifest["tokens"] < OWN_TEXT else "base"
    command = ["deepspeed", "pretrain/run.py", "--recipe", recipe, "--model", model, "--corpus", options.output]
    print_summary(made, "" if options.sample else shlex.join(command))


def show_command(argv: Sequence[str]) -> None:
    """Prints a row and a training example of it, exactly as the model sees it."""
    command = CommandLine("data_prep/run.py show", show_command.__doc__, ShowOptions, positional=("corpus", "row"))
    asked = command.parse(argv)
    from data_prep.show import show

    print(show(asked.corpus, asked.row, asked.seq_length, asked.num_facets, asked.seed, asked.epoch, asked.window))


def stats_command(argv: Sequence[str]) -> None:
    """Prints lengths, sources, drops and coverage, and draws a picture."""
    command = CommandLine("data_prep/run.py stats", stats_command.__doc__, StatsOptions, positional=("corpus",))
    options = command.parse(argv)
    from data_prep.stats import stats

    folder = Path(options.corpus)
    picture = options.output or os.path.relpath(f"{folder.resolve()}.png")
    stats(folder, picture, options.seq_length, options.num_facets)


def verify_command(argv: Sequence[str]) -> None:
    """Compares every file of a corpus with the manifest's checksums."""
    command = CommandLine("data_prep/run.py verify", verify_command.__doc__, CorpusOptions, positional=("corpus",))
    folder = command.parse(argv).corpus
    from multicls.corpus import Corpus

    corpus = Corpus.open(folder)
    corpus.verify()
    counts = f"{corpus.num_documents} documents ({corpus.num_rows} rows) in {corpus.num_shards} shards"
    print(f"{folder}: whole, {counts}")


def vocabulary_command(argv: Sequence[str]) -> None:
    """Trains a tokenizer on the text that `build` would prepare."""
    groups = {"input and cleaning": INPUT}
    command = CommandLine("data_prep/run.py vocabulary", vocabulary_command.__doc__, VocabularyOptions, groups=groups)
    options = command.parse(argv)
    from data_prep.prepare import sentences_of
    from data_prep.vocabulary import train_vocabulary

    sentences = sentences_of(options, options.max_mb)
    train_vocabulary(
        sentences, options.output, kind=options.type, size=options.size, cased=options.cased, log=print_line
    )
    command_words = ["python", "data_prep/run.py", "--input", *options.input, "--tokenizer", options.output]
    print_summary([("tokenizer", options.output)], shlex.join([*command_words, "--output", "CORPUS"]))


if __name__ == "__main__":
    run_command(main)
