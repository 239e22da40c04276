"""Compares systems on your own labelled rows, says which one to take, and fits it on all of them.

python finetune/compare.py --train_file tickets.csv --model minilm=sample --model mine=RUN/hf
python finetune/compare.py --train_file tickets.csv --model minilm=sample --systems words sentence+topics tuned-mean

A system is `words` (TF-IDF), `majority`, a linear model on parts of a frozen model such as `mean+facets+topics`, or a
fine-tuned head such as `tuned-mean`. All learn from the same rows, in repeated folds over all of them. Embeddings and
finished folds are kept in the output folder: the same command resumes. predict.py labels new rows with the result.
"""

import hashlib
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt

from finetune.heads import HEADS, OF_FACETS
from finetune.own_data import OwnRows, predictions_of_file, read_own, unlabelled_rows
from finetune.results import scores_of
from finetune.settings import RowSettings, safe_name
from multicls.console import print_line, print_summary, progress_bar
from multicls.errors import UserError, did_you_mean, run_command
from multicls.evaluation import (
    Rows,
    Scores,
    System,
    evaluate,
    fewer,
    fit_predict,
    folds,
    learning_curve,
)
from multicls.files import atomic_write, locked
from multicls.measures import Array, larger_is_better, predictions_of, row_values
from multicls.settings import parse
from multicls.systems import Cosine, Given, Linear, Majority, Words

if TYPE_CHECKING:
    from multicls.embeddings import Embedder

HELP = {
    "data": "train_file test_file new_file text_column label_column group_column metric",
    "systems": "model systems predictions corpus max_length learning_rate epochs repeats",
    "output": "output_dir",
}
NamedFile = Annotated[str, Field(pattern="^[^= ]+=.")]
FEWEST = 20  # labelled rows
CURVE = (25, 50, 100, 200, 400, 800, 1600)  # training rows of the learning curve
TOPICS = 200
FORMAT = 1  # of kept fits; it goes up when the same rows and settings give other outputs


class CompareOptions(RowSettings):
    """Options of the command."""

    model: list[NamedFile] = Field(
        ["minilm=sample"], description="NAME=FOLDER; the first is the original model"
    )
    systems: list[str] = Field([], description="default: all that take seconds")
    predictions: list[NamedFile] = Field(
        [], description="NAME=FILE: labels of these texts by something else, as a system"
    )
    new_file: str | None = Field(None, description="rows without labels, to choose some to label")
    corpus: str | None = Field(
        None, description="corpus whose topics are taken; default: the model's, or of the rows"
    )
    max_length: PositiveInt | None = Field(
        None, description="most tokens of a text; default: 256, or what the model reads"
    )
    learning_rate: PositiveFloat = Field(
        1e-4, description="of fine-tuned systems; large models want 1e-5 to 7e-5"
    )
    epochs: PositiveInt = Field(10, description="of fine-tuned systems")
    repeats: PositiveInt = Field(2, description="repeats of the folds")
    output_dir: str = Field("comparison", description="folder of scores, report and model")


@dataclass(frozen=True)
class Compared:
    """The result of a comparison.

    Attributes:
        name: Of the training file.
        table: The labelled rows, with embeddings.
        new: Rows without labels, that may be worth labelling.
        systems: By name, the best first.
        scores: Of each system.
        tests: Of each system on the test rows, if there is a file of them.
        original: Prefix of the names of the original model's systems.
        models: By name.
        topics: File of the topics of a model whose embeddings are read; None: they are in the model.
        fits: Folder of what finished fits gave.
    """

    name: str
    table: OwnRows
    new: Rows | None
    systems: dict[str, System]
    scores: dict[str, Scores]
    tests: dict[str, Scores]
    original: str
    models: dict[str, "Embedder"]
    topics: dict[str, Path | None]
    fits: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(CompareOptions, argv, prog="finetune/compare.py", doc=__doc__, common=HELP)
    if not options.train_file:
        raise UserError("--train_file: required, your own labelled rows")
    output = Path(options.output_dir)
    with locked(output):
        found = run_comparison(options, output)
        from finetune.compare_report import write_report

        best = next(name for name, system in found.systems.items() if hasattr(system, "save"))
        fitted = found.systems[best].fit(found.table.train)
        curve = curve_of(found, best)
        for line in write_report(found, best, fitted, curve, output):
            print(line, flush=True)
    rows = options.new_file or options.test_file or "ROWS.csv"
    command = shlex.join(["python", "finetune/predict.py", str(output / "model"), rows])
    print_summary([("report", output / "report.md"), ("model", output / "model")], command)
    return 0


def run_comparison(options: CompareOptions, output: Path) -> Compared:
    """Reads the rows, embeds them, and evaluates each system that has not been evaluated."""
    table = read_own(options)
    if len(table.train.targets) < FEWEST:
        number = len(table.train.targets)
        raise UserError(f"{options.train_file}: {number} labelled rows; set {FEWEST}.")
    for note in table.notes:
        print_line(f"note: {note}")
    new = unlabelled_rows(options, options.new_file, table)
    sources, given = by_name(options)
    models = {name: open_model(source, options.max_length) for name, source in sources.items()}
    systems: dict[str, System] = {"words": Words(), "majority": Majority()}
    for name, model in models.items():
        systems |= systems_of_model(name, sources[name], model, options, table.train)
    systems = choose(systems | {name: Given(name) for name in given}, given, options.systems)
    splits = [rows for rows in (table.train, table.test, new) if rows is not None]
    texts = [of_row for rows in splits for of_row in rows.texts]
    features, topics = dict[str, Array](), dict[str, Path | None]()
    for name, path in given.items():
        features[name] = predictions_of_file(Path(path), options, table, texts)
    for name, model in models.items():
        if any(
            isinstance(of, Linear | Cosine) and model_of(key) == name for key, of in systems.items()
        ):
            embedded, topics[name] = embed_by(name, model, texts, options)
            features |= {f"{name}/{part}": values for part, values in embedded.items()}
    ends = np.cumsum([0, *(len(rows.texts) for rows in splits)])
    with_features = [
        replace(rows, features={name: values[begin:end] for name, values in features.items()})
        for rows, begin, end in zip(splits, ends[:-1], ends[1:], strict=True)
    ]
    table = replace(table, train=with_features[0], test=with_features[1] if table.test else None)
    scores, tests = evaluate_all(systems, table, options.repeats, output / "fits")
    better = {name: larger_is_better(found.metric, found.mean) for name, found in scores.items()}
    order = sorted(scores, key=lambda name: (-better[name], name))
    return Compared(
        Path(str(options.train_file)).stem,
        table,
        with_features[-1] if new else None,
        {name: systems[name] for name in order},
        {name: scores[name] for name in order},
        tests,
        next(iter(models)),
        models,
        topics,
        output / "fits",
    )


def by_name(options: CompareOptions) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the sources of models, and the files of predictions, by name.

    Raises:
        UserError: A name comes twice.
    """
    models = [text.split("=", 1) for text in options.model]
    files = [text.split("=", 1) for text in options.predictions]
    names = Counter(["words", "majority", *(name for name, _ in [*models, *files])])
    if twice := [name for name, number in names.items() if number > 1]:
        raise UserError(f"--model, --predictions {twice[0]}: two systems have this name.")
    return dict(models), dict(files)


def open_model(source: str, max_length: int | None) -> "Embedder":
    """Returns the model of a folder, a Hub id or "sample"."""
    from finetune.heads.build import find_checkpoint
    from multicls.embeddings import Embedder

    return Embedder(find_checkpoint(source), max_length)


def embed_by(
    name: str, model: "Embedder", rows: Sequence[tuple[str, ...]], options: CompareOptions
) -> tuple[dict[str, Array], Path | None]:
    """Returns the embeddings of rows of texts by part, (N, F) or of pairs (N, 2, F), and the file of topics, if any."""
    from finetune.saved import load_topics, topics_file
    from multicls.embeddings import by_rows, cached_embeddings, topics_of

    texts, cache = [text for of_row in rows for text in of_row], Path(options.output_dir, "cache")

    def compute(missing: Sequence[str]) -> dict[str, Array]:
        with progress_bar(len(missing), "text", f"embedding by {name}") as bar:
            return model.embed(missing, bar.update)

    parts = cached_embeddings(cache, f"{model.sha256}-{model.max_length}", texts, compute)
    table, file, whose = model.topics, None, "the model"
    if table is None:
        file = topics_file(model, texts, options.corpus, TOPICS, cache)
        table, whose = load_topics(file), options.corpus or "the rows' texts"
    parts["topics"] = topics_of(table, model.tokenizer, texts)
    print_line(f"{name}: {', '.join(parts)}; {model.max_length} tokens; topics of {whose}")
    return by_rows(parts, len(rows[0])), file


def systems_of_model(
    name: str, source: str, model: "Embedder", options: CompareOptions, rows: Rows
) -> dict[str, System]:
    """Returns the systems on a model: linear ones on its parts, also those that `--systems` names, and heads."""
    from finetune.tuned import Tuned

    own, parts = model.parts[0], {*model.parts, "topics"}
    embeddings = [own, f"{own}+topics"]
    if "facets" in parts:
        embeddings.append("mean+facets+topics")
    asked = [text.removeprefix(f"{name} ") for text in options.systems]
    embeddings += [embedding for embedding in asked if parts.issuperset(embedding.split("+"))]
    systems: dict[str, System] = {
        f"{name} {embedding}": Linear.of(embedding, name) for embedding in embeddings
    }
    if rows.kind == "score" and len(rows.texts[0]) == 2:
        systems[f"{name} cosine"] = Cosine(f"{name}/{own}")
    heads = [head for head in HEADS if model.num_facets or head not in OF_FACETS]
    for head in heads:
        systems[f"{name} tuned-{head}"] = Tuned(
            head, source, model.max_length, options.learning_rate, options.epochs, model.sha256
        )
    return systems


def choose(
    systems: dict[str, System], given: Iterable[str], names: Sequence[str]
) -> dict[str, System]:
    """Returns the systems of these names, with or without a model's, and `given` ones; by default those of seconds.

    Raises:
        UserError: A name is unknown, or no system can be saved.
    """
    chosen = {
        name: system for name, system in systems.items() if not names and not is_costly(system)
    }
    for text in [*names, *given] if names else ():
        matches = [name for name in systems if text in (name, name.partition(" ")[2])]
        if not matches:
            known = [name.partition(" ")[2] or name for name in systems]
            raise UserError(f"--systems {text}: no such system.{did_you_mean(text, known)}")
        chosen |= {name: systems[name] for name in matches}
    if not any(hasattr(system, "save") for system in chosen.values()):
        raise UserError(f"--systems {' '.join(names)}: none of them learns; add one such as words.")
    return chosen


def model_of(system: str) -> str:
    """Returns the name of the model in the name of a system on it."""
    return system.partition(" ")[0]


def evaluate_all(
    systems: dict[str, System], table: OwnRows, repeats: int, fits: Path
) -> tuple[dict[str, Scores], dict[str, Scores]]:
    """Returns the scores of each system in folds and on test rows; fits that are finished are read from `fits`."""
    rows, test = table.train, table.test
    every, scores, tests = folds(rows, repeats), dict[str, Scores](), dict[str, Scores]()
    for name, system in systems.items():
        splits = fewer(every) if is_costly(system) else every
        folder = folder_of_fits(fits, name, system, rows)
        files = [file_of_fit(folder, *indices) for indices in splits.training_sets]
        done = sum(file.exists() for file in files)
        with progress_bar(len(files), "fold", name, initial=done, delay=1) as bar:
            learn = partial(kept_fit, folder, bar.update)
            scores[name] = evaluate({name: system}, rows, splits, learn)[name]
        if test is not None:
            file = folder / f"test-{content_of(name, system, test)}.npy"
            tests[name] = scores_on_test(file, system, rows, test)
    return scores, tests


def scores_on_test(file: Path, system: System, rows: Rows, test: Rows) -> Scores:
    """Returns the scores on test rows of a system that learns from all others; the file keeps its outputs."""
    outputs = kept(file, lambda: np.asarray(deepcopy(system).fit(rows).predict(test)))
    values = row_values(rows.metric, test.targets, predictions_of(rows.kind, outputs))
    return scores_of([values], test.units, rows.metric)


def kept_fit(
    folder: Path,
    progress: Callable[[], object],
    system: System,
    rows: Rows,
    train: Array,
    scored: Array,
) -> Array:
    """Returns the outputs of `fit_predict`, which a folder keeps; `progress` is called after a new fit."""

    def compute() -> Array:
        outputs = fit_predict(system, rows, train, scored)
        progress()
        return outputs

    return kept(file_of_fit(folder, train, scored), compute)


def kept(file: Path, compute: Callable[[], Array]) -> Array:
    """Returns the outputs in a file; a missing one is computed, and written as a whole: a file is a finished fit."""
    if not file.exists():
        outputs = compute()
        with atomic_write(file, "wb") as opened:
            np.save(opened, outputs)
    return np.asarray(np.load(file, allow_pickle=False))


def folder_of_fits(fits: Path, name: str, system: System, rows: Rows) -> Path:
    """Returns the folder of a system's fits, whose name changes with all that changes their outputs."""
    key = json.dumps([FORMAT, repr(system), content_of(name, system, rows)])
    return fits / f"{safe_name(name)}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def file_of_fit(folder: Path, train: Array, scored: Array) -> Path:
    """Returns the file of what a system gave for scored rows after it had learned from training rows."""
    key = json.dumps([train.tolist(), scored.tolist()])
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.npy"


def content_of(name: str, system: System, rows: Rows) -> str:
    """Returns a hash of what a system reads of rows; fine-tuned ones read no embeddings."""
    digest = hashlib.sha256(rows.content().encode())
    for part, values in sorted(rows.features.items()):
        if part.partition("/")[0] == model_of(name) and not is_costly(system):
            digest.update(values.tobytes())
    return digest.hexdigest()[:16]


def is_costly(system: System) -> bool:
    """True if a fit takes minutes."""
    return bool(getattr(system, "is_costly", False))


def curve_of(found: Compared, best: str) -> dict[int, float]:
    """Returns the best system's mean score by the number of training rows; {} if a fit takes minutes."""
    system, rows = found.systems[best], found.table.train
    if is_costly(system):
        return {}
    splits = folds(rows, 1)
    few = replace(splits, draws=splits.draws[:6])
    half = len(splits.draws[0][0])
    sizes = [size for size in CURVE if size < half] + [half]
    learn = partial(kept_fit, folder_of_fits(found.fits, best, system, rows), lambda: None)
    curve = learning_curve(system, rows, few, sizes, learn)
    return curve | {splits.train_rows: found.scores[best].mean}


if __name__ == "__main__":
    run_command(main)
