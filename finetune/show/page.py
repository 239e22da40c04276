"""The report of a results folder: sentences, tables and pictures, as Markdown and as one HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from finetune.show import figures, summary, tables
from finetune.show.figures import Picture
from finetune.show.tables import Table
from finetune.stats.pairs import add_examples, compare_pairs, find_system, pairs_to_show
from finetune.stats.systems import Results
from multicls.console import table_console

TEMPLATE = Path(__file__).with_name("page.html.jinja")
MOST_WARNINGS = 4  # on the console


@dataclass(frozen=True)
class Report:
    """The contents of a report on a results folder, the most important first."""

    title: str
    headline: list[str]  # which systems lead, and what the tests support
    warnings: list[str]  # what to know before the numbers
    sections: list[Table | Picture]

    def markdown(self) -> str:
        """Returns the sentences and tables as Markdown."""
        parts = [f"# {self.title}\n", *(f"{text}\n" for text in self.headline)]
        parts += ["".join(f"- {text}\n" for text in self.warnings)] if self.warnings else []
        parts += [tables.markdown(section) for section in self.sections if isinstance(section, Table)]
        return "\n".join(parts)

    def print(self, comparisons: bool = False) -> None:
        """Prints the sentences and the systems side by side within 120 columns, with their comparisons if asked."""
        console = table_console()
        console.print(self.title, style="bold")
        for text in [*self.headline, *(f"- {text}" for text in self.warnings[:MOST_WARNINGS])]:
            console.print(text)
        if len(self.warnings) > MOST_WARNINGS:
            console.print(f"- {len(self.warnings) - MOST_WARNINGS} more such notes are in the files below.")
        for section in self.sections:
            if isinstance(section, Table) and section.title.startswith(tables.SIDE_BY_SIDE):
                tables.print_table(console, section)
            elif isinstance(section, Table) and section.title.startswith(tables.COMPARISONS) and comparisons:
                tables.print_table(console, tables.short_comparisons(section))

    def html(self) -> str:
        """Returns one page that needs no other file and no script."""
        source = TEMPLATE.read_text(encoding="utf-8")
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(source).render(report=self, is_table=lambda section: isinstance(section, Table))


def build_report(
    results: Results, folder: Path, compare: tuple[str, str] | None = None, pictures: bool = True
) -> Report:
    """Returns the report of a results folder.

    Args:
        results: Rows of the folder, of which there is at least one.
        compare: Names of two systems that alone are compared; default: all pairs.
        pictures: False leaves out what only the page shows.
    """
    rows = results.rows
    if compare:
        names = [row.system.title for row in rows]
        compare = find_system(compare[0], names), find_system(compare[1], names)
    about = [row for row in rows if not compare or row.system.title in compare]
    tests = compare_pairs(rows, compare)
    shown = pairs_to_show(tests, rows)
    if len(shown) == len(tests):
        shown = list(add_examples(shown))
    problems = [f"Without calibration and bootstrap: {row.system.title} on {row.task}: {row.loaded[1]}"
                for row in rows if row.loaded[1]]  # fmt: skip
    problems += [f"Not compared on {test.a.task}, {test.a.train_size} train rows: {test.a.system.title} and "
                 f"{test.b.system.title}: {test.problem}" for test in shown if test.problem]  # fmt: skip
    sections: list[Table | Picture] = [
        *(tables.side_by_side(rows, size) for size in dict.fromkeys(row.train_size for row in rows)),
        tables.comparison_table(shown, sum(test.comparison is not None for test in tests)),
        *(figures.strip_plots(rows) if pictures else []),
        tables.results_table(rows),
        tables.macro_table(rows),
        tables.scored_test_sets(rows),
        tables.candidates_table(rows),
        tables.calibration_table(rows),
        *(figures.reliability_diagrams(rows) if pictures else []),
    ]
    kept = [section for section in sections if isinstance(section, Picture) or not section.frame.empty]
    return Report(
        f"Fine-tuning results: {folder.name}",
        summary.headline(about, tests, by_selection=not compare),
        summary.warnings(results) + problems,
        kept,
    )
