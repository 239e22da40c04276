"""Tables, figures, ensembles, warnings and commands of finetune/report.py. Scores are fractions of 1."""

from __future__ import annotations

import base64
import dataclasses
import io
import itertools
import math
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.special import expit, logit, softmax

from finetune import estimates
from finetune.estimates import UNITS, Estimate, summarise
from finetune.metrics import score_predictions
from finetune.predict import predict_command
from finetune.results import load_predictions
from finetune.tasks import Array, Task, task_of
from multicls.console import count
from multicls.errors import UserError

BASELINE = "majority-class baseline"
INTERVAL = "95 % interval"
PANELS = 12  # reliability diagrams on a page
BENCHMARKS = {  # the averages of Multi-CLS BERT, section 3.1
    "GLUE, paper's 8": {"cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"},
    "SuperGLUE, paper's 7": {"boolq", "cb", "copa", "multirc", "rte_superglue", "wic", "wsc"},
}
BINS = np.linspace(0, 1, 16)  # edges of 15, as Guo et al. (2017); a bin holds its upper end


@dataclasses.dataclass(frozen=True)
class Group:
    """The runs of one system on one task at one size."""

    runs: pd.DataFrame
    estimate: Estimate
    interval: tuple[float, float]  # over replicates, or over the dev rows of a single run
    ece: float = math.nan  # mean over runs; nan without one class a row
    bins: pd.DataFrame | None = None  # of `reliability`, all runs together

    def __getitem__(self, column: str) -> Any:
        """Returns a column's value in the first run."""
        return self.runs.iloc[0][column]

    @property
    def key(self) -> dict[str, str]:
        """The cells that identify the row of a table."""
        return {"task": self["task"], "train size": self["train_size"], "system": self["system"]}


def make_groups(runs: pd.DataFrame, ensemble_size: int | None = None) -> list[Group]:
    """Returns the runs by task, size and system, those of the chosen candidates only, and their ensembles."""
    groups, chosen = (
        [],
        estimates.choose_candidates(runs).sort_values(["task", "train_size"], kind="stable"),
    )
    for _, group in chosen.groupby(["task", "train_size", "system"], sort=False):
        groups.append(_make_group(group))
        if ensemble_size and len(combined := ensembles(group, ensemble_size)):
            groups.append(_make_group(combined))
    return groups


def _make_group(runs: pd.DataFrame) -> Group:
    estimate, task = summarise(runs), record_task(runs.iloc[0])
    dev = [load_predictions(Path(path), task.name)["dev"] for path in runs["path"] if path]
    single = len(runs) == len(dev) == 1
    across = (estimate.low, estimate.high)
    interval = estimates.example_interval(task, dev[0]) if single else across
    if task.is_regression or task.multi_label or not dev:
        return Group(runs, estimate, interval)
    errors = [calibration_error(reliability(run["logits"], run["labels"])) for run in dev]
    logits, labels = (np.concatenate([run[name] for run in dev]) for name in ("logits", "labels"))
    return Group(runs, estimate, interval, float(np.mean(errors)), reliability(logits, labels))


def record_task(row: Any) -> Task:
    """Returns the task of a row of `load_results`, with the run's own order of metrics."""
    return dataclasses.replace(task_of(row["description"]), metrics=tuple(row["metrics"]))


def ensembles(runs: pd.DataFrame, size: int) -> pd.DataFrame:
    """Returns the rows of ensembles of `size` runs that differ in `seed` only; the rest of the runs is not used.

    `runs` are of one system and task.
    """
    rows = []
    for _, group in runs.sort_values("seed").groupby(["pretraining", "subset"], sort=False):
        for start in range(0, len(group) - size + 1, size):
            members = group.iloc[start : start + size]
            first = members.iloc[0]
            averaged = average([load_predictions(Path(p), first["task"]) for p in members["path"]])
            scored = {"dev", "validation", *first["tests"]} & set(averaged)
            scores = {n: score_predictions(record_task(first), averaged[n]) for n in scored}
            changes = {
                "system": f"{first['system']} x{size}",
                "path": "",
                "score": scores["dev"][first["metric"]],
                "scores": scores["dev"],
                "selection_score": scores.get("validation", scores["dev"])[first["metric"]],
                "tests": {split: scores[split] for split in first["tests"] if split in scores},
                "seconds": members["seconds"].sum(),
            }
            rows.append(first.to_dict() | changes)
    return pd.DataFrame(rows)


def average(members: Sequence[Mapping[str, Mapping[str, Array]]]) -> dict[str, dict[str, Array]]:
    """Returns averaged predictions, by split and name, of the splits that all members share.

    Scores are averaged, probabilities too; the latter are returned as logits.

    Raises:
        UserError: The members were evaluated on different rows.
    """
    averaged = {}
    for split in set.intersection(*map(set, members)):
        first = members[0][split]
        if not all(np.array_equal(first["ids"], other[split]["ids"]) for other in members):
            raise UserError("the members of an ensemble were evaluated on different examples.")
        outputs = np.stack([member[split]["logits"] for member in members]).astype(np.float64)
        if first["labels"].ndim > 1:
            mean = logit(expit(outputs).mean(axis=0))
        elif outputs.shape[-1] == 1:
            mean = outputs.mean(axis=0)
        else:
            mean = np.log(softmax(outputs, axis=-1).mean(axis=0))
        averaged[split] = dict(first) | {"logits": np.asarray(mean)}
    return averaged


def reliability(logits: Array, labels: Array) -> pd.DataFrame:
    """Returns a row for each bin of the predicted class's probability that has examples, of logits (N, C).

    Columns: confidence (mean of that probability), accuracy, share (of the examples).
    """
    probabilities = softmax(np.asarray(logits, dtype=np.float64), axis=1)
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    frame = pd.DataFrame({"confidence": confidence, "accuracy": right})
    bins = frame.groupby(pd.cut(frame["confidence"], BINS), observed=True)
    return bins.mean().assign(share=bins.size() / len(frame))


def calibration_error(bins: pd.DataFrame) -> float:
    """Returns the expected calibration error: the mean of |accuracy - confidence| over the examples of the bins."""
    return float(((bins["accuracy"] - bins["confidence"]).abs() * bins["share"]).sum())


def scores_table(groups: Sequence[Group]) -> pd.DataFrame:
    """Returns a row for each system and size, a column for each task and each complete average."""
    cells = dict[tuple[str, str, str], str]()
    means = defaultdict[tuple[str, str], dict[str, float]](dict)
    for group in groups:
        size, column = group["train_size"], f"{group['task']} ({group['metric']})"
        cells[size, BASELINE, column] = percent(group["baseline"])
        cells[size, group["system"], column] = with_error(group.estimate)
        means[size, group["system"]][group["task"]] = group.estimate.mean
    for (size, system), of_task in means.items():
        for name, tasks in BENCHMARKS.items():
            if tasks <= set(of_task):
                cells[size, system, name] = percent(
                    float(np.mean([of_task[t] for t in sorted(tasks)]))
                )
    table = pd.Series(cells).unstack(sort=False, fill_value="-")
    return table.rename_axis(["train size", "system"]).reset_index()


def comparisons_table(groups: Sequence[Group], systems: Sequence[str]) -> pd.DataFrame:
    """Returns a row for each pair of systems on one task and size."""
    pairs = [
        (a, b, estimates.compare(a.estimate, b.estimate))
        for a, b in itertools.combinations(groups, 2)
        if (a["task"], a["train_size"]) == (b["task"], b["train_size"])
        and (not systems or {a["system"], b["system"]} <= set(systems))
    ]
    corrected, lines = estimates.holm([test.p for _, _, test in pairs]), []
    for (a, b, test), p in zip(pairs, corrected, strict=True):
        kind = f"paired, {UNITS[a.estimate.kind]}s" if test.paired else "Welch"
        cells = {
            "system": f"{a['system']} - {b['system']}",
            "difference": percent(test.difference, "+"),
            INTERVAL: interval_text((test.low, test.high), "+"),
            "p, corrected": ("< 0.001" if p < 0.0005 else f"{p:.3f}") + " *" * (p < 0.05),
            "test": kind + ", seeds only" * ("seed" in (a.estimate.kind, b.estimate.kind)),
            "needed": f"{np.ceil(test.needed):.0f}",
        }
        lines.append(a.key | cells)
    return pd.DataFrame(lines).replace("nan", "-")


def results_table(groups: Sequence[Group]) -> pd.DataFrame:
    """Returns a row for each system, task and size."""
    lines = []
    for group in groups:
        estimate, held = group.estimate, group["validation_rows"]
        units = count(len(estimate.units), UNITS[estimate.kind])
        cells = {
            "scores": scores_text(group.runs, "scores"),
            INTERVAL: interval_text(group.interval),
            "baseline": percent(group["baseline"]),
            "test rows": scores_text(group.runs, "tests"),
            "ECE": percent(group.ece),
            "replicates": units + " only" * (estimate.kind == "seed"),
            "runs": str(len(group.runs)),
            "training rows": f"{group['train_rows']}" + f" + {held}" * bool(held),
            "dev rows": str(group["dev_rows"]),
            "chosen": group["candidate"] or "-",
            "seconds": f"{group.runs['seconds'].mean():.0f}",
        }
        lines.append(group.key | cells)
    return pd.DataFrame(lines)


def scores_text(runs: pd.DataFrame, column: str) -> str:
    """Returns "metric mean ± standard error, ..." of a column of scores by metric; "-" if there are none."""
    values = pd.json_normalize(runs[column].tolist(), sep=" ").set_index(runs.index)
    scored = {name: runs.join(values[name]).dropna(subset=name) for name in values}
    texts = [f"{name} {with_error(summarise(of_name, name))}" for name, of_name in scored.items()]
    return ", ".join(texts) or "-"


def find_warnings(groups: Sequence[Group], ensemble_size: int | None) -> list[str]:
    """Returns warnings that change how the tables are to be read."""
    warnings = []
    for task, runs in pd.concat([group.runs for group in groups]).groupby("task", sort=False):
        if runs["data_sha256"].nunique() > 1:
            warnings.append(f"{task}: the runs read different data; their scores do not compare.")
        if (runs["selection"] == "dev").any():
            warnings.append(f"{task}: dev picked the checkpoint and gave the score: optimistic.")
        warnings += [f"{task}: {note}" for note in dict.fromkeys(runs["warnings"].sum())]
    combined = [group.key for group in groups if not group["path"]]
    for group in groups:
        name = f"{group['system']} on {group['task']}, {group['train_size']} rows"
        ensemble = group.key | {"system": f"{group['system']} x{ensemble_size}"}
        if ensemble_size and group["path"] and ensemble not in combined:
            warnings.append(f"--ensembles {ensemble_size}: {name} has fewer seeds of each subset.")
        settings = pd.DataFrame(group.runs["settings"].tolist()).astype(str).nunique()
        if names := set(settings[settings > 1].index) - set(UNITS):
            warnings.append(f"{name}: its runs differ in {', '.join(sorted(names))}.")
    return warnings


def unfinished_text(unfinished: Mapping[str, str]) -> list[str]:
    """Returns a line on the runs that are not finished, given their reasons by folder; none if there are none."""
    number = count(len(unfinished), "run")
    first = list(unfinished.items())[:1]
    return [f"{number} not finished, for instance {path}: {reason}" for path, reason in first]


def best_commands(groups: Sequence[Group]) -> dict[str, str]:
    """Returns for each task the command that saves, or uses, the model of the best run by its picking rows."""
    commands = {}
    for run in estimates.best_runs(pd.concat([group.runs for group in groups if group["path"]])):
        model, recipe = Path(run["path"], "model"), Path(run["path"], "settings.yaml")
        command = predict_command(model, run["description"], run["head"] == "cln")
        if not model.is_dir():
            command = f"python finetune/run.py --recipe {shlex.quote(str(recipe))} --save_model"
        if command:
            commands[f"{run['task']}, the best model ({run['system']})"] = command
    return commands


def percent(value: float, sign: str = "") -> str:
    """Returns a fraction as percent with two digits, "-" for nan."""
    return "-" if math.isnan(value) else f"{100 * value:{sign}.2f}"


def interval_text(interval: tuple[float, float], sign: str = "") -> str:
    """Returns "low to high" in percent, "-" for nan."""
    return " to ".join(percent(value, sign) for value in interval).replace("- to -", "-")


def with_error(estimate: Estimate) -> str:
    """Returns "mean ± standard error" in percent, without the error if there is one replicate."""
    return f"{percent(estimate.mean)} ± {percent(estimate.error)}".removesuffix(" ± -")


def draw_runs(groups: Sequence[Group]) -> str:
    """Draws each group's runs, the mean with its 95 % interval, and the baseline; returns SVG in base64."""
    figure = Figure(figsize=(7, 1.2 + 0.42 * len(groups)), layout="constrained")
    axis = figure.subplots()
    for row, group in enumerate(groups):
        scores = 100 * group.runs["score"]
        axis.plot(scores, [row] * len(scores), "o", color="black", fillstyle="none")
        axis.plot(100 * np.array(group.interval), [row + 0.25] * 2, "-", color="black", lw=1)
        axis.plot([100 * group.estimate.mean], [row + 0.25], "|", color="black", ms=10, mew=2)
        axis.plot([100 * group["baseline"]], [row], "x", color="0.5")
    labels = [f"{g['system']}\n{g['task']}, {g['train_size']}" for g in groups]
    axis.set(yticks=range(len(groups)), xlabel="score, percent", ylim=(len(groups) - 0.5, -0.6))
    axis.set_yticklabels(labels, fontsize=7)
    return _svg(figure)


def draw_calibration(groups: Sequence[Group]) -> str:
    """Draws the accuracy by confidence of the first classifiers; returns SVG in base64, "" without classifiers."""
    drawn = [(group, group.bins) for group in groups if group.bins is not None][:PANELS]
    if not drawn:
        return ""
    rows = math.ceil(len(drawn) / 3)
    figure = Figure(figsize=(7, 2.5 * rows), layout="constrained")
    for number, (group, bins) in enumerate(drawn, 1):
        panel = figure.add_subplot(rows, 3, number, xlim=(0, 1), ylim=(0, 1))
        panel.plot([0, 1], [0, 1], "--", color="0.5", lw=0.8)
        panel.bar([bin.mid for bin in bins.index], bins["share"], 1 / 15, color="0.85")
        panel.plot(bins["confidence"], bins["accuracy"], "o-", color="black", ms=3, lw=1)
        title = f"{group['system']}, {group['task']}\nECE {100 * group.ece:.1f} %"
        panel.set_title(title, fontsize=7)
    return _svg(figure)


def _svg(figure: Figure) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return base64.b64encode(file.getvalue()).decode()
