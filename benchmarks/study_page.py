"""Writes the page of a study: what was run, what the corrected tests say of each claim, tables and figures.

python benchmarks/study.py page --study runs/study --output docs/study.md
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure
from pydantic import Field

from benchmarks.study import left_in_words, run_folders
from benchmarks.study_plan import ARMS, BASE, ENSEMBLE, Plan
from finetune.show import figures, tables
from finetune.show.tables import Table, number, p_text
from finetune.stats.calibration import calibration
from finetune.stats.comparisons import Comparison, compare, holm
from finetune.stats.estimates import estimate
from finetune.stats.pairs import SIGNIFICANT
from finetune.stats.systems import SystemResult, load_results
from finetune.store.results import Store
from multicls.command_line import CommandLine
from multicls.errors import UserError
from multicls.files import atomic_write, read_json, read_jsonl
from multicls.settings import Settings
from multicls.words import duration
from pretrain.report import METRICS, read_runs, table
from pretrain.run_folder import DONE

TEMPLATE = Path(__file__).with_name("study.md.jinja")
COLORS = ("black", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # Okabe and Ito (2008)
PIECE = 480.0  # seconds of a call
CURVES = {"loss/mlm": "masked-LM loss on held-out text", "acc/mcqt": "accuracy of quick thoughts on held-out text"}
Rows = Sequence[SystemResult]


@dataclass(frozen=True)
class Claim:
    """A statement that a test can support or contradict: A is better than B.

    Attributes:
        text: In words.
        a: A system.
        b: Another one.
        measure: "score", or "ece" (calibration error), of which less is better.
    """

    text: str
    a: str
    b: str
    measure: Literal["score", "ece"] = "score"


K5 = "k5 multicls"
CLAIMS = (
    Claim("Five facets score higher than MTL's single [CLS]", K5, "mtl cls"),
    Claim("Five facets score higher than one facet", K5, "k1 multicls"),
    Claim("Five facets score higher than masked-LM pretraining on as many tokens", K5, "mlm cls"),
    Claim("Five facets score higher than the untouched base model", K5, f"{BASE} cls"),
    Claim("Hard negatives raise the score of five facets", K5, "k5_no_hard multicls"),
    Claim("Inserted layers raise the score of five facets", K5, "k5_no_layers multicls"),
    Claim("Reading the facets scores higher than the mean over tokens of the same model", K5, "k5 mean"),
    Claim("MTL scores higher than masked-LM pretraining on as many tokens", "mtl cls", "mlm cls"),
    Claim("IsoBN raises the score of five facets", "k5 isobn/multicls", K5),
    Claim("Five facets are better calibrated than one facet", K5, "k1 multicls", "ece"),
    Claim("Five facets are better calibrated than MTL's single [CLS]", K5, "mtl cls", "ece"),
)


@dataclass(frozen=True)
class Tested:
    """A claim with its test, at one train size, on one task or on the average over tasks.

    Attributes:
        claim: The claim.
        size: Train rows.
        task: Name of the task; "" for the average.
        found: Difference A - B with its test.
        corrected: p-value, corrected by Holm's method.
    """

    claim: Claim
    size: str
    task: str
    found: Comparison
    corrected: float = math.nan

    @property
    def verdict(self) -> Literal["supported", "contradicted", "not seen"]:
        """The verdict of the corrected test on the claim."""
        if not self.corrected < SIGNIFICANT:
            return "not seen"
        return "supported" if (self.found.difference < 0) == (self.claim.measure == "ece") else "contradicted"

    @property
    def interval(self) -> str:
        """The 95 % interval of the difference."""
        return "-" if math.isnan(self.found.low) else f"{self.found.low:+.2f} to {self.found.high:+.2f}"

    def __str__(self) -> str:
        """Returns the claim with its numbers, as a sentence."""
        place = ", ".join(filter(None, [self.task, f"{self.size} train rows"]))
        unit = "points of ECE, less is better" if self.claim.measure == "ece" else "points"
        return (f"{self.claim.text} ({place}): {self.found.difference:+.2f} {unit}; 95 % interval {self.interval}; "
                f"corrected p {p_text(self.corrected)}.")  # fmt: skip


class PageOptions(Settings):
    """Options of the command."""

    study: Path = Field(default=Path("runs/study"), description="folder of the study, finished or not")
    output: Path = Field(default=Path("docs/study.md"), description="the page; its figures go to images/ beside it")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page and its figures; returns the exit code."""
    options = CommandLine("benchmarks/study.py page", __doc__, PageOptions).parse(argv)
    if not (options.study / "plan.json").exists():
        raise UserError(f"--study {options.study}: no study there (plan.json is missing).")
    rows = load_results(Store(options.study / "results")).rows
    if not rows:
        raise UserError(f"--study {options.study}: no fine-tuning run is finished yet; give the study's command again.")
    plan = Plan.model_validate(read_json(options.study / "plan.json"))
    images = options.output.parent / "images"
    write_figure(curves_figure(options.study, plan), images / "study_curves.svg")
    write_figure(scores_figure(rows), images / "study_scores.svg")
    text = render(options.study, plan, rows)
    with atomic_write(options.output) as file:
        file.write(text)
    print(f"written: {options.output}, with {images}/study_curves.svg and study_scores.svg")
    return 0


def render(folder: Path, plan: Plan, rows: Rows) -> str:
    """Returns the page as Markdown."""
    ensembles = load_results(Store(folder / "ensembles"), ensembles=ENSEMBLE).rows
    averages, tasks = claim_tests(rows, by_task=False), claim_tests(rows, by_task=True)
    spent: dict[str, float] = {}
    for call in read_jsonl(folder / "calls.jsonl"):
        spent[call["stage"]] = spent.get(call["stage"], 0.0) + call["seconds"]
    halves = [(one.found.high - one.found.low) / 2 for one in averages if one.claim.measure == "score"]
    curves = [str(run) for run in run_folders(folder, plan).values() if (run / METRICS).exists()]
    disagreement = folder / "analysis" / "disagreement.md"
    records = [record for row in rows for record in row.records]
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        plan=plan, arms=ARMS, averages=averages, tasks=tasks,
        state="" if (folder / "done" / "evaluation").exists() else left_in_words(folder, plan, PIECE),
        half=number(statistics.median([half for half in halves if math.isfinite(half)] or [math.nan])),
        versions=", ".join(f"{name} {version}" for name, version in records[0]["versions"].items()),
        commits=", ".join(sorted({str(record["git_commit"]) for record in records})),
        spent=", ".join(f"{stage} {duration(seconds)}" for stage, seconds in spent.items()),
        total=duration(sum(spent.values())),
        claims=_text(claims_table(averages, tasks)),
        scores=[_text(tables.side_by_side(rows, size)) for size in dict.fromkeys(row.train_size for row in rows)],
        calibration=_calibration(rows),
        ensembles=_text(tables.side_by_side(ensembles, ensembles[0].train_size)) if ensembles else "",
        ensembles_calibration=_calibration(ensembles),
        disagreement=disagreement.read_text(encoding="utf-8").partition("\n\n")[2] if disagreement.exists() else "",
        pretraining=table(read_runs(curves)) if curves else "",
        costs=_text(cost_table(rows)), results=_text(tables.results_table(rows)),
        candidates=_text(tables.candidates_table(rows)),
    )  # fmt: skip


def _text(found: Table) -> str:
    """Returns a table and its notes as Markdown, without the title and what all rows share; "" if it is empty."""
    return "" if found.frame.empty else tables.markdown(found).partition("\n\n")[2].replace(", holdout", "")


def _calibration(rows: Rows) -> str:
    return _text(tables.calibration_table(rows))


def frames_of(rows: Rows, measure: str) -> dict[tuple[str, str, str], pd.DataFrame]:
    """Returns the scores, or the calibration errors, of the runs in percent, by train size, system and task."""
    found = {}
    for row in rows:
        frame, place = row.frame, (row.train_size, row.system.name, row.task)
        if measure == "ece":
            runs = row.predictions()
            if not all("logits" in run for run in runs):
                continue
            frame = frame.assign(score=[100 * calibration(run["logits"], run["labels"])["ece"] for run in runs])
        found[place] = frame
    return found


def average_frame(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Returns the mean over tasks for each pretraining, draw and seed that all tasks have."""
    scores = pd.concat(frames).groupby(["pretraining", "draw", "seed"])["score"]
    return scores.mean()[scores.count() == len(frames)].reset_index()


def claim_tests(rows: Rows, by_task: bool) -> list[Tested]:
    """Returns the tests of all claims, corrected together: on each task, or on the average over tasks.

    An average is over the tasks for which both systems have runs. The base model is one given model, and no sample of
    pretrainings: it stands beside each pretraining of the other system.
    """
    tests = []
    frames = {measure: frames_of(rows, measure) for measure in ("score", "ece")}
    for claim in CLAIMS:
        mine = frames[claim.measure]
        for size in dict.fromkeys(row.train_size for row in rows):
            pairs = {task: (mine[size, claim.a, task], mine[size, claim.b, task]) for place, name, task in mine
                     if (place, name) == (size, claim.a) and (size, claim.b, task) in mine}  # fmt: skip
            if not by_task and pairs:
                pairs = {"": tuple(map(average_frame, zip(*pairs.values(), strict=True)))}
            for task, (a, b) in pairs.items():
                if claim.b.startswith(f"{BASE} "):
                    b = pd.concat([b.assign(pretraining=one) for one in a["pretraining"].unique()])
                if not a.empty and not b.empty:
                    tests.append(Tested(claim, size, task, compare(a, b)))
    corrected = holm([one.found.p for one in tests])
    return [replace(one, corrected=p) for one, p in zip(tests, corrected, strict=True)]


def claims_table(averages: Sequence[Tested], tasks: Sequence[Tested]) -> Table:
    """Returns a row for each claim and train size: the test on the average, and the difference on each task."""
    lines = []
    for one in averages:
        line = {"A": one.claim.a, "B": one.claim.b, "measure": one.claim.measure, "train rows": one.size,
                "A - B, average": f"{one.found.difference:+.2f}", "95 % interval": one.interval,
                "p, corrected": p_text(one.corrected), "verdict": one.verdict}  # fmt: skip
        here = [other for other in tasks if (other.claim, other.size) == (one.claim, one.size)]
        line |= {other.task: f"{other.found.difference:+.2f}{' *' * (other.verdict != 'not seen')}" for other in here}
        lines.append(line | {"units of the average": one.found.units})
    return Table("Claims", pd.DataFrame(lines).fillna("-"))


def cost_table(rows: Rows) -> Table:
    """Returns seconds and peak memory of a fine-tuning run by system and train size."""
    places: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        places.setdefault((row.system.name, row.train_size), []).extend(row.records)
    lines = [{"system": system, "train rows": size, "runs": str(len(records)),
              "seconds, mean": number(statistics.mean(record["seconds"] for record in records)),
              "peak memory, GB": number(max(record["peak_memory_gb"] for record in records))}
             for (system, size), records in places.items()]  # fmt: skip
    return Table("Costs", pd.DataFrame(lines))


def curves_figure(folder: Path, plan: Plan) -> Figure:
    """Returns the validation curves over the tokens seen, means over seeds, with a line for each arm."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axis, (key, title) in zip(figure.subplots(1, 2), CURVES.items(), strict=True):
        for index, arm in enumerate(ARMS):
            curve: dict[float, list[float]] = {}
            runs = [
                run for (name, _), run in run_folders(folder, plan).items() if name == arm and (run / DONE).exists()
            ]
            for run in runs if (arm, key) != ("mlm", "acc/mcqt") else ():  # which it is not trained on
                a_step = plan.pretraining.tokens / 1e6 / read_json(run / DONE)["step"]
                for record in read_jsonl(run / METRICS):
                    if record["split"] == "validation" and key in record:
                        curve.setdefault(record["step"] * a_step, []).append(record[key])
            points = sorted((tokens, statistics.mean(values)) for tokens, values in curve.items())
            style = {"color": COLORS[index], "linestyle": figures.LINES[index % 5], "linewidth": 1.2}
            style |= {"marker": figures.MARKERS[index], "fillstyle": "none", "markersize": 5, "label": arm}
            axis.plot(*np.array(points).reshape(-1, 2).T, **style)
        axis.set(xlabel="million tokens of text", title=title)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def scores_figure(rows: Rows) -> Figure:
    """Returns bars of each system's mean over tasks with its 95 % interval; shade, hatch and marker tell the heads."""
    frames, sizes = frames_of(rows, "score"), list(dict.fromkeys(row.train_size for row in rows))
    tasks, models = {task for *_, task in frames}, [BASE, *ARMS]
    systems = sorted({name for _, name, _ in frames}, key=lambda name: (models.index(name.partition(" ")[0]), name))
    heads = sorted({name.partition(" ")[2] for name in systems})
    figure = Figure(figsize=(9, 1 + 0.27 * len(systems)), layout="constrained")
    for axis, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        means = []
        for place, name in enumerate(systems):
            own = [frames[size, name, task] for task in tasks if (size, name, task) in frames]
            if len(own) == len(tasks) and not (average := average_frame(own)).empty:
                found, head = estimate(average), heads.index(name.partition(" ")[2])
                shade = {"color": str(1 - 0.08 * head), "hatch": figures.HATCHES[head % 4], "edgecolor": "black"}
                axis.barh(place, found.mean, **shade)
                for color, width in (("white", 5), ("black", 2)):  # a line that hatches do not hide
                    axis.plot([found.low, found.high], [place] * 2, color=color, linewidth=width)
                axis.plot(found.mean, place, figures.MARKERS[head], color="black", markersize=5)
                means.append(found.mean)
        axis.set(yticks=range(len(systems)), yticklabels=systems, title=f"{size} train rows",
                 xlabel=f"mean score over {len(tasks)} tasks, %", ylim=(len(systems) - 0.4, -0.6))  # fmt: skip
        axis.set_xlim(0, min(100.0, max(means, default=90.0) + 10))
    return figure


def write_figure(figure: Figure, path: Path) -> None:
    """Writes an SVG on white, for pages of any colour; the same figure gives the same bytes."""
    with matplotlib.rc_context(figures.SVG | {"svg.hashsalt": path.stem}), atomic_write(path) as file:
        figure.savefig(file, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
