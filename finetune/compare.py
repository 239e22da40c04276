"""Compares systems on your own labelled rows, says which one to take, and fits it on all of them.

python finetune/compare.py --train_file tickets.csv --model minilm=sample --model mine=RUN/hf
python finetune/compare.py --train_file tickets.csv --model minilm=sample --systems words sentence+topics tuned-mean

A system is `words` (TF-IDF), `majority`, a linear model on parts of a frozen model such as `mean+facets+topics`, or a
fine-tuned head such as `tuned-mean`. All learn from the same rows, in repeated folds over all of them. Embeddings and
finished systems are kept in the output folder: the same command resumes. predict.py labels new rows with the result.
"""

import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

import numpy as np
from pydantic import Field, PositiveInt

from finetune.own_data import labelled_rows, read_own, unlabelled_examples
from finetune.settings import RowSettings, safe_name
from finetune.tasks import Example, Task
from multicls.console import print_line, print_summary, progress_bar
from multicls.errors import UserError, did_you_mean, run_command
from multicls.evaluation import FOLDS, Rows, Scores, System, evaluate, fewer, folds, learning_curve
from multicls.files import atomic_write, locked, read_json, write_json
from multicls.measures import Array, larger_is_better, predictions_of, row_values
from multicls.settings import parse

HELP = {
    "data": "train_file test_file new_file text_column label_column group_column metric",
    "systems": "model systems predictions corpus max_length repeats",
    "output": "output_dir",
}
NamedFile = Annotated[str, Field(pattern="^[^= ]+=.")]
FEWEST = 20  # labelled rows
TUNED = "tuned-"
CURVE = (25, 50, 100, 200, 400, 800, 1600)  # training rows of the learning curve
TOPICS = 200


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
    repeats: PositiveInt = Field(2, description="repeats of the folds")
    output_dir: str = Field("comparison", description="folder of scores, report and model")


@dataclass(frozen=True)
class Compared:
    """The result of a comparison.

    Attributes:
        scores: Of each system by its name, the best first.
        tests: One value per test row of each system, (M,), if there is a test file.
        texts: Rows without labels, that may be worth labelling.
    """

    task: Task
    rows: Rows
    test: Rows | None
    new: Rows | None
    systems: dict[str, System]
    scores: dict[str, Scores]
    tests: dict[str, Array]
    notes: list[str]
    original: str  # prefix of the names of the original model's systems
    encoders: dict[str, tuple[Path, int]]  # folder and most tokens of each model


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(CompareOptions, argv, prog="finetune/compare.py", doc=__doc__, common=HELP)
    if not options.train_file:
        raise UserError("--train_file: required, your own labelled rows")
    output = Path(options.output_dir)
    with locked(output):
        found = run_comparison(options, output)
        from finetune.compare_report import write_report

        best = next(name for name in found.scores if can_save(found.systems[name]))
        fitted = found.systems[best].fit(found.rows)
        curve = curve_of(found, best, output)
        for line in write_report(found, best, fitted, curve, output):
            print(line, flush=True)
    rows = options.new_file or options.test_file or "ROWS.csv"
    command = shlex.join(["python", "finetune/predict.py", str(output / "model"), rows])
    print_summary([("report", output / "report.md"), ("model", output / "model")], command)
    return 0


def run_comparison(options: CompareOptions, output: Path) -> Compared:
    """Reads the rows, embeds them, and evaluates each system that has not been evaluated."""
    files = {"train": options.train_file, "test": options.test_file}
    task, examples, notes = read_own(options, files)
    new = unlabelled_examples(options, task, options.new_file)
    rows = labelled_rows(task, examples["train"])
    if len(rows.targets) < FEWEST:
        raise UserError(f"{options.train_file}: {len(rows.targets)} labelled rows; set {FEWEST}.")
    for note in notes:
        print_line(f"note: {note}")
    splits = [examples["train"], examples.get("test", []), new]
    everything = [row for of in splits for row in of]
    features, systems, keys = dict[str, Array](), dict[str, System](), dict[str, str]()
    encoders = dict[str, tuple[Path, int]]()
    for name, source in (text.split("=", 1) for text in options.model):
        embedded, keys[name], encoders[name] = embed_model(name, source, everything, options)
        features |= embedded
        most = encoders[name][1]
        systems |= systems_of_model(name, source, most, embedded, options, rows)
    systems |= systems_without_model(options, features, task, splits)
    chosen = choose(systems, options)
    whole = labelled_rows(task, everything, features)
    ends = np.cumsum([0, *map(len, splits)])
    parts = [np.arange(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    train, test, unlabelled = (whole.take(part) if len(part) else None for part in parts)
    assert train is not None
    scores, tests = evaluate_all(chosen, train, test, keys, options, output)
    better = {name: larger_is_better(found.metric, found.mean) for name, found in scores.items()}
    order = sorted(scores, key=lambda name: (-better[name], name))
    return Compared(
        task,
        train,
        test,
        unlabelled,
        {name: chosen[name] for name in order},
        {name: scores[name] for name in order},
        tests,
        notes,
        options.model[0].split("=")[0],
        encoders,
    )


def embed_model(
    name: str, source: str, examples: Sequence[Example], options: CompareOptions
) -> tuple[dict[str, Array], str, tuple[Path, int]]:
    """Returns a model's embeddings of all texts by NAME/PART, (N, F) or of pairs (N, 2, F).

    Also returns their key, and the model's folder and number of tokens.
    """
    from finetune.heads.build import find_checkpoint
    from finetune.saved import fit_table, save_topics
    from multicls.embeddings import Embedder, cached_embeddings, model_sha256, topics_of

    folder, output = find_checkpoint(source), Path(options.output_dir)
    model = Embedder(folder, options.max_length)
    texts = [text for row in examples for text in row.texts]
    key = f"{model_sha256(folder)}-{model.max_length}"

    def compute(missing: Sequence[str]) -> dict[str, Array]:
        with progress_bar(len(missing), "text", f"embedding by {name}") as bar:
            return model.embed(missing, bar.update)

    parts = cached_embeddings(output / "cache", key, texts, compute)
    table, source_of_topics = model.topics, "the model"
    if table is None:
        table, source_of_topics = fit_table(model, texts, options.corpus, TOPICS, output / "cache")
        save_topics(table, output / "cache" / f"{safe_name(name)}-topics.safetensors")
    parts["topics"] = topics_of(table, model.tokenizer, texts)
    digest = hashlib.sha256(parts["topics"].tobytes()).hexdigest()[:16]
    print_line(
        f"{name}: {', '.join(parts)}; {model.max_length} tokens; topics of {source_of_topics}"
    )
    fields = len(examples[0].texts)
    pairs = {
        f"{name}/{part}": values.reshape(-1, fields, values.shape[1]) if fields > 1 else values
        for part, values in parts.items()
    }
    return pairs, f"{key}-{digest}", (folder, model.max_length)


def systems_of_model(
    name: str,
    source: str,
    most_tokens: int,
    features: dict[str, Array],
    options: CompareOptions,
    rows: Rows,
) -> dict[str, System]:
    """Returns the systems on a model: linear ones on its parts, and those that `--systems` names."""
    from multicls.systems import Cosine, Linear

    parts = [key.partition("/")[2] for key in features]
    own = parts[0]
    embeddings = [own, f"{own}+topics"]
    if "facets" in parts:
        embeddings.append("mean+facets+topics")
    embeddings += [text for text in options.systems if set(text.split("+")) <= set(parts)]
    systems: dict[str, System] = {
        f"{name} {embedding}": Linear.of(embedding, name) for embedding in embeddings
    }
    if rows.kind == "score" and len(rows.texts[0]) == 2:
        systems[f"{name} cosine"] = Cosine(f"{name}/{own}")
    for text in options.systems:
        if text.startswith(TUNED):
            from finetune.tuned import Tuned

            head = text.removeprefix(TUNED)
            systems[f"{name} {text}"] = Tuned(head, source, most_tokens)
    return systems


def systems_without_model(
    options: CompareOptions,
    features: dict[str, Array],
    task: Task,
    splits: Sequence[Sequence[Example]],
) -> dict[str, System]:
    """Returns the bag of words, the majority class, and predictions that files hold; adds these to the features."""
    from finetune.own_data import predictions_of_file
    from multicls.systems import Given, Majority, Words

    systems: dict[str, System] = {"words": Words(), "majority": Majority()}
    examples = [row for of in splits for row in of]
    labelled = len(splits[0]) + len(splits[1])
    for name, path in (text.split("=", 1) for text in options.predictions):
        features[name] = predictions_of_file(Path(path), options, task, examples, labelled)
        systems[name] = Given(name)
    return systems


def choose(systems: dict[str, System], options: CompareOptions) -> dict[str, System]:
    """Returns the systems that `--systems` names, by name or without their model's name; by default all."""
    if not options.systems:
        return systems
    chosen, given = dict[str, System](), [text.split("=")[0] for text in options.predictions]
    for text in [*options.systems, *given]:
        matches = [name for name in systems if text in (name, name.partition(" ")[2])]
        if not matches:
            known = [name.partition(" ")[2] or name for name in systems]
            raise UserError(f"--systems {text}: no such system.{did_you_mean(text, known)}")
        chosen |= {name: systems[name] for name in matches}
    return chosen


def evaluate_all(
    systems: dict[str, System],
    rows: Rows,
    test: Rows | None,
    keys: dict[str, str],
    options: CompareOptions,
    output: Path,
) -> tuple[dict[str, Scores], dict[str, Array]]:
    """Returns the scores of each system, and one value per test row; finished ones are read from the output folder."""
    every, scores, tests = folds(rows, options.repeats), dict[str, Scores](), dict[str, Array]()
    splits_of = {n: fewer(every) if is_costly(s) else every for n, s in systems.items()}
    fits = sum(len(splits.folds) * FOLDS + len(splits.draws) for splits in splits_of.values())
    with progress_bar(fits, "fit", "comparing") as bar:
        for name, system in systems.items():
            splits = splits_of[name]
            key = [name, repr(system), keys.get(name.partition(" ")[0], ""), options.repeats]
            key += [rows.content(), test.content() if test else ""]
            if name in rows.features:
                key.append(hashlib.sha256(rows.features[name].tobytes()).hexdigest())
            digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
            path = output / "scores" / f"{safe_name(name)}-{digest}.npz"
            if not path.exists():
                found = evaluate({name: system}, rows, splits, bar.update)[name]
                arrays = {"folds": found.folds, "draws": found.draws}
                arrays["outputs"] = np.asarray(found.outputs)
                if test is not None:
                    arrays["test"] = system.fit(rows).predict(test)
                with atomic_write(path, "wb") as file:
                    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
            with np.load(path, allow_pickle=False) as kept:
                arrays = dict(kept)
            scores[name] = Scores(
                arrays["folds"],
                arrays["draws"],
                rows.units,
                float(np.mean([len(train) for train, _ in splits.draws])),
                arrays["outputs"],
                rows.metric,
            )
            if test is not None:
                predicted = predictions_of(rows.kind, arrays["test"])
                tests[name] = row_values(rows.metric, test.targets, predicted)
    return scores, tests


def is_costly(system: System) -> bool:
    """True if a fit takes minutes."""
    return bool(getattr(system, "is_costly", False))


def can_save(system: System) -> bool:
    """True if the system can be fitted on all rows and saved."""
    return hasattr(system, "save")


def curve_of(found: Compared, best: str, output: Path) -> dict[int, float]:
    """Returns the best system's mean score by the number of training rows; kept for a second call."""
    system, rows = found.systems[best], found.rows
    key = hashlib.sha256(json.dumps([best, repr(system), rows.content()]).encode()).hexdigest()
    path = output / "scores" / f"curve-{key[:16]}.json"
    if is_costly(system):
        return {}
    if not path.exists():
        splits = folds(rows, 1)
        few = replace(splits, draws=splits.draws[:6])
        half = len(splits.draws[0][0])
        sizes = [size for size in CURVE if size < half] + [half]
        write_json(path, learning_curve(system, rows, few, sizes))
    curve = {int(size): value for size, value in read_json(path).items()}
    return curve | {folds(rows, 1, halves=2).train_rows: found.scores[best].mean}


if __name__ == "__main__":
    run_command(main)
