"""Compares continued pretraining with what one would pick instead: the same text, CPU time and probe for all.

python benchmarks/peers.py --data domains --cpu_seconds 600 --seeds 1 2 3

DATA holds a folder for each domain with docs.jsonl.gz ({"text"}) and rows.jsonl.gz ({"text", "label"}). Each arm
continues the model on the documents with one thread. A linear model on frozen embeddings of the rows then compares it
with the untouched model, draw by draw (multicls/evaluation.py). Embeddings such as `mean+topics` have the topics
of the documents; like the bag of words they need no training (multicls/topics.py). Two short trials of an arm choose
the number of steps that fills the CPU time. The peers' settings are those of their documentation
(benchmarks/peer_training.py). Finished runs are kept: the same command resumes. Tables go to OUTPUT/peers.md, and those
of `--finetune` to OUTPUT/DOMAIN/finetune/results/report.md.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import pandas as pd
from pydantic import Field, PositiveInt

from benchmarks.harness import Report, read_lines, run
from multicls.corpus import MANIFEST
from multicls.embeddings import embed
from multicls.errors import UserError, run_command
from multicls.evaluation import (
    Difference,
    Rows,
    Scores,
    Splits,
    average,
    compare,
    evaluate,
    random_draws,
)
from multicls.files import read_json, sha256_of, write_json
from multicls.measures import Array
from multicls.sample import SAMPLE, sample_model
from multicls.settings import Settings, parse
from multicls.systems import Linear, Words

Peer = Literal["mlm", "tsdae", "simcse"]
Arm = Literal[Peer, "own_text_mlm", "own_text"]
UNTOUCHED = "untouched"
REFERENCE = (UNTOUCHED, "mean")
TRIALS = (2, 10)  # steps
TOPICS = 200
RECORD = "record.json"
BAG = "bag of words"
# Parts that a linear model reads; each weighs the same.
EMBEDDINGS = (
    "mean",
    "cls",
    "facets",
    "mean+topics",
    "facets+topics",
    "mean+facets+topics",
)
Results = dict[tuple[str, str], list[Scores]]  # (arm, embedding) -> the scores of each seed


class Options(Settings):
    """Options of the comparison."""

    data: Path = Field(description="folder with a folder for each domain")
    output: Path = Field(Path("runs/peers"), description="folder of the results")
    model: str = Field(SAMPLE, description="folder or Hub id of the encoder that all continue")
    arms: list[Arm] = Field(
        list(get_args(Arm)), description="what to compare with the untouched model"
    )
    seeds: list[int] = Field([1], min_length=1, description="seeds of the training")
    cpu_seconds: float = Field(600, gt=0, description="CPU time of a training run")
    steps: PositiveInt | None = Field(None, description="steps of a run instead, for a first try")
    train_rows: list[PositiveInt] = Field([32, 100, 300], description="labelled rows of a draw")
    draws: int = Field(20, ge=2, description="draws of labelled rows")
    rows: PositiveInt = Field(2000, description="labelled rows of a domain, at most")
    max_length: PositiveInt = Field(128, description="tokens of a row")
    finetune: bool = Field(False, description="fine-tune heads on 100 rows, too")


@dataclass(frozen=True)
class Domain:
    """A domain: its documents, the folder of its results and its labelled rows; `draws` by size of the training set."""

    name: str
    documents: Path
    folder: Path
    table: pd.DataFrame  # "text" and "label"
    rows: Rows
    draws: dict[int, Splits]


def read_domain(source: Path, options: Options) -> Domain:
    """Reads a domain and draws its rows, the same ones for all arms."""
    rows = read_lines(source / "rows.jsonl.gz")
    rows = rows.iloc[np.random.default_rng(0).permutation(len(rows))[: options.rows]]
    classes, targets = np.unique(rows["label"].astype(str), return_inverse=True)
    texts = [(text,) for text in rows["text"]]
    labelled = Rows("class", targets, texts, classes=tuple(classes))
    draws = {n: random_draws(labelled, n, options.draws) for n in options.train_rows}
    folder = options.output / source.name
    return Domain(source.name, source / "docs.jsonl.gz", folder, rows, labelled, draws)


def prepare_corpus(domain: Domain, model: str) -> Path:
    """Returns the domain's corpus for our arms; data_prep/run.py prepares it once."""
    corpus = domain.folder / "corpus"
    if not (corpus / MANIFEST).exists():
        flags = ["--tokenizer", model, "--workers", 1, "--min_sentences", 3, "--output", corpus]
        run("data_prep/run.py", "--input", domain.documents, *flags)
    return corpus


def check_settings(options: Options) -> None:
    """Keeps what decides the numbers in OUTPUT/settings.json.

    Raises:
        UserError: The folder was made otherwise, or own_text is missing.
    """
    if options.finetune and "own_text" not in options.arms:
        raise UserError("--finetune compares the facets of own_text: name it in --arms.")
    path = options.output / "settings.json"
    unchecked = {"data", "output", "arms", "seeds", "finetune"}
    settings = options.model_dump(mode="json", exclude=unchecked) | {"embeddings": list(EMBEDDINGS)}
    old = read_json(path) if path.exists() else settings
    files = {
        f"{file.parent.name}/{file.name}": sha256_of(file)
        for file in sorted(options.data.glob("*/*.jsonl.gz"))
    }
    before = old.pop("files", {})
    different = [name for name in settings if settings[name] != old.get(name)]
    different += [name for name in files if files[name] != before.get(name, files[name])]
    if different:
        raise UserError(
            f"{options.output}: was made with another {', '.join(different)}; pass another --output."
        )
    settings["files"] = before | files
    write_json(path, settings)


def train(arm: Any, domain: Domain, options: Options, steps: int, seed: int, folder: Path) -> float:
    """Trains an arm and writes its model to `folder`/hf; returns the CPU seconds, without preparing the text."""
    from benchmarks import peer_training as arms

    if arm in arms.OWN:
        corpus = prepare_corpus(domain, options.model)
        return arms.train_own(arm, options.model, corpus, steps, seed, folder)
    return arms.train_peer(arm, options.model, domain.documents, steps, seed, folder)


def steps_that_fit(arm: str, domain: Domain, options: Options) -> int:
    """Returns the number of steps that take the CPU time, from the difference of two trials."""
    if options.steps:
        return options.steps
    path, trial = domain.folder / f"{arm}-speed.json", domain.folder / f"{arm}-trial"
    if not path.exists():
        used = [train(arm, domain, options, steps, 0, trial) for steps in TRIALS]
        shutil.rmtree(trial)
        if used[1] <= used[0]:
            raise UserError(f"{arm}: {TRIALS} steps took {used} CPU seconds: set --steps.")
        step = (used[1] - used[0]) / (TRIALS[1] - TRIALS[0])
        write_json(path, {"start": max(0.0, used[0] - TRIALS[0] * step), "step": step})
    speed = read_json(path)
    return max(1, int((options.cpu_seconds - speed["start"]) / speed["step"]))


def embed_texts(
    model: str, texts: Sequence[str], max_length: int, topics: Any = None
) -> dict[str, Array]:
    """Returns the frozen embeddings of texts by part, (N, F), from a model folder; `topics` as in `embed`.

    `sum` is that of the facets.
    """
    from transformers import AutoModel, AutoTokenizer

    import multicls.modeling_multicls  # noqa: F401 (registers the model)
    from multicls.build import quiet_transformers

    with quiet_transformers():
        tokenizer, encoder = (kind.from_pretrained(model) for kind in (AutoTokenizer, AutoModel))
    config = encoder.eval().config
    options: Any = {"max_length": max_length, "num_facets": getattr(config, "num_facets", 0)}
    topics = getattr(encoder, "topics", None) or topics
    parts = embed(encoder, tokenizer, texts, topics=topics, **options)
    if "facets" in parts:
        facets = parts["facets"].reshape(len(texts), config.num_facets, -1)
        parts["sum"] = facets.sum(axis=1)
    return parts


@lru_cache(maxsize=1)
def fitted_topics(corpus: Path, model: str) -> Any:
    """Returns the `TopicTable` of a corpus for the tokens of a model."""
    from transformers import AutoTokenizer

    from multicls.corpus import Corpus
    from multicls.modeling_multicls import TopicTable
    from multicls.topics import fit_topics

    vocabulary = len(AutoTokenizer.from_pretrained(model))
    state = fit_topics(Corpus(corpus), TOPICS, vocabulary=vocabulary, validation_fraction=0.0)
    return TopicTable.of(state)


def run_arm(arm: str, domain: Domain, options: Options, seed: int) -> None:
    """Trains an arm with a seed and probes it, unless that was done; the record is written last."""
    folder, model = domain.folder / f"{arm}-{seed}", options.model
    if (folder / RECORD).exists():
        return
    print(f"{domain.name}: {arm}, seed {seed}", flush=True)
    steps, seconds, texts = 0, 0.0, domain.table["text"].tolist()
    if arm != UNTOUCHED:
        steps = steps_that_fit(arm, domain, options)
        seconds = train(arm, domain, options, steps, seed, folder)
        model = str(folder / "hf")
    topics = fitted_topics(prepare_corpus(domain, options.model), options.model)
    parts = embed_texts(model, texts, options.max_length, topics)
    rows = replace(domain.rows, features=parts)
    systems: dict[str, Any] = {
        name: Linear.of(name) for name in EMBEDDINGS if set(name.split("+")) <= parts.keys()
    }
    systems |= {BAG: Words()} if arm == UNTOUCHED else {}
    values: dict[str, Any] = {}
    for size, draws in domain.draws.items():
        scores = evaluate(systems, rows, draws)
        values |= {f"{size}/{name}": found.draws for name, found in scores.items()}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "values.npz", **values)
    write_json(folder / RECORD, {"steps": steps, "cpu_seconds": seconds})


def folders_of(arm: str, domain: Domain, options: Options) -> list[Path]:
    """Returns the folders of an arm's seeds; the untouched model has one."""
    seeds = options.seeds[:1] if arm == UNTOUCHED else options.seeds
    return [domain.folder / f"{arm}-{seed}" for seed in seeds]


def load(domain: Domain, options: Options) -> dict[int, Results]:
    """Returns the scores of all arms and embeddings of a domain, by the number of training rows."""
    results: dict[int, Results] = {size: {} for size in options.train_rows}
    for arm in (UNTOUCHED, *options.arms):
        tables = [np.load(path / "values.npz") for path in folders_of(arm, domain, options)]
        for name in tables[0].files:
            size, _, embedding = name.partition("/")
            train_rows = len(domain.draws[int(size)].draws[0][0])
            none, units = np.zeros((0, len(domain.rows.targets))), domain.rows.units
            results[int(size)][arm, embedding] = [
                Scores(none, table[name], units, train_rows) for table in tables
            ]
    return results


def questions(results: Results) -> dict[str, tuple[Any, Any]]:
    """Returns the comparisons that matter, each of two (arm, embedding); chosen on these very rows."""

    def best(arms: Sequence[str], views: Sequence[str]) -> tuple[str, str] | None:
        keys = [key for key in results if key[0] in arms and key[1] in views]
        return max(keys, key=lambda key: compare(results[key]).mean, default=None)

    ours = best(["own_text"], [name for name in EMBEDDINGS if name != "cls"])
    trained = best(["own_text"], ["facets", "mean"])
    asked = {
        "own_text - untouched mean": (ours, REFERENCE),
        "own_text without topics - untouched mean": (trained, REFERENCE),
        "own_text without topics - best peer": (trained, best(get_args(Peer), ["mean", "cls"])),
        "facets - mean of own_text": (("own_text", "facets"), ("own_text", "mean")),
    }
    return {name: pair for name, pair in asked.items() if set(pair) <= results.keys()}


def add_domain(report: Report, domain: Domain, options: Options) -> dict[int, Results]:
    """Adds a domain's table; returns its values by the number of training rows."""
    by_size, rows = load(domain, options), list[list[str]]()
    for arm, view in by_size[options.train_rows[0]]:
        records = [read_json(path / RECORD) for path in folders_of(arm, domain, options)]
        cells = []
        for results in by_size.values():
            score = compare(results[arm, view]).mean
            change = compare(results[arm, view], results[REFERENCE])
            cells.append(f"{100 * score:.1f}, {change}")
        cost = [np.mean([record[name] for record in records]) for name in ("steps", "cpu_seconds")]
        rows.append([arm, view, *cells, *(f"{value:,.0f}" for value in cost)])
    columns = ["arm", "embedding", *(f"{size} rows" for size in by_size), "steps", "CPU seconds"]
    what = "accuracy, and its difference to the untouched mean with the 95 % interval, in points"
    report.table(f"{domain.name}: {what}", columns, rows)
    return by_size


def add_comparisons(report: Report, domains: Mapping[str, dict[int, Results]]) -> None:
    """Adds the comparisons of each domain, whose values are given, and their mean over domains."""
    changes: dict[str, list[Difference]] = {}
    for by_size in domains.values():
        for size, results in by_size.items():
            for name, (first, second) in questions(results).items():
                change = compare(results[first], results[second])
                changes.setdefault(f"{name}, {size} rows", []).append(change)
    rows = [[name, *found, average(found)] for name, found in changes.items()]
    report.table("Comparisons, in points", ["", *domains, "mean of domains"], rows)


def fine_tune(domain: Domain, options: Options) -> None:
    """Fine-tunes all models on 100 rows of a domain by finetune/grid.py, ten times; results/report.md compares them."""
    folder, half = domain.folder / "finetune", len(domain.rows.targets) // 2
    train, dev = domain.table[half:], domain.table[:half]
    splits = {"train": train, "dev": dev[dev["label"].isin(train["label"])]}
    flags = ["--recipe", "benchmarks/peers.yaml", f"--max_length={options.max_length}"]
    flags += ["--model", f"untouched={options.model}"]
    folder.mkdir(exist_ok=True)
    for split, rows in splits.items():
        rows.to_json(folder / f"{split}.jsonl", orient="records", lines=True)
        flags += [f"--{split}_file", str(folder / f"{split}.jsonl")]
    for arm in options.arms:
        for path in folders_of(arm, domain, options):
            flags += ["--model", f"{arm}={path / 'hf'}"]
    run("finetune/grid.py", *flags, "--output_dir", folder / "results")
    run("finetune/report.py", folder / "results")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs or resumes the comparison and writes its tables."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    options = parse(Options, argv, prog="benchmarks/peers.py", doc=__doc__)
    sources = sorted(path.parent for path in options.data.glob("*/rows.jsonl.gz"))
    if not sources:
        raise UserError(f"--data {options.data}: no folder in it holds a rows.jsonl.gz.")
    check_settings(options)
    if options.model == SAMPLE:
        options = options.model_copy(update={"model": str(sample_model())})
    domains = [read_domain(source, options) for source in sources]
    for seed in options.seeds:
        for domain in domains:
            for arm in (UNTOUCHED, *options.arms) if seed == options.seeds[0] else options.arms:
                run_arm(arm, domain, options, seed)
    report = Report("Continued pretraining and its peers")
    tables = {domain.name: add_domain(report, domain, options) for domain in domains}
    add_comparisons(report, tables)
    report.write(options.output, "peers.md")
    for domain in domains if options.finetune else []:
        fine_tune(domain, options)
    return 0


if __name__ == "__main__":
    run_command(main)
