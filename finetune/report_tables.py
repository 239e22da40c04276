"""The content of a report: groups of runs, tables, a figure, warnings and commands. Scores are fractions of 1."""

import base64
import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.special import expit, softmax
from sklearn.metrics import confusion_matrix

from finetune import estimates
from finetune.calibration import calibration_error
from finetune.estimates import KEYS, UNITS
from finetune.heads import HEADS
from finetune.metrics import names_of, predictions_of
from finetune.results import load_predictions, load_results, unfinished_runs
from finetune.tasks import Array, Task, task_of
from multicls.console import count
from multicls.errors import UserError, did_you_mean

BASELINE = "majority-class baseline"
INTERVAL = "95 % interval"
AVERAGE = "average"  # of the tasks
NOTES = 20  # most notes on rows
MATRIX = 20  # most classes of a confusion matrix


@dataclass(frozen=True)
class Report:
    """The content of a report."""

    verdicts: list[str]  # who won, in words
    groups: pd.DataFrame  # of `make_groups`
    tables: dict[str, pd.DataFrame]  # of text
    figure: str  # all runs, SVG in base64
    warnings: list[str]
    notes: list[str]  # on the rows


def build_report(
    folder: Path,
    tasks: Sequence[str] = (),
    systems: Sequence[str] = (),
    split: str | None = None,
    errors: int = 20,
) -> Report:
    """Returns the report of a results folder, on these tasks (default: all), with tests of these systems.

    Test rows give the numbers where a task has them, unless the split is "dev"; `errors` of the best system are listed.
    """
    runs = load_results(folder)
    _check_names("--task", tasks, runs["task"])
    runs = estimates.choose_candidates(runs[runs["task"].isin(tasks or runs["task"])])
    groups = make_groups(runs, split)
    _check_names("--compare", systems, groups["system"])
    averages, among = average_groups(groups), systems or list(groups["system"])
    families = [table[table["system"].isin(among)] for table in (averages, groups)]
    comparisons = pd.concat(map(compare_systems, families))
    notes = runs[["task", "notes"]].explode("notes").dropna().drop_duplicates()
    tables = {
        "Scores": scores_table(groups, averages),
        "Comparisons": comparisons_table(comparisons),
        "All results": results_table(groups),
        **error_tables(groups, errors),
    }
    return Report(
        verdicts(groups, comparisons),
        groups,
        {name: table for name, table in tables.items() if len(table)},
        draw_runs(groups),
        find_warnings(runs, groups) + unfinished_runs(folder),
        [f"{task}: {note}" for task, note in notes.itertuples(index=False)][:NOTES],
    )


def _check_names(flag: str, names: Sequence[str], known: Iterable[str]) -> None:
    for name in set(names).difference(known):
        raise UserError(f"{flag} {name}: no run of it.{did_you_mean(name, set(known))}")


def make_groups(runs: pd.DataFrame, split: str | None = None) -> pd.DataFrame:
    """Returns a row for each task, size and system; the best mean score first within a size.

    Columns: those of its first run and of `Estimate`, `runs`, and `interval`, of a single run over its rows only.
    """
    groups = []
    for _, group in evaluate_runs(runs, split).groupby(KEYS):
        first, estimate = group.iloc[0].to_dict(), estimates.summarise(group)
        interval = estimate.interval()
        if len(group) == 1:
            task = task_of(first["description"])
            interval = estimates.example_interval(task, first["predictions"])
        columns = {"runs": group, "interval": interval, "baseline": group["baseline"].mean()}
        groups.append(first | vars(estimate) | columns | {"estimate": estimate})
    order = {"by": ["task", "train_size", "mean"], "ascending": [True, True, False]}
    return pd.DataFrame(groups).sort_values(**order, key=_in_order, ignore_index=True)


def _in_order(column: pd.Series) -> pd.Series:
    """Returns what a column is sorted by: training sizes are numbers, shots a class, or all rows."""
    if column.name not in ("train_size", "train size"):
        return column
    return column.map(lambda text: math.inf if text == "full" else int(text.partition("-")[0]))


def evaluate_runs(runs: pd.DataFrame, split: str | None) -> pd.DataFrame:
    """Returns the runs with their numbers on the rows of a split; None: of test where all runs of the task have it.

    New columns: `split` and `evaluated`, its name and its number of rows; `score`, `scores` and `baseline`;
    `predictions`; `effects` by `row_effects`; `ece` and, after the temperature, `calibrated` (of classes, else NaN).
    """
    evaluated = list[dict[str, Any]]()
    for name, of_task in runs.groupby("task"):
        has_test = all("test" in splits for splits in of_task["splits"])
        if split == "test" and not has_test:
            raise UserError(f"--split test: not all runs of {name} have test rows; leave it out.")
        chosen = split or ("test" if has_test else "dev")
        for run in of_task.to_dict("records"):
            task, found, metric = task_of(run["description"]), run["splits"][chosen], run["metric"]
            predictions = load_predictions(Path(run["path"]), run["task"])[chosen]
            run |= {"split": chosen, "evaluated": found["rows"], "scores": found["scores"]}
            run |= {"score": found["scores"][metric], "baseline": found["baselines"][metric]}
            run |= {"effects": estimates.row_effects(task, predictions), "ece": math.nan}
            run |= {"predictions": predictions, "calibrated": math.nan}
            run["uncut"] = found["uncut"] if task.cuts else math.nan
            if not (task.is_regression or task.multi_label):
                logits, labels = predictions["logits"], predictions["labels"]
                run["ece"] = calibration_error(logits, labels)
                if pd.notna(run["temperature"]):  # there is a validation split
                    run["calibrated"] = calibration_error(logits / run["temperature"], labels)
            evaluated.append(run)
    return pd.DataFrame(evaluated)


def average_groups(groups: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for the average over several tasks of each system and size that has them all, the best first."""
    rows = []
    if groups["task"].nunique() > 1:
        means = estimates.averages(pd.concat(list(groups["runs"])))
        for (size, system), of_system in means.groupby(["train_size", "system"]):
            estimate = estimates.summarise(of_system)
            rows.append((AVERAGE, size, system, estimate, estimate.mean, estimate.error))
    columns = ["task", "train_size", "system", "estimate", "mean", "error"]
    return pd.DataFrame(rows, columns=columns).sort_values("mean", ascending=False)


def scores_table(groups: pd.DataFrame, averages: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each system and size, the best first, a column for each task, and the average of several."""
    cells = dict[tuple[str, str, str], str]()
    order = dict.fromkeys(zip(averages["train_size"], averages["system"], strict=True))
    for group in groups.itertuples():
        column = f"{group.task} ({group.metric}, {rows_of(group)})"
        cells[group.train_size, group.system, column] = percent(group.mean, group.error)
        cells[group.train_size, BASELINE, column] = percent(group.baseline)
        order[group.train_size, group.system] = None
    for group in averages.itertuples():
        cells[group.train_size, group.system, AVERAGE] = percent(group.mean, group.error)
    order |= {(size, BASELINE): None for size in groups["train_size"]}
    table = pd.Series(cells).unstack(sort=False).fillna("-").loc[list(order)]
    table = table.rename_axis(["train size", "system"]).reset_index()
    return table.sort_values("train size", key=_in_order, kind="stable", ignore_index=True)


def rows_of(group: Any) -> str:
    """Returns the number of rows that a group was evaluated on, such as "1,200 test rows"."""
    return count(group.evaluated, f"{group.split} row")


def compare_systems(groups: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each pair of systems on each task and size; their tests are one family.

    Columns: task, size; A and B of A - B; kind of test; `test`, a `Comparison`; p, corrected; tests in the family.
    """
    rows = []
    for (task, size), of_size in groups.groupby(["task", "train_size"], sort=False):
        for a, b in itertools.combinations(of_size.itertuples(), 2):
            test = estimates.compare(a.estimate, b.estimate)
            kind = f"paired, {UNITS[a.estimate.kind]}s" if test.paired else "Welch"
            kind += ", seeds only" if "seed" in (a.estimate.kind, b.estimate.kind) else ""
            rows.append((task, size, a.system, b.system, kind, test, test.p))
    table = pd.DataFrame(rows, columns=["task", "size", "a", "b", "kind", "test", "p"])
    return table.assign(p=estimates.holm(table["p"]), tests=table["p"].count())


def comparisons_table(compared: pd.DataFrame) -> pd.DataFrame:
    """Returns the text of each comparison."""
    rows = [
        {
            "task": pair.task,
            "train size": pair.size,
            "system": f"{pair.a} - {pair.b}",
            "difference": percent(pair.test.mean, sign="+"),
            INTERVAL: percent(*pair.test.interval(), sign="+", joined=" to "),
            "corrected": percent(*pair.test.interval(pair.tests), sign="+", joined=" to "),
            "p, corrected": f"{pair.p:.3g}",
            "test": pair.kind,
            "detectable": percent(pair.test.detectable),
        }
        for pair in compared.itertuples()
    ]
    return pd.DataFrame(rows).replace("nan", "-")


def verdicts(groups: pd.DataFrame, compared: pd.DataFrame) -> list[str]:
    """Returns a sentence for each task and size: who is first, by how much, and whether that is more than chance."""
    sentences, p_values = [], compared.set_index(["task", "size", "a", "b"])["p"]
    for (task, size), of_task in groups.groupby(["task", "train_size"], sort=False):
        first = of_task.iloc[0]
        lead = f"{task}, {size} rows: {first['system']} is first with {percent(first['mean'])} % "
        lead += f"{first['metric']} on {rows_of(first)}"
        if len(of_task) == 1:
            sentences.append(f"{lead}; the majority class has {percent(first['baseline'])} %.")
            continue
        second = of_task.iloc[1]
        gap = percent(first["mean"] - second["mean"])
        p = p_values.get((task, size, first["system"], second["system"]))
        chance = "that is more than chance" if p is not None and p < 0.05 else "that may be chance"
        if p is None:
            chance = "--compare left out their test"
        elif math.isnan(p):
            chance = "whether that is chance, these runs cannot tell"
        sentences.append(f"{lead}, {gap} points above {second['system']}; {chance}.")
    return sentences


def results_table(groups: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each task, size and system."""
    runs, units = groups["runs"], zip(groups["units"], groups["kind"], strict=True)
    held = [of.get("validation", {}).get("rows") for of in groups["splits"]]
    trained = zip(groups["train_rows"], held, strict=True)
    columns = {
        "evaluated on": [rows_of(group) for group in groups.itertuples()],
        "scores": [scores_text(of_group) for of_group in runs],
        INTERVAL: [percent(*interval, joined=" to ") for interval in groups["interval"]],
        "baseline": groups["baseline"].map(percent),
        "median": [percent(of_group["score"].median()) for of_group in runs],
        "ECE": [summary(of_group, of_group["ece"]) for of_group in runs],
        "ECE, calibrated": [percent(of_group["calibrated"].mean()) for of_group in runs],
        "with thresholds of 0.5": [percent(of_group["uncut"].mean()) for of_group in runs],
        "replicates": [
            count(len(of), UNITS[kind]) + (" only" if kind == "seed" else "") for of, kind in units
        ],
        "runs": runs.map(len),
        "training rows": [f"{rows} + {more}" if more else f"{rows}" for rows, more in trained],
        "chosen": groups["candidate"].replace("", "-"),
        "seconds": [round(of_group["seconds"].mean()) for of_group in runs],
    }
    if groups["runs"].map(lambda of_group: of_group["uncut"].isna().all()).all():
        del columns["with thresholds of 0.5"]
    return groups[KEYS].assign(**columns).rename(columns={"train_size": "train size"})


def error_tables(groups: pd.DataFrame, number: int) -> dict[str, pd.DataFrame]:
    """Returns tables of the first run of each task's best system: most confident errors, and confused classes."""
    tables = dict[str, pd.DataFrame]()
    for name, of_task in groups.groupby("task") if number else ():
        best = of_task.sort_values("mean").iloc[-1]
        task = task_of(best["description"])
        errors = list_errors(task, best["predictions"])
        title = f"{best['system']} on {name}, {count(best['evaluated'], best['split'] + ' row')}"
        tables[f"Errors of {title}: {len(errors)}"] = errors.head(number)
        if task.labels and not task.multi_label:
            pairs = errors.groupby(["label", "predicted"]).size().rename("errors").reset_index()
            tables[f"Confusions of {title}"] = pairs.nlargest(number, "errors")
        if not task.multi_label and 0 < len(task.labels) <= MATRIX:
            tables[f"Matrix of {title}"] = matrix_of(task, best["predictions"])
    return tables


def matrix_of(task: Task, predictions: Mapping[str, Array]) -> pd.DataFrame:
    """Returns the number of rows by label, a row each, and prediction, a column each."""
    predicted, classes = predictions_of(task, predictions["logits"]), range(len(task.labels))
    counts = confusion_matrix(predictions["labels"], predicted, labels=classes)
    names = pd.Index(task.labels, name="label \\ predicted")
    return pd.DataFrame(counts, names, task.labels).reset_index()


def list_errors(task: Task, predictions: Mapping[str, Array]) -> pd.DataFrame:
    """Returns the errors with their places, the most confident or farthest first; of several labels, by the worst."""
    outputs, labels = predictions["logits"].astype(np.float64), predictions["labels"]
    predicted = predictions_of(task, outputs)
    if task.is_regression:
        wrong, confidence = predicted != labels, np.abs(predicted - labels)
    elif task.multi_label:
        wrong, probabilities = (predicted != labels).any(axis=1), expit(outputs)
        confidence = np.where(predicted != labels, np.abs(probabilities - 0.5) + 0.5, 0).max(axis=1)
    else:
        wrong, confidence = predicted != labels, softmax(outputs, axis=1).max(axis=1)
    places = np.where(predictions["places"] == "", predictions["ids"], predictions["places"])
    columns = {
        "text": [text.replace("\n", " | ") for text in predictions["texts"]],
        "label": names_of(task, labels),
        "predicted": names_of(task, predicted),
        "off by" if task.is_regression else "probability": np.round(confidence, 3),
        "row": places,
    }
    order = np.argsort(-confidence[wrong], kind="stable")
    return pd.DataFrame(columns)[wrong].iloc[order]


def scores_text(runs: pd.DataFrame) -> str:
    """Returns "metric mean ± standard error, ..." of all scores of a group's runs."""
    scores = pd.DataFrame(runs["scores"].tolist(), runs.index)
    return ", ".join(f"{name} {summary(runs, scores[name])}" for name in scores)


def summary(runs: pd.DataFrame, values: pd.Series) -> str:
    """Returns "mean ± standard error" of a value of each of a group's runs."""
    estimate = estimates.summarise(runs.drop(columns="effects").assign(score=values))
    return percent(estimate.mean, estimate.error)


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
        trained = of_task["head"].isin(HEADS)  # a peer has no checkpoints
        if on_dev and ((of_task["selection"] == "dev") & trained).any():
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
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return base64.b64encode(file.getvalue()).decode()
