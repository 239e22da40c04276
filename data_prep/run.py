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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from data_prep.settings import (
    BuildOptions,
    CorpusOptions,
    ExampleOptions,
    ExecutorOptions,
    ReadOptions,
    ShowOptions,
    StatsOptions,
    VocabularyOptions,
)
from multicls.command_line import CommandLine, print_summary
from multicls.console import print_line
from multicls.errors import UserError, did_you_mean, run_command
from multicls.settings import Settings
from multicls.words import counted, tokens_in_words

if TYPE_CHECKING:
    from multicls.corpus import Corpus

OWN_TEXT = 100_000_000  # tokens; for fewer, the recipe own_text fits better than the paper's
HELD_OUT, NEGATIVES = 0.05, 10  # of that recipe: data.validation_fraction, train.negatives_group
INPUT = ("input", "include", "exclude", "format", *ReadOptions.model_fields, "language", "without")
Subcommand = tuple[CommandLine[Any], Callable[[Any], None]]


def build_command(options: BuildOptions) -> None:
    """Prepares a corpus folder, or continues a run that was stopped."""
    from data_prep.prepare import prepare, print_plan

    if options.plan:
        print_plan(options.settings(), options.output, options, print_line)
        return
    prepare(options.settings(), options.output, options, print_line)
    _summarize(options)


def _summarize(options: BuildOptions) -> None:
    from data_prep.prepare import DROPPED
    from multicls.corpus import Corpus

    corpus = Corpus.open(options.output)
    size = f"{counted(corpus.num_documents, 'document')}, {tokens_in_words(corpus.manifest['tokens'])}"
    made = [("corpus", f"{options.output} ({size})"), ("left out", Path(options.output) / DROPPED)]
    if missing := _missing(corpus):
        print_summary([*made, ("missing", missing)])
        return
    folder = Path(options.tokenizer)
    model = options.tokenizer if not folder.exists() or (folder / "config.json").exists() else "CHECKPOINT"
    recipe = "own_text" if corpus.manifest["tokens"] < OWN_TEXT else "base"
    command = ["deepspeed", "pretrain/run.py", "--recipe", recipe, "--model", model, "--corpus", options.output]
    print_summary(made, "" if options.sample else shlex.join(command))


def _missing(corpus: Corpus) -> str:
    """Returns what pretraining will miss in a corpus that is too small for the recipe own_text, else ""."""
    from data_prep.examples import ExampleStream, SpecialIds

    if corpus.manifest["tokens"] > OWN_TEXT:
        return ""
    special = SpecialIds(0, 0, 0, 0, facets=(0,) * ExampleOptions.model_fields["num_facets"].default)
    given = {"seq_length": ExampleOptions.model_fields["seq_length"].default, "validation_fraction": HELD_OUT}
    try:
        ExampleStream(corpus, special, seed=0, split="validation", **given)
        found = ExampleStream(corpus, special, seed=0, split="train", **given).examples_per_epoch
    except UserError as error:
        return str(error)
    if found >= NEGATIVES:
        return ""
    there = f"besides the documents held out there is text for {counted(found, 'example')}"
    return f"more text: {there}, and pretraining needs {NEGATIVES} at least. Prepare more documents, or longer ones."


def show_command(options: ShowOptions) -> None:
    """Prints a row and a training example of it, exactly as the model sees it."""
    from data_prep.show import show

    place = (options.corpus, options.row, options.seq_length, options.num_facets)
    print(show(*place, options.seed, options.epoch, options.window))


def stats_command(options: StatsOptions) -> None:
    """Prints lengths, sources, drops and coverage, and draws a picture."""
    from data_prep.stats import stats

    folder = Path(options.corpus)
    picture = options.output or os.path.relpath(f"{folder.resolve()}.png")
    stats(folder, picture, options.seq_length, options.num_facets)


def verify_command(options: CorpusOptions) -> None:
    """Compares every file of a corpus with the manifest's checksums."""
    from multicls.corpus import Corpus

    corpus = Corpus.open(options.corpus)
    corpus.verify()
    documents, rows = counted(corpus.num_documents, "document"), counted(corpus.num_rows, "row")
    print(f"{options.corpus}: whole, {documents} ({rows}) in {counted(corpus.num_shards, 'shard')}")


def vocabulary_command(options: VocabularyOptions) -> None:
    """Trains a tokenizer on the text that `build` would prepare."""
    from data_prep.prepare import sentences_of, tell_language
    from data_prep.vocabulary import train_vocabulary

    tell_language(options.language, print_line)
    sentences = sentences_of(options, options.max_mb)
    train_vocabulary(
        sentences, options.output, kind=options.type, size=options.size, cased=options.cased, log=print_line
    )
    command_words = ["python", "data_prep/run.py", "--input", *options.input, "--tokenizer", options.output]
    print_summary([("tokenizer", options.output)], shlex.join([*command_words, "--output", "CORPUS"]))


def _subcommand(name: str, run: Callable[[Any], None], options: type[Settings], **more: Any) -> Subcommand:
    return CommandLine(f"data_prep/run.py {name}", run.__doc__, options, **more), run


BUILD = {
    "input and cleaning": (*INPUT, "min_sentences", "near_duplicates"),
    "where the tasks run": tuple(ExecutorOptions.model_fields),
}
COMMANDS: dict[str, Subcommand] = {
    "build": (CommandLine("data_prep/run.py", __doc__, BuildOptions, groups=BUILD), build_command),
    "show": _subcommand("show", show_command, ShowOptions, positional=("corpus", "row")),
    "stats": _subcommand("stats", stats_command, StatsOptions, positional=("corpus",)),
    "verify": _subcommand("verify", verify_command, CorpusOptions, positional=("corpus",)),
    "vocabulary": _subcommand(
        "vocabulary", vocabulary_command, VocabularyOptions, groups={"input and cleaning": INPUT}
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; plain flags mean `build`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        hint = " Give text with --input." if os.path.exists(argv[0]) else did_you_mean(argv[0], COMMANDS)
        raise UserError(f"{argv[0]}: no such command.{hint}")
    command, run = COMMANDS[argv.pop(0) if argv and argv[0] in COMMANDS else "build"]
    run(command.parse(argv))


if __name__ == "__main__":
    run_command(main)
