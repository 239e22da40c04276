"""Writes the page of a study: what was run, what the corrected tests say of each claim, tables and figures.

python benchmarks/study.py page --study runs/study --output docs/study.md
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import matplotlib
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


class Claim(NamedTuple):
    """A statement that a test can support or contradict: system A is better than system B.

    The measure is "score", or "ece" (calibration error), of which less is better.
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
    """A claim with its test, at one train size, on one task or on the average over tasks."""

    claim: Claim
    size: str  # train rows
    task: str  # "" for the average
    found: Comparison  # A - B
    corrected: float = math.nan  # p-value, by Holm's method

    @property
    def verdict(self) -> Literal["supported", "contradicted", "not seen"]:
        """The verdict of the corrected test on the claim."""
        if not self.corrected < SIGNIFICANT:
            return "not seen"
        return "supported" if (self.found.difference < 0) == (self.claim.measure == "ece") else "contradicted"

    @property
    def interval(self) -> str:
        """The 95 % interval of the difference."""
        return tables.interval(self.found.low, self.found.high, "+")

    def __str__(self) -> str:
        """Returns the claim with its numbers, as a sentence."""
        place = ", ".join(filter(None, [self.task, f"{self.size} train rows"]))
        unit = "points of ECE, less is better" if self.claim.measure == "ece" else "points"
        return (f"{self.claim.text} ({place}): {self.found.difference:+.2f} {unit}; 95 % interval {self.interval}; "
                f"corrected p {p_text(self.corrected)}.")  # fmt: skip


class PageOptions(Settings):
    """Options of the command."""

    study: Path = Field(Path("runs/study"), description="folder of the study, finished or not")
    output: Path = Field(Path("docs/study.md"), description="the page; its figures go to images/ beside it")


def main(argv: Sequence[str]) -> None:
    """Writes the page and its figures."""
    options = CommandLine("benchmarks/study.py page", __doc__, PageOptions).parse(argv)
    if not (options.study / "plan.json").exists():
        raise UserError(f"--study {options.study}: no study there (plan.json is missing).")
    rows = load_results(Store(options.study / "results")).rows
    if not rows:
        raise UserError(f"--study {options.study}: no fine-tuning run is finished yet; give the study's command again.")
    plan = Plan.model_validate(read_json(options.study / "plan.json"))
    images = options.output.parent / "images"
    write_figure(curves_figure(options.study, plan), images / "study_curves.svg")
    runs = all_runs(rows)
    write_figure(scores_figure(runs), images / "study_scores.svg")
    text = render(options.study, plan, rows, runs)
    with atomic_write(options.output) as file:
        file.write(text)
    print(f"written: {options.output}, with {images}/study_curves.svg and study_scores.svg")


def render(folder: Path, plan: Plan, rows: Rows, runs: pd.DataFrame) -> str:
    """Returns the page as Markdown; `runs` are those of `all_runs`."""
    ensembles = load_results(Store(folder / "ensembles"), ensembles=ENSEMBLE).rows
    averages, tasks = claim_tests(runs, by_task=False), claim_tests(runs, by_task=True)
    spent = pd.DataFrame(read_jsonl(folder / "calls.jsonl")).groupby("stage", sort=False)["seconds"].sum()
    halves = [(one.found.high - one.found.low) / 2 for one in averages if one.claim.measure == "score"]
    curves = [str(run) for run in run_folders(folder, plan).values() if (run / METRICS).exists()]
    disagreement = folder / "analysis" / "disagreement.md"
    records = [record for row in rows for record in row.records]
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        plan=plan, arms=ARMS, averages=averages, tasks=tasks,
        state="" if (folder / "done" / "evaluation").exists() else left_in_words(folder, plan, PIECE),
        half=number(float(pd.Series(halves).median())),
        versions=", ".join(f"{name} {version}" for name, version in records[0]["versions"].items()),
        commits=", ".join(sorted({str(record["git_commit"]) for record in records})),
        spent=", ".join(f"{stage} {duration(seconds)}" for stage, seconds in spent.items()),
        total=duration(spent.sum()),
        claims=_text(claims_table(averages, tasks)),
        scores=[_text(tables.side_by_side(rows, size)) for size in runs["size"].unique()],
        calibration=_text(tables.calibration_table(rows)),
        ensembles=_text(tables.side_by_side(ensembles, ensembles[0].train_size)) if ensembles else "",
        ensembles_calibration=_text(tables.calibration_table(ensembles)),
        disagreement=disagreement.read_text(encoding="utf-8").partition("\n\n")[2] if disagreement.exists() else "",
        pretraining=table(read_runs(curves)) if curves else "",
        costs=_text(cost_table(rows)), results=_text(tables.results_table(rows)),
        candidates=_text(tables.candidates_table(rows)),
    )  # fmt: skip


def _text(found: Table) -> str:
    """Returns a table and its notes as Markdown, without the title and what all rows share; "" if it is empty."""
    return "" if found.frame.empty else tables.markdown(found).partition("\n\n")[2].replace(", holdout", "")


def all_runs(rows: Rows) -> pd.DataFrame:
    """Returns a line for each run: size, system, task, pretraining, draw, seed, score and ece in % (nan: none)."""
    frames = []
    for row in rows:
        errors = [100 * calibration(run["logits"], run["labels"])["ece"] if "logits" in run else math.nan
                  for run in row.predictions()]  # fmt: skip
        frames.append(row.frame.assign(ece=errors, size=row.train_size, system=row.system.name, task=row.task))
    return pd.concat(frames)


def average(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the mean score over tasks for each pretraining, draw and seed that all tasks have."""
    scores = runs.groupby(["pretraining", "draw", "seed"])["score"]
    return scores.mean()[scores.count() == runs["task"].nunique()].reset_index()


def claim_tests(runs: pd.DataFrame, by_task: bool) -> list[Tested]:
    """Returns the tests of all claims, corrected together: on each task, or on the average over tasks.

    An average is over the tasks for which both systems have runs. The base model is one given model, and no sample of
    pretrainings: it stands beside each pretraining of the other system.
    """
    tests = []
    for claim in CLAIMS:
        measured = runs.assign(score=runs[claim.measure]).dropna(subset="score")
        for size, here in measured.groupby("size", sort=False):
            sides = [here[here["system"] == name] for name in (claim.a, claim.b)]
            shared = [task for task in sides[0]["task"].unique() if task in set(sides[1]["task"])]
            for tasks in [[task] for task in shared] if by_task else [shared] * bool(shared):
                a, b = (average(side[side["task"].isin(tasks)]) for side in sides)
                if claim.b.startswith(f"{BASE} "):
                    b = pd.concat([b.assign(pretraining=one) for one in a["pretraining"].unique()])
                if not a.empty and not b.empty:
                    tests.append(Tested(claim, str(size), tasks[0] if by_task else "", compare(a, b)))
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
    runs = pd.DataFrame([{"system": row.system.name, "train rows": row.train_size} | dict(record)
                         for row in rows for record in row.records])  # fmt: skip
    places = runs.groupby(["system", "train rows"], sort=False)
    found = pd.DataFrame({
        "runs": places.size().map(str), "seconds, mean": places["seconds"].mean().map(number),
        "peak memory, GB": places["peak_memory_gb"].max().map(number),
    })  # fmt: skip
    return Table("Costs", found.reset_index())


def curves_figure(folder: Path, plan: Plan) -> Figure:
    """Returns the validation curves over the tokens seen, means over seeds, with a line for each arm."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axis, (key, title) in zip(figure.subplots(1, 2), CURVES.items(), strict=True):
        for index, arm in enumerate(ARMS):
            points = []
            for (name, _), run in run_folders(folder, plan).items():
                trained_on_it = (arm, key) != ("mlm", "acc/mcqt")
                if name == arm and trained_on_it and (run / DONE).exists():
                    a_step = plan.pretraining.tokens / 1e6 / read_json(run / DONE)["step"]
                    points += [(record["step"] * a_step, record[key]) for record in read_jsonl(run / METRICS)
                               if record["split"] == "validation" and key in record]  # fmt: skip
            curve = pd.DataFrame(points, columns=["tokens", "value"]).groupby("tokens")["value"].mean()
            axis.plot(curve.index, curve, color=COLORS[index], linestyle=figures.LINES[index % 5], linewidth=1.2,
                      marker=figures.MARKERS[index], fillstyle="none", markersize=5, label=arm)  # fmt: skip
        axis.set(xlabel="million tokens of text", title=title)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def scores_figure(runs: pd.DataFrame) -> Figure:
    """Returns bars of each system's mean over tasks with its 95 % interval; shade, hatch and marker tell the heads."""
    models, sizes, tasks = [BASE, *ARMS], runs["size"].unique(), runs["task"].nunique()
    systems = sorted(runs["system"].unique(), key=lambda name: (models.index(name.partition(" ")[0]), name))
    heads = sorted({name.partition(" ")[2] for name in systems})
    figure = Figure(figsize=(9, 1 + 0.27 * len(systems)), layout="constrained")
    for axis, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        means = []
        for place, name in enumerate(systems):
            own = runs[(runs["size"] == size) & (runs["system"] == name)]
            if own["task"].nunique() == tasks and not (means_of_runs := average(own)).empty:
                found, head = estimate(means_of_runs), heads.index(name.partition(" ")[2])
                shade = {"color": str(1 - 0.08 * head), "hatch": figures.HATCHES[head % 4], "edgecolor": "black"}
                axis.barh(place, found.mean, **shade)
                for color, width in (("white", 5), ("black", 2)):  # a line that hatches do not hide
                    axis.plot([found.low, found.high], [place] * 2, color=color, linewidth=width)
                axis.plot(found.mean, place, figures.MARKERS[head], color="black", markersize=5)
                means.append(found.mean)
        axis.set(yticks=range(len(systems)), yticklabels=systems, title=f"{size} train rows",
                 xlabel=f"mean score over {tasks} tasks, %", ylim=(len(systems) - 0.4, -0.6))  # fmt: skip
        axis.set_xlim(0, min(100.0, max(means, default=90.0) + 10))
    return figure


def write_figure(figure: Figure, path: Path) -> None:
    """Writes an SVG on white, for pages of any colour; the same figure gives the same bytes."""
    with matplotlib.rc_context(figures.SVG | {"svg.hashsalt": path.stem}), atomic_write(path) as file:
        figure.savefig(file, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
