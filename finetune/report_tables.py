"""The content of a report: groups of runs, tables, figures, warnings and commands. Scores are fractions of 1."""

import base64
import io
import itertools
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.special import expit, log_expit, log_softmax, logsumexp, softmax

from finetune import estimates
from finetune.estimates import KEYS, UNITS
from finetune.heads import FITTED
from finetune.metrics import names_of, predictions_of, score_predictions
from finetune.predict import predict_command
from finetune.results import load_predictions, load_results, unfinished_runs
from finetune.tasks import TASKS, Array, Task, task_of
from multicls.console import count
from multicls.errors import UserError, did_you_mean

BASELINE = "majority-class baseline"
INTERVAL = "95 % interval"
AVERAGE = "average of the tasks"
NOTES = 20  # most notes on rows
PANELS = 12  # reliability diagrams on a page
FEWEST = 100  # rows for one
BINS = np.linspace(0, 1, 16)  # edges of 15, as Guo et al. (2017); a bin holds its upper end


@dataclass(frozen=True)
class Report:
    """The content of a report."""

    verdicts: list[str]  # who won, in words
    groups: pd.DataFrame  # of `make_groups`
    tables: dict[str, pd.DataFrame]  # of text
    figures: dict[str, str]  # SVG in base64
    warnings: list[str]
    notes: list[str]  # on the rows
    commands: dict[str, str]  # by what each is for


def build_report(
    folder: Path,
    tasks: Sequence[str] = (),
    systems: Sequence[str] = (),
    ensemble_size: int | None = None,
    split: str | None = None,
    errors: int = 20,
) -> Report:
    """Returns the report of a results folder, on these tasks (default: all), with tests of these systems.

    Args:
        split: "dev" or "test", whose rows give scores, tests and figures; None: test rows where a task has them.
        errors: most confident errors of the best system to list.

    Raises:
        UserError: There is no run, none of a task, system or split that is named, or one without predictions.
    """
    runs = load_results(folder)
    _check_names("--task", tasks, runs["task"])
    runs = estimates.choose_candidates(runs[runs["task"].isin(tasks or runs["task"])])
    groups = make_groups(runs, ensemble_size, split)
    _check_names("--compare", systems, groups["system"])
    tested = groups[groups["system"].isin(systems or groups["system"])]
    comparisons = compare_systems(tested)
    tables = {
        "Scores": scores_table(groups),
        "Comparisons": comparisons_table(comparisons),
        "All results": results_table(groups),
        **error_tables(groups, errors),
    }
    figures = {
        "All runs (o), mean and 95 % interval (|), baseline (x)": draw_runs(groups),
        "Accuracy by confidence; grey: share of the examples": draw_calibration(groups),
    }
    return Report(
        verdicts(groups, comparisons),
        groups,
        {name: table for name, table in tables.items() if len(table)},
        {title: image for title, image in figures.items() if image},
        find_warnings(runs, groups) + unfinished_runs(folder),
        notes_on_rows(runs),
        best_commands(runs),
    )


def notes_on_rows(runs: pd.DataFrame) -> list[str]:
    """Returns the notes of all runs on their rows, each once."""
    notes = [
        f"{task}: {note}"
        for task, of_task in runs.groupby("task")
        for of_run in of_task["notes"]
        for note in of_run
    ]
    return list(dict.fromkeys(notes))[:NOTES]


def _check_names(flag: str, names: Sequence[str], known: Iterable[str]) -> None:
    for name in set(names).difference(known):
        raise UserError(f"{flag} {name}: no run of it.{did_you_mean(name, set(known))}")


def make_groups(
    runs: pd.DataFrame, ensemble_size: int | None = None, split: str | None = None
) -> pd.DataFrame:
    """Returns a row for each task, size and system, and for its ensembles; the best mean score first within a size.

    Columns: those of the first run; `runs`; those of `Estimate`; `split` and `evaluated`, its number of rows;
    `interval`, over replicates and rows, or over the rows of a single run; `ece`, an `Estimate` or None, and `bins` of
    `calibration`.
    """
    runs = runs.assign(members=[[path] for path in runs["path"]])
    if ensemble_size:
        runs = pd.concat([runs, ensembles(runs, ensemble_size)], ignore_index=True)
    runs = pd.DataFrame(map(_evaluate, on_split(runs, split)))
    groups = []
    for _, group in runs.groupby(KEYS):
        first, estimate = group.iloc[0].to_dict(), estimates.summarise(group)
        interval = (estimate.low, estimate.high)
        if len(group) == 1:
            task = task_of(first["description"])
            interval = estimates.example_interval(task, first["predictions"])
        is_classes = not math.isnan(first["run_ece"])
        ece = estimates.summarise(group.drop(columns="effects").assign(score=group["run_ece"]))
        columns = {
            "runs": group,
            "estimate": estimate,
            "interval": interval,
            "baseline": group["baseline"].mean(),
            "ece": ece if is_classes else None,
            "bins": calibration(group["predictions"])[1] if is_classes else None,
            "evaluated": len(first["predictions"]["labels"]),
        }
        groups.append(first | vars(estimate) | columns)
    order = {"by": ["task", "train_size", "mean"], "ascending": [True, True, False]}
    return pd.DataFrame(groups).sort_values(**order, ignore_index=True)


def _evaluate(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a run with its predictions, the effects of their rows, and its calibration errors (classes only)."""
    task, predictions = task_of(run["description"]), read_predictions(run)[run["split"]]
    error = calibrated = math.nan
    if not (task.is_regression or task.multi_label):
        error = calibration([predictions])[0]
        if pd.notna(run["temperature"]):  # there is a validation split
            logits = predictions["logits"] / run["temperature"]
            calibrated = calibration([{**predictions, "logits": logits}])[0]
    effects = estimates.row_effects(task, predictions)
    columns = {"predictions": predictions, "effects": effects, "calibrated": calibrated}
    return {**run, **columns, "run_ece": error}


def on_split(runs: pd.DataFrame, split: str | None) -> list[dict[str, Any]]:
    """Returns the runs with scores and baseline of a split; None: of test where all runs of the task have it.

    Fields `score`, `scores` and `baseline` become those of that split, `split` names it, and `other` has the scores
    of the other one.

    Raises:
        UserError: A task has no such rows.
    """
    chosen = list[dict[str, Any]]()
    for task, of_task in runs.groupby("task"):
        has_test = all("test" in tests for tests in of_task["tests"])
        if split == "test" and not has_test:
            raise UserError(
                f"--split test: not all runs of {task} have labelled test rows; leave it out."
            )
        for run in of_task.to_dict("records"):
            if has_test and split != "dev":
                scores = run["tests"]["test"]
                baseline = run["test_baselines"]["test"][run["metric"]]
                values = {"split": "test", "scores": scores, "score": scores[run["metric"]]}
                run |= values | {"baseline": baseline, "other": {"dev": run["scores"]}}
            else:
                run |= {"split": "dev", "other": run["tests"]}
            chosen.append(run)
    return chosen


def ensembles(runs: pd.DataFrame, size: int) -> pd.DataFrame:
    """Returns a row for each ensemble of `size` runs that differ in `seed` only; runs that are left over are not used.

    Raises:
        UserError: No system has so many seeds.
    """
    rows = []
    for _, group in runs.sort_values("seed").groupby([*KEYS, "pretraining", "subset"]):
        for start in range(0, len(group) - size + 1, size):
            members = group.iloc[start : start + size]
            run = members.iloc[0].to_dict() | {"members": members["path"].tolist()}
            predictions, task = read_predictions(run), task_of(run["description"])
            scored = {s: predictions[s] for s in ("dev", *run["tests"]) if s in predictions}
            scores = {split: score_predictions(task, arrays) for split, arrays in scored.items()}
            run |= {"score": scores["dev"][run["metric"]], "temperature": None}
            run |= {"system": f"{run['system']} x{size}", "seconds": members["seconds"].sum()}
            rows.append(run | {"scores": scores.pop("dev"), "tests": scores})
    if not rows:
        raise UserError(f"--ensembles {size}: no system has {size} seeds of a training subset.")
    return pd.DataFrame(rows)


def read_predictions(run: Mapping[Any, Any]) -> dict[str, dict[str, Array]]:
    """Returns the predictions of a run, or of an ensemble, by split and name."""
    return average([load_predictions(Path(path), run["task"]) for path in run["members"]])


def average(members: Sequence[Mapping[str, Mapping[str, Array]]]) -> dict[str, dict[str, Array]]:
    """Returns averaged predictions, by split and name, of the splits that all members share.

    Logits are (N, C). Scores are averaged, probabilities too; the latter are returned as logits.

    Raises:
        UserError: The members were evaluated on different rows.
    """
    averaged = {}
    for split in set.intersection(*map(set, members)):
        first = members[0][split]
        if not all(np.array_equal(first["ids"], member[split]["ids"]) for member in members):
            raise UserError("the members of an ensemble were evaluated on different examples.")
        outputs = np.stack([member[split]["logits"] for member in members]).astype(np.float64)
        if first["labels"].ndim > 1:
            mean = logsumexp(log_expit(outputs), axis=0) - logsumexp(log_expit(-outputs), axis=0)
        elif outputs.shape[-1] == 1:
            mean = outputs.mean(axis=0)
        else:
            mean = logsumexp(log_softmax(outputs, axis=-1), axis=0)
        averaged[split] = dict(first) | {"logits": np.asarray(mean)}
    return averaged


def calibration(runs: Sequence[Mapping[str, Array]]) -> tuple[float, pd.DataFrame]:
    """Returns the expected calibration error of runs on the same rows, the mean over the runs, and its bins.

    It is the mean over the examples of |accuracy - confidence| of their bin, where the confidence is the probability
    of the predicted class. A bin's columns, of all runs together: confidence, right (the accuracy), share.
    """
    frames = []
    for run in runs:
        probabilities = softmax(run["logits"].astype(np.float64), axis=1)
        right = probabilities.argmax(axis=1) == run["labels"]
        frames.append(pd.DataFrame({"confidence": probabilities.max(axis=1), "right": right}))
    examples = pd.concat(frames, keys=range(len(runs)), names=["run"])
    bins = pd.cut(examples["confidence"], BINS)
    by_bin = examples.groupby(bins, observed=True)
    gaps = (examples["right"] - examples["confidence"]).groupby(["run", bins], observed=True)
    error = float(gaps.sum().abs().sum() / len(examples))
    return error, by_bin.mean().assign(share=by_bin.size() / len(examples))


def scores_table(groups: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each system and size, the best first, a column for each task, and the average of several."""
    keys, rows = ["train size", "system"], list[tuple[str, str, str, str, float]]()
    for group in groups.itertuples():
        column = f"{group.task} ({group.metric}, {rows_of(group)})"
        scores = {group.system: (group.mean, group.error), BASELINE: (group.baseline,)}
        for system, score in scores.items():
            rows.append((group.train_size, system, column, percent(*score), score[0]))
    cells = pd.DataFrame(rows, columns=[*keys, "column", "text", "number"])
    cells = cells.drop_duplicates([*keys, "column"]).set_index([*keys, "column"])
    table = cells["text"].unstack(sort=False).fillna("-")
    numbers = cells["number"].unstack()
    average = numbers.mean(axis=1, skipna=False)
    if table.shape[1] > 1:
        of_system = _averages(groups).groupby(["train_size", "system"])
        errors = {key: estimates.summarise(runs).error for key, runs in of_system}
        table["average"] = [percent(average[key], errors.get(key, math.nan)) for key in table.index]
    # Systems that lack a task come last.
    table = table.assign(all=average, some=numbers.mean(axis=1)).reset_index()
    ordered = table.sort_values(["train size", "all", "some"], ascending=[True, False, False])
    return ordered.drop(columns=["all", "some"]).reset_index(drop=True)


def _averages(groups: pd.DataFrame) -> pd.DataFrame:
    return estimates.averages(pd.concat(list(groups["runs"])))


def rows_of(group: Any) -> str:
    """Returns the number of rows that a group was evaluated on, such as "1,200 test rows"."""
    return count(group.evaluated, f"{group.split} row")


@dataclass(frozen=True)
class Compared:
    """The comparison of two systems on a task, or on the average of all, at one size."""

    task: str
    size: str
    names: tuple[str, str]  # A and B of A - B
    kind: str  # of test
    test: estimates.Comparison
    p: float  # corrected for all tests of its family: single tasks, or averages
    tests: int  # in the family


def compare_systems(groups: pd.DataFrame) -> list[Compared]:
    """Returns the comparison of each pair of systems on each task and size, after those of the average of several."""
    families = [groups[["task", "train_size", "system", "estimate"]]]
    if groups["task"].nunique() > 1 and len(means := _averages(groups)):
        of_system = means.groupby(["train_size", "system"])
        rows = [(AVERAGE, *key, estimates.summarise(of)) for key, of in of_system]
        averages = pd.DataFrame(rows, columns=families[0].columns)
        averages["mean"] = [estimate.mean for estimate in averages["estimate"]]
        families.insert(0, averages.sort_values("mean", ascending=False))
    compared = list[Compared]()
    for family in families:
        pairs = [
            (str(task), str(size), a, b)
            for (task, size), of_size in family.groupby(["task", "train_size"])
            for a, b in itertools.combinations(of_size.itertuples(), 2)
        ]
        tests = [estimates.compare(a.estimate, b.estimate) for *_, a, b in pairs]
        number = sum(not math.isnan(test.p) for test in tests)
        corrected = estimates.holm([test.p for test in tests])
        for (task, size, a, b), test, p in zip(pairs, tests, corrected, strict=True):
            kind = f"paired, {UNITS[a.estimate.kind]}s" if test.paired else "Welch"
            kind += ", seeds only" if "seed" in (a.estimate.kind, b.estimate.kind) else ""
            compared.append(Compared(task, size, (a.system, b.system), kind, test, p, number))
    return compared


def comparisons_table(compared: Sequence[Compared]) -> pd.DataFrame:
    """Returns a row for each comparison."""
    rows = [
        {
            "task": pair.task,
            "train size": pair.size,
            "system": " - ".join(pair.names),
            "difference": percent(pair.test.difference, sign="+"),
            INTERVAL: percent(*pair.test.interval(), sign="+", joined=" to "),
            "corrected": percent(*pair.test.interval(pair.tests), sign="+", joined=" to "),
            "p, corrected": f"{pair.p:.3g}",
            "test": pair.kind,
            "detectable": percent(pair.test.detectable),
        }
        for pair in compared
    ]
    return pd.DataFrame(rows).replace("nan", "-")


def verdicts(groups: pd.DataFrame, compared: Sequence[Compared]) -> list[str]:
    """Returns a sentence for each task and size: who is first, by how much, and whether that is more than chance."""
    sentences, p_values = [], {(pair.task, pair.size, *pair.names): pair.p for pair in compared}
    for (task, size), of_task in groups.groupby(["task", "train_size"]):
        first = of_task.iloc[0]
        lead = f"{task}, {size} rows: {first['system']} is first with {percent(first['mean'])} % "
        lead += f"{first['metric']} on {rows_of(first)}"
        if len(of_task) == 1:
            sentences.append(f"{lead}; the majority class has {percent(first['baseline'])} %.")
            continue
        second = of_task.iloc[1]
        gap = percent(first["mean"] - second["mean"])
        p = p_values.get((task, size, first["system"], second["system"]), math.nan)
        chance = "that is more than chance" if p < 0.05 else "that may be chance"
        if math.isnan(p):
            chance = "whether that is chance, these runs cannot tell"
        sentences.append(f"{lead}, {gap} points above {second['system']}; {chance}.")
    return sentences


def results_table(groups: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each task, size and system."""
    runs, units = groups["runs"], zip(groups["units"], groups["kind"], strict=True)
    held_out = groups["validation_rows"].map(lambda number: f" + {number}" if number else "")
    columns = {
        "evaluated on": [rows_of(group) for group in groups.itertuples()],
        "scores": [scores_text(of_group, "scores") for of_group in runs],
        INTERVAL: [percent(*interval, joined=" to ") for interval in groups["interval"]],
        "baseline": groups["baseline"].map(percent),
        "median": [percent(of_group["score"].median()) for of_group in runs],
        "other rows": [scores_text(of_group, "other") for of_group in runs],
        "ECE": [percent(ece.mean, ece.error) if ece else "-" for ece in groups["ece"]],
        "ECE, calibrated": [percent(of_group["calibrated"].mean()) for of_group in runs],
        "replicates": [
            count(len(of), UNITS[kind]) + (" only" if kind == "seed" else "") for of, kind in units
        ],
        "runs": runs.map(len),
        "training rows": groups["train_rows"].astype(str) + held_out,
        "chosen": groups["candidate"].replace("", "-"),
        "seconds": [round(of_group["seconds"].mean()) for of_group in runs],
    }
    return groups[KEYS].assign(**columns).rename(columns={"train_size": "train size"})


def error_tables(groups: pd.DataFrame, number: int) -> dict[str, pd.DataFrame]:
    """Returns tables of the best system of each task: its most confident errors, and which classes it confuses.

    They are of the system's first run. Tasks of scores have none.
    """
    tables = dict[str, pd.DataFrame]()
    for name, of_task in groups.groupby("task"):
        best = of_task.sort_values("mean").iloc[-1]
        task = task_of(best["description"])
        if task.is_regression or not number:
            continue
        errors = list_errors(task, best["predictions"])
        title = f"{best['system']} on {name}, {count(best['evaluated'], best['split'] + ' row')}"
        tables[f"Errors of {title}: {len(errors)}"] = errors.head(number)
        if not task.multi_label:
            pairs = errors.groupby(["label", "predicted"]).size().rename("errors").reset_index()
            tables[f"Confusions of {title}"] = pairs.sort_values(
                "errors", ascending=False, kind="stable"
            ).head(number)
    return tables


def list_errors(task: Task, predictions: Mapping[str, Array]) -> pd.DataFrame:
    """Returns the errors among predictions, those with the largest probability first: they show wrong labels, too.

    Columns: text, label, predicted, probability (of several labels the most wrong one's), row.
    """
    outputs, labels = predictions["logits"].astype(np.float64), predictions["labels"]
    predicted = predictions_of(task, outputs)
    if task.multi_label:
        wrong, probabilities = (predicted != labels).any(axis=1), expit(outputs)
        confidence = np.where(predicted != labels, np.abs(probabilities - 0.5) + 0.5, 0).max(axis=1)
    else:
        wrong, confidence = predicted != labels, softmax(outputs, axis=1).max(axis=1)
    places = np.where(predictions["places"] == "", predictions["ids"], predictions["places"])
    columns = {
        "text": [text.replace("\n", " | ") for text in predictions["texts"]],
        "label": names_of(task, labels),
        "predicted": names_of(task, predicted),
        "probability": np.round(confidence, 3),
        "row": places,
    }
    return pd.DataFrame(columns)[wrong].sort_values("probability", ascending=False, kind="stable")


def scores_text(runs: pd.DataFrame, column: str) -> str:
    """Returns "metric mean ± standard error, ..." of a column of scores by metric; "-" if there are none."""
    values, texts = pd.json_normalize(runs[column].tolist(), sep=" ").set_index(runs.index), []
    for name in values:
        estimate = estimates.summarise(runs.assign(score=values[name]).dropna(subset="score"))
        texts.append(f"{name} {percent(estimate.mean, estimate.error)}")
    return ", ".join(texts) or "-"


def percent(*values: float, sign: str = "", joined: str = " ± ") -> str:
    """Returns fractions as percent with two digits, without those that are nan; "-" if all are."""
    numbers = [f"{100 * value:{sign}.2f}" for value in values if not math.isnan(value)]
    return joined.join(numbers) or "-"


def find_warnings(runs: pd.DataFrame, groups: pd.DataFrame) -> list[str]:
    """Returns warnings that change how the tables are to be read."""
    warnings = []
    for task, of_task in runs.groupby("task"):
        if of_task["data_sha256"].nunique() > 1:
            warnings.append(f"{task}: the runs read different data; their scores do not compare.")
        on_dev = (groups.loc[groups["task"] == task, "split"] == "dev").all()
        if on_dev and ((of_task["selection"] == "dev") & ~of_task["head"].isin(FITTED)).any():
            warnings.append(f"{task}: dev picked the checkpoint and gave the score: optimistic.")
        if names := ", ".join(_mixed(of_task)):
            warnings.append(f"{task}: the runs differ in {names}, which may change scores.")
    for (task, size, system), group in runs.groupby(KEYS):
        values = pd.DataFrame(group["settings"].tolist()).astype(str).nunique()
        if names := ", ".join(values.index[values > 1]):
            warnings.append(f"{system} on {task}, {size} rows: its runs differ in {names}.")
    return warnings


def _mixed(runs: pd.DataFrame) -> list[str]:
    """Returns the machines and versions in which runs differ, with their values."""
    columns = runs.reindex(columns=["device", "precision", "ranks", "git_commit"])
    versions = pd.DataFrame(runs["versions"].tolist(), index=runs.index)
    table = pd.concat([columns, versions], axis=1)
    values = {name: sorted(set(table[name].dropna().astype(str))) for name in table}
    return [f"{name} ({', '.join(of)})" for name, of in values.items() if len(of) > 1]


def best_commands(runs: pd.DataFrame) -> dict[str, str]:
    """Returns for each task the command that saves, or uses, the model of the best run by its picking rows."""
    commands = {}
    for run in estimates.best_runs(runs):
        folder = Path(run["path"])
        words = ["--recipe", str(folder / "settings.yaml"), "--output_dir", str(folder.parents[2])]
        command = f"python finetune/run.py {shlex.join(words)} --save_model"
        refitted = folder.parents[2] / "best" / str(run["task"]) / "model"
        saved = next((path for path in (refitted, folder / "model") if path.is_dir()), None)
        if saved:
            command = predict_command(saved, run["description"], run["head"] == "cln")
        elif run["task"] not in TASKS:
            command = f"python finetune/refit.py {shlex.quote(str(folder))}"
        if command:
            commands[f"{run['task']}, the best model ({run['system']})"] = command
    return commands


def draw_runs(groups: pd.DataFrame) -> str:
    """Draws each group's runs, the mean with its 95 % interval, and the baseline; returns SVG in base64."""
    figure = Figure(figsize=(7, 1.2 + 0.42 * len(groups)), layout="constrained")
    axis = figure.subplots()
    for row, group in enumerate(groups.itertuples()):
        scores = 100 * group.runs["score"]
        axis.plot(scores, [row] * len(scores), "o", color="black", fillstyle="none")
        axis.plot(100 * np.array(group.interval), [row + 0.25] * 2, "-", color="black", lw=1)
        axis.plot([100 * group.mean], [row + 0.25], "|", color="black", ms=10, mew=2)
        axis.plot([100 * group.baseline], [row], "x", color="0.5")
    labels = groups["system"] + "\n" + groups["task"] + ", " + groups["train_size"]
    axis.set(yticks=range(len(groups)), xlabel="score, percent", ylim=(len(groups) - 0.5, -0.6))
    axis.set_yticklabels(labels, fontsize=7)
    return _svg(figure)


def draw_calibration(groups: pd.DataFrame) -> str:
    """Draws the accuracy by confidence of the first classifiers; returns SVG in base64, "" without classifiers."""
    enough = groups["bins"].notna() & (groups["evaluated"] >= FEWEST)  # of fewer rows it is noise
    drawn = groups[enough].head(PANELS)
    rows = math.ceil(len(drawn) / 3)
    figure = Figure(figsize=(7, 2.5 * rows), layout="constrained")
    for number, group in enumerate(drawn.itertuples(), 1):
        panel, bins = figure.add_subplot(rows, 3, number, xlim=(0, 1), ylim=(0, 1)), group.bins
        panel.plot([0, 1], [0, 1], "--", color="0.5", lw=0.8)
        panel.bar([bin.mid for bin in bins.index], bins["share"], 1 / 15, color="0.85")
        panel.plot(bins["confidence"], bins["right"], "o-", color="black", ms=3, lw=1)
        title = f"{group.system}, {group.task}\nECE {percent(group.ece.mean)} %"
        panel.set_title(title, fontsize=7)
    return _svg(figure) if rows else ""


def _svg(figure: Figure) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return base64.b64encode(file.getvalue()).decode()
