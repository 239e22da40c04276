"""Prepares a corpus: documents in, shards out.

python data_prep/run.py --input PATH [PATH ...] --output DIR --tokenizer FOLDER_OR_HUB_ID
python data_prep/run.py --sample --output DIR
python data_prep/run.py stats DIR
python data_prep/run.py show DIR 123
python data_prep/run.py verify DIR
python data_prep/run.py vocabulary --input PATH [PATH ...] --output DIR --type wordpiece
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from multicls.console import print_line
from multicls.errors import UserError, did_you_mean, run_command

if TYPE_CHECKING:
    from data_prep.prepare import PrepareSettings


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
    command = commands[argv.pop(0)] if argv and argv[0] in commands else build_command
    command(argv)


def build_command(argv: Sequence[str]) -> None:
    """Prepares a corpus folder, or continues a run that was stopped."""
    from data_prep.engine import EXECUTORS

    parser = argparse.ArgumentParser(
        prog="data_prep/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_input_flags(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="corpus folder: new, or of a stopped run")
    parser.add_argument(
        "--tokenizer", metavar="PATH_OR_ID", help="folder with tokenizer.json, that file, a Hub id, or `sample`"
    )
    parser.add_argument("--sample", action="store_true", help="use the embedded sample as --input and --tokenizer")
    parser.add_argument("--min_sentences", type=int, default=6, help="drop documents of fewer sentences (default: 6)")
    parser.add_argument("--near_duplicates", action="store_true", help="drop documents nearly equal to an earlier one")
    parser.add_argument("--plan", action="store_true", help="print the expected size and time, and do nothing")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    where = parser.add_argument_group("where the tasks run")
    where.add_argument("--executor", choices=EXECUTORS, default="local", help="this machine, SLURM or Ray")
    where.add_argument("--workers", type=int, default=cores or 1, help="most tasks at a time (default: one per core)")
    where.add_argument("--num_processes", type=int, help=argparse.SUPPRESS)  # its old name
    where.add_argument("--partition", default="", help="SLURM: partition of the jobs")
    where.add_argument("--time", default="04:00:00", help="SLURM: time limit of a job (default: 04:00:00)")
    where.add_argument(
        "--tasks_per_job", type=int, default=1, help="SLURM: tasks of each job of the array (default: 1)"
    )
    where.add_argument(
        "--sbatch", nargs="+", default=[], metavar="OPTION=VALUE", help="SLURM: further options, e.g. account=nlp"
    )
    args = parser.parse_args(argv)
    if args.sample:
        from multicls.sample import sample_dump

        args.input = args.input or [str(sample_dump())]
        args.tokenizer = args.tokenizer or "sample"
    if problems := _build_problems(args):
        raise UserError(*problems)
    from data_prep.engine import ExecutorOptions
    from data_prep.prepare import prepare, print_plan

    settings = _settings(args, args.tokenizer, min_sentences=args.min_sentences, near_duplicates=args.near_duplicates)
    sbatch = dict(option.lstrip("-").split("=", 1) for option in args.sbatch)
    executor = ExecutorOptions(args.executor, args.workers, args.partition, args.time, args.tasks_per_job, sbatch)
    (print_plan if args.plan else prepare)(settings, args.output, executor, print_line)


def _build_problems(args: argparse.Namespace) -> list[str]:
    problems = _input_problems(args)
    if not args.tokenizer:
        problems.append("--tokenizer: missing; give a folder with a tokenizer.json or a Hub id like bert-base-uncased.")
    if args.num_processes is not None:
        problems.append("--num_processes: is now called --workers.")
    for name in ("workers", "tasks_per_job"):
        if getattr(args, name) < 1:
            problems.append(f"--{name} {getattr(args, name)}: must be at least 1.")
    if args.min_sentences < 3:
        problems.append(f"--min_sentences {args.min_sentences}: must be at least 3, one for each part of an example.")
    problems += [f"--sbatch {option}: write OPTION=VALUE." for option in args.sbatch if "=" not in option]
    if args.executor == "slurm" and not args.partition:
        problems.append("--executor slurm: needs --partition; `sinfo` lists them.")
    if args.executor == "slurm" and len(os.path.abspath(args.output).split()) > 1:
        problems.append(f"--output {args.output}: with --executor slurm, its path must have no spaces.")
    return problems


def _settings(args: argparse.Namespace, tokenizer: str, **others: Any) -> PrepareSettings:
    from data_prep.prepare import PrepareSettings

    return PrepareSettings(
        input=tuple(args.input),
        tokenizer=tokenizer,
        format=args.format,
        include=tuple(args.include),
        exclude=tuple(args.exclude),
        documents=args.documents,
        text_field=args.text_field,
        bad_records=args.bad_records,
        language=args.language,
        without=tuple(args.without),
        **others,
    )


def _add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that select the input and its cleaning."""
    from data_prep.read import DOCUMENTS
    from data_prep.sources import FORMATS

    parser.add_argument(
        "--input",
        nargs="+",
        metavar="[NAME=]WHAT",
        help="files and folders (.gz .bz2 .xz .zst, too; s3:// and other fsspec paths), wikipedia[:DATE.LANGUAGE], "
        "bookcorpus, bookcorpusopen or a data set of the Hub, OWNER/DATASET[:CONFIG[:SPLIT]]; NAME: name of the source",
    )
    parser.add_argument("--include", nargs="+", default=[], metavar="GLOB", help="read only these files of a folder")
    parser.add_argument("--exclude", nargs="+", default=[], metavar="GLOB", help="leave out these files of a folder")
    parser.add_argument("--format", default="auto", choices=["auto", *FORMATS], help="format of the files")
    parser.add_argument(
        "--documents",
        default="file",
        choices=DOCUMENTS,
        help="plain text: a document is a file, or the text between blank lines; or each line (or row) is a sentence",
    )
    parser.add_argument("--text_field", default="text", help="JSON lines, Parquet, data sets: field with the text")
    parser.add_argument("--bad_records", default="drop", choices=["drop", "stop"], help="drop and count them, or stop")
    parser.add_argument("--language", default="en", help="language of the sentence splitter (ISO 639)")
    parser.add_argument("--without", nargs="+", default=[], metavar="RULE", help="cleaning rules to leave out")


def _input_problems(args: argparse.Namespace) -> list[str]:
    from data_prep.clean import RULES

    problems = []
    if not args.input:
        problems.append("--input: missing; give the text to prepare, or --sample for the embedded one.")
    for rule in args.without:
        if rule not in RULES:
            problems.append(f"--without {rule}: no such rule.{did_you_mean(rule, RULES)}")
    return problems


def show_command(argv: Sequence[str]) -> None:
    """Prints a row and a training example of it, exactly as the model sees it."""
    parser = argparse.ArgumentParser(prog="data_prep/run.py show", description=show_command.__doc__)
    parser.add_argument("corpus", help="a corpus folder")
    parser.add_argument("row", type=int, help="row from 0: a document, or a part of a very long one")
    parser.add_argument("--seq_length", type=int, default=128)
    parser.add_argument("--num_facets", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--window", type=int, default=0, help="number of the window in the row, from 0")
    args = parser.parse_args(argv)
    from data_prep.show import show

    print(show(args.corpus, args.row, args.seq_length, args.num_facets, args.seed, args.epoch, args.window))


def stats_command(argv: Sequence[str]) -> None:
    """Prints lengths, sources, drops and coverage, and draws a picture."""
    parser = argparse.ArgumentParser(prog="data_prep/run.py stats", description=stats_command.__doc__)
    parser.add_argument("corpus", help="a corpus folder")
    parser.add_argument("--output", metavar="PNG", help="the picture; default: beside the corpus, DIR.png")
    parser.add_argument("--seq_length", type=int, default=128)
    parser.add_argument("--num_facets", type=int, default=5)
    args = parser.parse_args(argv)
    from data_prep.stats import stats

    folder = Path(args.corpus)
    picture = args.output or folder.resolve().with_name(folder.resolve().name + ".png")
    stats(folder, picture, args.seq_length, args.num_facets)


def verify_command(argv: Sequence[str]) -> None:
    """Compares every file of a corpus with the manifest's checksums."""
    parser = argparse.ArgumentParser(prog="data_prep/run.py verify", description=verify_command.__doc__)
    parser.add_argument("corpus", help="a corpus folder")
    args = parser.parse_args(argv)
    from multicls.corpus import Corpus

    corpus = Corpus.open(args.corpus)
    corpus.verify()
    counts = f"{corpus.num_documents} documents ({corpus.num_rows} rows) in {corpus.num_shards} shards"
    print(f"{args.corpus}: whole, {counts}")


def vocabulary_command(argv: Sequence[str]) -> None:
    """Trains a tokenizer on the text that `build` would prepare."""
    parser = argparse.ArgumentParser(prog="data_prep/run.py vocabulary", description=vocabulary_command.__doc__)
    _add_input_flags(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder of the tokenizer")
    parser.add_argument(
        "--type", default="wordpiece", choices=["wordpiece", "unigram"], help="BERT's, or SentencePiece's"
    )
    parser.add_argument("--size", type=int, default=30_522, help="entries, special tokens included")
    parser.add_argument("--cased", action="store_true", help="keep upper case and accents")
    parser.add_argument("--max_mb", type=float, default=2000.0, help="most text to read, spread over the input")
    args = parser.parse_args(argv)
    if problems := _input_problems(args):
        raise UserError(*problems)
    from data_prep.prepare import sentences_of
    from data_prep.vocabulary import train_vocabulary

    sentences = sentences_of(_settings(args, tokenizer=""), args.max_mb)
    train_vocabulary(sentences, args.output, kind=args.type, size=args.size, cased=args.cased, log=print_line)


if __name__ == "__main__":
    run_command(main)
