"""What a study needs, in one file of less than 60 MB: prepared tokens, a base model in 16 bit, rows of the tasks."""

from __future__ import annotations

import lzma
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from pydantic import Field
from safetensors.torch import load_file, save_file

from benchmarks.study_plan import TASKS
from finetune.data.tasks import find_task
from finetune.heads.checkpoint import find_folder
from multicls.command_line import CommandLine
from multicls.corpus import MANIFEST, Corpus, Shard, occurrences, write_shard
from multicls.errors import UserError
from multicls.files import REPOSITORY, atomic_folder, atomic_write, write_json
from multicls.sample import SAMPLE, SAMPLE_MODEL
from multicls.settings import Settings

Array = np.ndarray[Any, np.dtype[Any]]
MOST_BYTES = 60_000_000
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 1, "pb": 1}]  # most of it is numbers of 16 bits
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


class PackOptions(Settings):
    """Options of the command."""

    text: list[str] = Field(title="NAME=DIR", description="folders of text, as data_prep/run.py takes them")
    data_dir: Path = Field(description="the folder with the files of GLUE and SuperGLUE")
    output: Path = Field(title="FILE", description="the packed file, such as inputs.tar.xz")
    base: str = Field(SAMPLE, title="MODEL", description="any BERT: folder or Hub id")
    text_mb: float = Field(70.0, gt=0, description="most megabytes of text to take")


def main(argv: Sequence[str]) -> None:
    """Packs the inputs of a study."""
    options = CommandLine("benchmarks/study.py pack", __doc__, PackOptions).parse(argv)
    with TemporaryDirectory() as place:
        work, inputs = Path(place) / "work", Path(place) / "inputs"
        pack_model(options.base, inputs / "model")
        pack_tasks(options.data_dir, inputs / "data")
        take_text(options.text, options.text_mb * 1e6, work / "text")
        tokens = pack_corpus(work, inputs)
        named = SAMPLE_MODEL if options.base == SAMPLE else options.base
        name = Path(named).name if Path(named).is_dir() else named  # not where it lies on this machine
        write_json(inputs / "inputs.json", {"base": name, "tokens": tokens})
        size = write_archive(inputs, options.output, options.text_mb)
    print(f"{options.output}: {size / 1e6:.1f} MB, with {tokens / 1e6:.1f} M tokens of text")


def pack_model(base: str, target: Path) -> None:
    """Writes configuration, tokenizer and 16-bit weights of a model.

    Raises:
        UserError: The model is not there, or has no weights in one safetensors file that 16 bits can hold.
    """
    folder = find_folder(base)
    if not (folder / "model.safetensors").exists():
        raise UserError(f"--base {base}: {folder} has no model.safetensors; save the model again with transformers.")
    loaded = load_file(folder / "model.safetensors")
    weights = {name: weight.half() if weight.is_floating_point() else weight for name, weight in loaded.items()}
    if broken := [name for name, weight in weights.items() if not weight.isfinite().all()]:
        raise UserError(f"--base {base}: weights too large for 16 bits ({broken[0]}); give another model.")
    target.mkdir(parents=True)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    for path in (folder / name for name in ("config.json", *TOKENIZER_FILES)):
        if path.exists():
            shutil.copyfile(path, target / path.name)


def pack_tasks(data_dir: Path, target: Path) -> None:
    """Copies the train and dev files of the study's tasks, whole: the draws of rows depend on their number.

    Raises:
        UserError: Files are missing.
    """
    problems = []
    for task in map(find_task, TASKS):
        copies = target / task.benchmark / task.folder
        copies.mkdir(parents=True)
        for stem in (task.train, *dict(task.dev)):
            places = [data_dir / task.benchmark / task.folder, data_dir / task.folder]
            names = [place / f"{stem}{suffix}" for place in places for suffix in (".tsv", ".jsonl")]
            if found := next(filter(Path.exists, names), None):
                shutil.copyfile(found, copies / found.name)
            else:
                problems.append(f"--data_dir {data_dir}: {task.folder}/{stem} of task {task.name} is missing.")
    if problems:
        raise UserError(*problems)


def take_text(sources: Sequence[str], most: float, target: Path) -> None:
    """Copies text files of NAME=DIR to `target`/NAME: `most` bytes, the same share of each source's files by name.

    Raises:
        UserError: A source is no folder with files.
    """
    files: dict[str, list[Path]] = {}
    for source in sources:
        name, _, folder = source.partition("=")
        files[name] = sorted(path for path in Path(folder).rglob("*") if path.is_file()) if folder else []
        if not files[name]:
            raise UserError(f"--text {source}: write it as NAME=DIR, with files in the folder.")
    share = min(1.0, most / sum(path.stat().st_size for paths in files.values() for path in paths))
    for name, paths in files.items():
        (target / name).mkdir(parents=True)
        for number, path in enumerate(paths):
            if int((number + 1) * share) > int(number * share):
                shutil.copyfile(path, target / name / f"{number:05d}-{path.name}")


def pack_corpus(work: Path, inputs: Path) -> int:
    """Prepares the text in `work`/text as `inputs`/corpus, without the counts of tokens; returns the tokens.

    The counts are a third of the packed corpus and follow from the tokens: `unpack` puts them back.
    """
    texts = [f"{path.name}={path}" for path in sorted((work / "text").iterdir())]
    script, model = REPOSITORY / "data_prep/run.py", inputs / "model"
    command: list[str | Path] = [sys.executable, script, "--output", work / "corpus", "--tokenizer", model, "--input"]
    if code := subprocess.run([*command, *texts], check=False).returncode:
        raise UserError(f"data_prep/run.py ended with code {code}; its lines above say why.")
    corpus = Corpus.open(work / "corpus")
    (inputs / "corpus").mkdir()
    for name in (MANIFEST, *corpus.manifest["files"]):
        shutil.copyfile(corpus.path / name, inputs / "corpus" / name)
    rewrite_counts(corpus, inputs / "corpus", lambda tokens: np.zeros(len(tokens), np.uint16))
    return int(corpus.manifest["tokens"])


def rewrite_counts(corpus: Corpus, target: Path, count: Callable[[Array], Array]) -> None:
    """Writes the shards of a corpus to `target` with other counts of tokens."""
    for entry in corpus.manifest["shards"]:
        shard = Shard(corpus.path / entry["name"])
        rows = [shard.row(number) for number in range(entry["rows"])]
        write_shard(target / entry["name"], [row._replace(counts=count(row.tokens)) for row in rows])


def write_archive(folder: Path, output: Path, text_mb: float) -> int:
    """Writes all files of a folder as one compressed archive; returns its size in bytes.

    Raises:
        UserError: It is too large; nothing is written then.
    """
    with atomic_write(output, "wb") as file:
        with lzma.LZMAFile(file, "wb", filters=FILTERS) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                info = tarfile.TarInfo(str(path.relative_to(folder)))  # no time, owner or mode of this machine
                info.size = path.stat().st_size
                with open(path, "rb") as content:
                    archive.addfile(info, content)
        size = int(file.tell())
        if size > MOST_BYTES:
            raise UserError(f"--text_mb {text_mb:g}: gives {size / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f}. "
                            "Give less of it, or a smaller --base.")  # fmt: skip
    return size


def unpack(source: Path, target: Path) -> Path:
    """Writes a file of packed inputs to the folder `target`; returns it. A finished copy is kept.

    Raises:
        UserError: There are none, or they are damaged.
    """
    if target.exists():
        return target
    if not source.is_file():
        raise UserError(f"--inputs {source}: no such file; `python benchmarks/study.py pack` writes one.")
    with atomic_folder(target) as fresh:
        try:
            with tarfile.open(source) as archive:
                archive.extractall(fresh, filter="data")
        except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
            raise UserError(f"--inputs {source}: not packed inputs, or damaged: {error}.") from None
        if not (fresh / "inputs.json").exists():
            raise UserError(f"--inputs {source}: no packed inputs (inputs.json is missing).")
        corpus = Corpus.open(fresh / "corpus")
        rewrite_counts(corpus, corpus.path, occurrences)
        corpus.verify()
    return target
