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
from scipy.special import log_expit, log_softmax, logsumexp, softmax

from finetune import estimates
from finetune.estimates import KEYS, UNITS
from finetune.metrics import score_predictions
from finetune.predict import predict_command
from finetune.results import load_predictions, load_results, unfinished_runs
from finetune.tasks import Array, task_of
from multicls.console import count
from multicls.errors import UserError, did_you_mean

BASELINE = "majority-class baseline"
INTERVAL = "95 % interval"
PANELS = 12  # reliability diagrams on a page
BINS = np.linspace(0, 1, 16)  # edges of 15, as Guo et al. (2017); a bin holds its upper end


@dataclass(frozen=True)
class Report:
    """The content of a report."""

    groups: pd.DataFrame  # of `make_groups`
    tables: dict[str, pd.DataFrame]  # of text
    figures: dict[str, str]  # SVG in base64
    warnings: list[str]
    commands: dict[str, str]  # by what each is for


def build_report(
    folder: Path,
    tasks: Sequence[str] = (),
    systems: Sequence[str] = (),
    ensemble_size: int | None = None,
) -> Report:
    """Returns the report of a results folder, on these tasks (default: all), with tests of these systems.

    Raises:
        UserError: There is no run, none of a task or system that is named, or one without predictions.
    """
    runs = load_results(folder)
    _check_names("--task", tasks, runs["task"])
    runs = estimates.choose_candidates(runs[runs["task"].isin(tasks or runs["task"])])
    groups = make_groups(runs, ensemble_size)
    _check_names("--compare", systems, groups["system"])
    tested = groups[groups["system"].isin(systems or groups["system"])]
    tables = {
        "Scores": scores_table(groups),
        "Comparisons": comparisons_table(tested),
        "All results": results_table(groups),
    }
    figures = {
        "All runs (o), mean and 95 % interval (|), baseline (x)": draw_runs(groups),
        "Accuracy by confidence; grey: share of the examples": draw_calibration(groups),
    }
    return Report(
        groups,
        {name: table for name, table in tables.items() if len(table)},
        {title: image for title, image in figures.items() if image},
        find_warnings(runs) + unfinished_runs(folder),
        best_commands(runs),
    )


def _check_names(flag: str, names: Sequence[str], known: Iterable[str]) -> None:
    for name in set(names).difference(known):
        raise UserError(f"{flag} {name}: no run of it.{did_you_mean(name, set(known))}")


def make_groups(runs: pd.DataFrame, ensemble_size: int | None = None) -> pd.DataFrame:
    """Returns a row for each task, size and system, and for its ensembles.

    Columns: those of the first run; `runs`; those of `Estimate`; `interval`, over replicates, or over the dev rows of a
    single run; `ece` and `bins` of `calibration`, nan and None without one class a row.
    """
    runs = runs.assign(members=[[path] for path in runs["path"]])
    if ensemble_size:
        runs = pd.concat([runs, ensembles(runs, ensemble_size)], ignore_index=True)
    groups = []
    for _, group in runs.groupby(KEYS):
        first, estimate = group.iloc[0].to_dict(), estimates.summarise(group)
        task, interval = task_of(first["description"]), (estimate.low, estimate.high)
        dev = [read_predictions(run)["dev"] for run in group.to_dict("records")]
        if len(dev) == 1:
            interval = estimates.example_interval(task, dev[0])
        ece, bins = (math.nan, None) if task.is_regression or task.multi_label else calibration(dev)
        columns = {"runs": group, "interval": interval, "ece": ece, "bins": bins}
        groups.append(first | vars(estimate) | columns)
    return pd.DataFrame(groups)


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
            run["score"] = scores["dev"][run["metric"]]
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
    """Returns a row for each system and size, a column for each task, and the average if there are several."""
    texts, means = dict[tuple[str, str, str], str](), dict[tuple[str, str, str], float]()
    for group in groups.itertuples():
        scores = {BASELINE: (group.baseline,), group.system: (group.mean, group.error)}
        for system, score in scores.items():
            key = (group.train_size, system, f"{group.task} ({group.metric})")
            texts[key], means[key] = percent(*score), score[0]
    table = pd.Series(texts).unstack(sort=False, fill_value="-")
    if table.shape[1] > 1:
        table["average"] = pd.Series(means).unstack().mean(axis=1, skipna=False).map(percent)
    return table.rename_axis(["train size", "system"]).reset_index()


def comparisons_table(groups: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each pair of systems on one task and size."""
    rows = []
    for (task, size), of_task in groups.groupby(["task", "train_size"]):
        for a, b in itertools.combinations(of_task.itertuples(), 2):
            test = estimates.compare(a.units, b.units)
            kind = f"paired, {UNITS[a.kind]}s" if test.paired else "Welch"
            cells = {
                "task": task,
                "train size": size,
                "system": f"{a.system} - {b.system}",
                "difference": percent(test.difference, sign="+"),
                INTERVAL: percent(test.low, test.high, sign="+", joined=" to "),
                "p, corrected": test.p,
                "test": kind + ", seeds only" * ("seed" in (a.kind, b.kind)),
                "needed": np.ceil(test.needed),
            }
            rows.append(cells)
    table = pd.DataFrame(rows)
    if rows:
        table["p, corrected"] = [f"{p:.3g}" for p in estimates.holm(table["p, corrected"])]
        table["needed"] = table["needed"].map("{:.0f}".format)
    return table.replace("nan", "-")


def results_table(groups: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each task, size and system."""
    runs, units = groups["runs"], zip(groups["units"], groups["kind"], strict=True)
    held_out = groups["validation_rows"].map(lambda number: f" + {number}" * bool(number))
    columns = {
        "scores": [scores_text(of_group, "scores") for of_group in runs],
        INTERVAL: [percent(*interval, joined=" to ") for interval in groups["interval"]],
        "baseline": groups["baseline"].map(percent),
        "test rows": [scores_text(of_group, "tests") for of_group in runs],
        "ECE": groups["ece"].map(percent),
        "replicates": [
            count(len(of), UNITS[kind]) + " only" * (kind == "seed") for of, kind in units
        ],
        "runs": runs.map(len),
        "training rows": groups["train_rows"].astype(str) + held_out,
        "chosen": groups["candidate"].replace("", "-"),
        "seconds": [round(of_group["seconds"].mean()) for of_group in runs],
    }
    return groups[KEYS].assign(**columns).rename(columns={"train_size": "train size"})


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


def find_warnings(runs: pd.DataFrame) -> list[str]:
    """Returns warnings that change how the tables are to be read."""
    warnings = []
    for task, of_task in runs.groupby("task"):
        if of_task["data_sha256"].nunique() > 1:
            warnings.append(f"{task}: the runs read different data; their scores do not compare.")
        if (of_task["selection"] == "dev").any():
            warnings.append(f"{task}: dev picked the checkpoint and gave the score: optimistic.")
    for (task, size, system), group in runs.groupby(KEYS):
        values = pd.DataFrame(group["settings"].tolist()).astype(str).nunique()
        if names := ", ".join(values.index[values > 1]):
            warnings.append(f"{system} on {task}, {size} rows: its runs differ in {names}.")
    return warnings


def best_commands(runs: pd.DataFrame) -> dict[str, str]:
    """Returns for each task the command that saves, or uses, the model of the best run by its picking rows."""
    commands = {}
    for run in estimates.best_runs(runs):
        folder = Path(run["path"])
        words = ["--recipe", str(folder / "settings.yaml"), "--output_dir", str(folder.parents[2])]
        command = f"python finetune/run.py {shlex.join(words)} --save_model"
        if (folder / "model").is_dir():
            command = predict_command(folder / "model", run["description"], run["head"] == "cln")
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
    drawn = groups[groups["bins"].notna()].head(PANELS)
    rows = math.ceil(len(drawn) / 3)
    figure = Figure(figsize=(7, 2.5 * rows), layout="constrained")
    for number, group in enumerate(drawn.itertuples(), 1):
        panel, bins = figure.add_subplot(rows, 3, number, xlim=(0, 1), ylim=(0, 1)), group.bins
        panel.plot([0, 1], [0, 1], "--", color="0.5", lw=0.8)
        panel.bar([bin.mid for bin in bins.index], bins["share"], 1 / 15, color="0.85")
        panel.plot(bins["confidence"], bins["right"], "o-", color="black", ms=3, lw=1)
        panel.set_title(f"{group.system}, {group.task}\nECE {percent(group.ece)} %", fontsize=7)
    return _svg(figure) if rows else ""


def _svg(figure: Figure) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return base64.b64encode(file.getvalue()).decode()
