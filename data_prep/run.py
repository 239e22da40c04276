"""Prepares a corpus: documents in, shards out.

python data_prep/run.py --input PATH [PATH ...] --output DIR --tokenizer FOLDER_OR_HUB_ID
python data_prep/run.py --sample --output DIR
python data_prep/run.py stats DIR
python data_prep/run.py show DIR 123
python data_prep/run.py verify DIR
"""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from data_prep.settings import BuildOptions, CorpusOptions, ShowOptions, StatsOptions
from multicls.console import count, print_line, print_summary
from multicls.errors import UserError, did_you_mean, run_command
from multicls.settings import Settings, parse

HELP = {
    "text": "input include format documents text_field encoding validation_input limit sample",
    "cleaning": "language without min_sentences short_documents keep_dropped",
    "output": "output tokenizer workers",
}
OWN_TEXT = 100_000_000  # tokens; for fewer, the recipe own_text fits better than the paper's


def build(options: BuildOptions) -> None:
    """Prepares a corpus folder, or continues a run that was stopped."""
    from data_prep.ledger import last_lines
    from data_prep.prepare import prepare

    try:
        corpus = prepare(options)
    except KeyboardInterrupt:
        print_line("stopped; the same command continues")
        raise
    documents, tokens = corpus.num_documents, corpus.manifest["tokens"]
    size = f"{count(documents, 'document')}, {count(tokens, 'token')}"
    folder = Path(options.tokenizer)
    is_model = not folder.exists() or (folder / "config.json").exists()
    model = options.tokenizer if is_model else "CHECKPOINT"
    command = ["python", "pretrain/run.py", "--model", model, "--corpus", options.output]
    command += ["--recipe", "own_text" if tokens < OWN_TEXT else "base"]
    made = [("corpus", f"{options.output} ({size})"), *last_lines(corpus)]
    has_next = not options.sample and documents > 1  # pretraining holds out one document
    print_summary(made, shlex.join(command) if has_next else "")


COMMANDS: dict[str, type[Settings]] = {
    "build": BuildOptions,
    "show": ShowOptions,
    "stats": StatsOptions,
    "verify": CorpusOptions,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; plain flags mean `build`."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words and not words[0].startswith("-") else "build"
    if name not in COMMANDS:
        is_path = os.path.exists(name)
        hint = " Pass text with --input." if is_path else did_you_mean(name, COMMANDS)
        raise UserError(f"{name}: no such command.{hint}")
    kind, is_build = COMMANDS[name], name == "build"
    prog = "data_prep/run.py" if is_build else f"data_prep/run.py {name}"
    doc, common = (__doc__, HELP) if is_build else (kind.__doc__, None)
    options: Any = parse(kind, words, prog=prog, doc=doc, common=common)
    if is_build:
        build(options)
    else:
        from data_prep import stats

        getattr(stats, name)(options)


if __name__ == "__main__":
    run_command(main)
