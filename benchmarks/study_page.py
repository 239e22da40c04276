"""The page of the study: what was run, what the corrected tests support, contradict or cannot see, and all numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

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
from multicls.errors import CommandParser, UserError
from multicls.files import atomic_write, read_json, read_jsonl
from multicls.words import duration
from pretrain.report import read_runs, table

TEMPLATE = Path(__file__).with_name("study.md.jinja")
Verdict = Literal["supported", "contradicted", "not seen"]


@dataclass(frozen=True)
class Claim:
    """A statement that a test can support or contradict: A is better than B.

    Attributes:
        text: In words.
        a: System.
        b: System.
        measure: "score", or "ece", of which less is better.
    """

    text: str
    a: str
    b: str
    measure: str = "score"


K5 = "k5 multicls"
CLAIMS = (
    Claim("Five facets score higher than MTL's single [CLS]", K5, "mtl cls"),
    Claim("Five facets score higher than one facet", K5, "k1 multicls"),
    Claim("Five facets score higher than masked-LM pretraining of equal length", K5, "mlm cls"),
    Claim("Five facets score higher than the untouched base model", K5, f"{BASE} cls"),
    Claim("Hard negatives raise the score of five facets", K5, "k5_no_hard multicls"),
    Claim("Inserted layers raise the score of five facets", K5, "k5_no_layers multicls"),
    Claim("Reading the facets scores higher than the mean over tokens of the same model", K5, "k5 mean"),
    Claim("MTL scores higher than masked-LM pretraining of equal length", "mtl cls", "mlm cls"),
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
        task: Name of the task, "" for the average.
        found: Difference A minus B with its test.
        corrected: p-value, corrected by Holm's method over all tests of its table.
    """

    claim: Claim
    size: str
    task: str
    found: Comparison
    corrected: float = math.nan

    @property
    def verdict(self) -> Verdict:
        """What the corrected test says of the claim."""
        if not self.corrected < SIGNIFICANT:
            return "not seen"
        better = self.found.difference < 0 if self.claim.measure == "ece" else self.found.difference > 0
        return "supported" if better else "contradicted"

    @property
    def sentence(self) -> str:
        """The claim with its numbers."""
        unit = "points of ECE" if self.claim.measure == "ece" else "points"
        return (f"{self.claim.text} ({self.size} rows): {self.found.difference:+.2f} {unit}, 95 % interval "
                f"{number(self.found.low)} to {number(self.found.high)}, corrected p = {p_text(self.corrected)}.")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page; returns the exit code."""
    parser = CommandParser("Writes the page of a study and its figures, finished or not.")
    parser.add_argument("--study", default="runs/study", metavar="DIR", help="default: runs/study")
    parser.add_argument("--output", default="docs/study.md", metavar="FILE", help="default: docs/study.md")
    args = parser.parse_args(argv)
    folder, output = Path(args.study), Path(args.output)
    if not (folder / "plan.json").exists():
        raise UserError(f"--study {folder}: no study there (plan.json is missing).")
    rows = load_results(Store(folder / "results")).rows
    if not rows:
        raise UserError(f"--study {folder}: no fine-tuning run is finished yet; give the study's command again.")
    plan = Plan.model_validate(read_json(folder / "plan.json"))
    pictures = output.parent / "images"
    draw_curves(folder, plan, pictures / "study_curves.svg")
    draw_scores(rows, plan, pictures / "study_scores.svg")
    with atomic_write(output) as file:
        file.write(render(folder, plan, rows))
    print(f"written: {output}, {pictures}/study_curves.svg and study_scores.svg")
    return 0


def render(folder: Path, plan: Plan, rows: Sequence[SystemResult]) -> str:
    """Returns the page as Markdown."""
    ensembles = load_results(Store(folder / "ensembles"), ensembles=ENSEMBLE).rows
    averaged, by_task = claim_tests(rows, by_task=False), claim_tests(rows, by_task=True)
    calls = read_jsonl(folder / "calls.jsonl")
    stages = {call["stage"]: 0.0 for call in calls} | {}
    for call in calls:
        stages[call["stage"]] += call["seconds"]
    halves = [(one.found.high - one.found.low) / 2 for one in averaged if one.claim.measure == "score"]
    analysis = folder / "analysis" / "analysis.json"
    source = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    records = rows[0].records
    return source.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        plan=plan,
        state=left_in_words(folder, plan, 480),
        finished=(folder / "done" / "evaluation").exists(),
        versions=", ".join(f"{name} {version}" for name, version in records[0]["versions"].items()),
        commits=", ".join(sorted({str(record["git_commit"]) for row in rows for record in row.records})),
        stages=", ".join(f"{stage} {duration(seconds)}" for stage, seconds in stages.items()),
        total=duration(sum(stages.values())),
        half=number(statistics.median(halves)) if halves and not math.isnan(statistics.median(halves)) else "",
        verdicts={kind: [one for one in averaged if one.verdict == kind] for kind in ("supported", "contradicted", "not seen")},
        single=[one for one in by_task if one.verdict != "not seen"],
        counts=(len(averaged), len(by_task)),
        averages=_text(claims_table(averaged)),
        tasks=_text(tasks_table(by_task)),
        side_by_side=[_text(tables.side_by_side(rows, size)) for size in dict.fromkeys(row.train_size for row in rows)],
        calibration=_text(tables.calibration_table(rows, _predictions(rows))),
        ensembles=_text(ensemble_table(ensembles)) if ensembles else "",
        disagreement=_text(disagreement_table(read_json(analysis))) if analysis.exists() else "",
        pretraining=table(read_runs([str(run) for run in run_folders(folder, plan).values() if (run / "metrics.jsonl").exists()])),
        costs=_text(cost_table(rows)),
        results=_text(tables.results_table(rows)),
        candidates=_text(tables.candidates_table(rows)),
        arms=ARMS,
    )  # fmt: skip


def _text(found: Table) -> str:
    """Returns a table and its notes as Markdown without its title; "" if it is empty."""
    return "" if found.frame.empty else tables.markdown(found).partition("\n\n")[2]


def _predictions(rows: Iterable[SystemResult]) -> dict[int, Sequence[Mapping[str, Any]]]:
    return {id(row): row.predictions() for row in rows}


def frames_of(rows: Sequence[SystemResult], measure: str) -> dict[tuple[str, str, str], pd.DataFrame]:
    """Returns the scores (or calibration errors in percent) of the runs, by train size, system and task."""
    frames = {(row.train_size, row.system.name, row.task): row.frame for row in rows}
    if measure == "score":
        return frames
    found = {}
    for row in rows:
        runs = row.predictions()
        if all("logits" in run for run in runs):
            errors = [100 * calibration(run["logits"], run["labels"])["ece"] for run in runs]
            found[row.train_size, row.system.name, row.task] = row.frame.assign(score=errors)
    return found


def average_frame(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Returns the mean over tasks of each pretraining, draw and seed that all tasks have."""
    together = pd.concat(frames).groupby(["pretraining", "draw", "seed"])["score"].agg(["mean", "count"])
    return together[together["count"] == len(frames)]["mean"].rename("score").reset_index()


def difference(a: pd.DataFrame, b: pd.DataFrame, fixed: bool) -> Comparison:
    """Returns the comparison of A with B.

    Args:
        a: Runs of A.
        b: Runs of B.
        fixed: B is one given model, not one pretraining of many: it stands beside each pretraining of A.
    """
    if fixed:
        b = pd.concat([b.assign(pretraining=one) for one in a["pretraining"].unique()])
    return compare(a, b)


def claim_tests(rows: Sequence[SystemResult], by_task: bool) -> list[Tested]:
    """Returns the tests of all claims, corrected together, on the average over tasks or on each task.

    An average is over the tasks that both systems have finished.
    """
    tests = []
    for claim in CLAIMS:
        frames = frames_of(rows, claim.measure)
        for size in dict.fromkeys(row.train_size for row in rows):
            names = [task for place, system, task in frames if (place, system) == (size, claim.a)]
            shared = [task for task in names if (size, claim.b, task) in frames]
            pairs = {task: [frames[size, system, task] for system in (claim.a, claim.b)] for task in shared}
            if not by_task and shared:
                pairs = {"": [average_frame(side) for side in zip(*pairs.values(), strict=True)]}
            for task, (a, b) in pairs.items():
                if not a.empty and not b.empty:
                    found = difference(a, b, fixed=claim.b.startswith(f"{BASE} "))
                    tests.append(Tested(claim, size, task, found))
    corrected = holm([one.found.p for one in tests])
    return [replace(one, corrected=p) for one, p in zip(tests, corrected, strict=True)]


def claims_table(tests: Sequence[Tested]) -> Table:
    """Returns a row for each claim and train size, on the average over tasks."""
    lines = [
        {
            "claim": one.claim.text, "A": one.claim.a, "B": one.claim.b, "train rows": one.size,
            "A - B": f"{one.found.difference:+.2f}", "95 % interval": f"{number(one.found.low)} to {number(one.found.high)}",
            "p": p_text(one.found.p), "p, corrected": p_text(one.corrected), "units": one.found.units,
            "verdict": one.verdict,
        }
        for one in tests
    ]  # fmt: skip
    return Table("Claims", pd.DataFrame(lines))


def tasks_table(tests: Sequence[Tested]) -> Table:
    """Returns the differences A - B of each claim by task; * where the corrected p is below 0.05."""
    lines: dict[tuple[Claim, str], dict[str, str]] = {}
    for one in tests:
        line = lines.setdefault((one.claim, one.size), {"A": one.claim.a, "B": one.claim.b, "measure": one.claim.measure,
                                                        "train rows": one.size})  # fmt: skip
        line[one.task] = f"{one.found.difference:+.2f}" + (" *" if one.verdict != "not seen" else "")
    return Table("Tasks", pd.DataFrame(list(lines.values())).fillna("-"))


def ensemble_table(rows: Sequence[SystemResult]) -> Table:
    """Returns score and calibration of single runs and of their ensembles, in one pretraining and draw."""
    lines = []
    for row in rows:
        line = {"task": row.task, "system": row.system.name, "metric": row.metric, "runs": str(len(row.records))}
        line["score"] = number(row.estimate.mean)
        values = [calibration(run["logits"], run["labels"]) for run in row.predictions() if "logits" in run]
        for name, title, scale in (("ece", "ECE", 100), ("nll", "NLL", 1)):
            line[title] = number(scale * float(np.mean([one[name] for one in values])) if values else math.nan)
        lines.append(line)
    return Table("Ensembles", pd.DataFrame(lines))


def disagreement_table(analysis: Mapping[str, Any]) -> Table:
    """Returns how well the disagreement of facets matches that of runs, from finetune/analyze.py."""
    lines = [
        {"task": label.partition("-")[0], "runs of": system, "runs": f"{found['members']:g}", "rows": f"{found['rows']:g}",
         "overlap": number(found["overlap"]), "by chance": number(found["chance"]), "Spearman": number(found["spearman"])}
        for label, entry in analysis.items() for system, found in entry.get("disagreement", {}).items()
    ]  # fmt: skip
    return Table("Disagreement", pd.DataFrame(lines))


def cost_table(rows: Sequence[SystemResult]) -> Table:
    """Returns seconds and peak memory of a fine-tuning run by system and train size."""
    places: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        places.setdefault((row.system.name, row.train_size), []).extend(row.records)
    lines = [{"system": system, "train rows": size, "runs": str(len(records)),
              "seconds, mean": number(float(np.mean([record["seconds"] for record in records]))),
              "peak memory, GB": number(max(record.get("peak_memory_gb", math.nan) for record in records))}
             for (system, size), records in places.items()]  # fmt: skip
    return Table("Costs", pd.DataFrame(lines))


def draw_curves(folder: Path, plan: Plan, path: Path) -> None:
    """Draws the losses on validation over the tokens seen, the mean over seeds, a line for each arm."""
    panels = {"loss/mlm": "masked-LM loss on held-out text", "acc/mcqt": "accuracy of quick thoughts on held-out text"}
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axis, (key, title) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for index, arm in enumerate(ARMS):
            curves: dict[int, list[float]] = {}
            for (name, _), run in run_folders(folder, plan).items():
                for record in read_jsonl(run / "metrics.jsonl") if name == arm else ():
                    if record["split"] == "validation" and key in record and (arm != "mlm" or key == "loss/mlm"):
                        curves.setdefault(record["step"], []).append(record[key])
            if curves:
                steps = sorted(curves)
                tokens = [step / steps[-1] * plan.pretraining.tokens / 1e6 for step in steps]
                axis.plot(
                    tokens, [np.mean(curves[step]) for step in steps], **_style(index), label=arm, fillstyle="none"
                )
        axis.set(xlabel="million tokens of text", title=title)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    _save(figure, path)


def _style(index: int) -> dict[str, Any]:
    return {"color": figures.COLORS[index % len(figures.COLORS)], "linestyle": figures.LINES[index % len(figures.LINES)],
            "marker": figures.MARKERS[index % len(figures.MARKERS)], "linewidth": 1.2, "markersize": 5}  # fmt: skip


def draw_scores(rows: Sequence[SystemResult], plan: Plan, path: Path) -> None:
    """Draws the average score over tasks of each system with its 95 % interval; hatches tell the heads apart."""
    sizes, frames = list(dict.fromkeys(row.train_size for row in rows)), frames_of(rows, "score")
    tasks = {task for _, _, task in frames}
    systems = list(dict.fromkeys(row.system.name for row in sorted(rows, key=lambda row: _place(row.system.name))))
    heads = list(dict.fromkeys(name.partition(" ")[2] for name in systems))
    figure = Figure(figsize=(9, 0.8 + 0.27 * len(systems)), layout="constrained")
    for axis, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        lows = []
        for place, name in enumerate(systems):
            own = [frames[size, name, task] for task in sorted(tasks) if (size, name, task) in frames]
            if len(own) < len(tasks) or (average := average_frame(own)).empty:
                continue
            found, head = estimate(average), heads.index(name.partition(" ")[2])
            shades = {"color": str(1 - 0.2 * (head % 4)), "hatch": figures.HATCHES[head % len(figures.HATCHES)]}
            axis.barh(place, found.mean, edgecolor="black", linewidth=0.6, **shades)
            axis.plot([found.low, found.high], [place] * 2, color="black", linewidth=1.6)
            axis.plot(found.mean, place, figures.MARKERS[head], color="black", markersize=4)
            lows += [found.mean] if math.isnan(found.low) else [max(found.low, found.mean - 15)]
        axis.set(yticks=range(len(systems)), yticklabels=systems, xlabel=f"mean over {len(tasks)} tasks, %")
        axis.set(
            title=f"{size} train rows",
            xlim=(max(0.0, min(lows, default=0.0) - 2), None),
            ylim=(len(systems) - 0.4, -0.6),
        )
        axis.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _place(system: str) -> int:
    return [BASE, *ARMS].index(system.partition(" ")[0])


def _save(figure: Figure, path: Path) -> None:
    """Writes an SVG on white, which any page can show; the same figure gives the same bytes."""
    with matplotlib.rc_context(figures.SVG | {"svg.hashsalt": path.stem}), atomic_write(path) as file:
        figure.savefig(file, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
