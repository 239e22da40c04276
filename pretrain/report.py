"""Prints the last values of pretraining runs side by side. TensorBoard shows their curves.

python pretrain/report.py runs/base runs/k1 --markdown report.md
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not pretrain/, whose names must not hide packages

from pydantic import Field

from multicls.command_line import CommandLine, print_summary
from multicls.console import table_console
from multicls.errors import UserError, did_you_mean, run_command
from multicls.files import atomic_write, read_jsonl
from multicls.settings import Settings
from pretrain.card import LEAST_VARIANCE, with_least_variance
from pretrain.run_folder import DONE

METRICS = "metrics.jsonl"
COLUMNS: dict[str, tuple[str, str]] = {  # heading -> key of the last validation, format
    "loss": ("loss/total", "{:.3f}"),
    "MLM": ("loss/mlm", "{:.3f}"),
    "TF-IDF": ("loss/tfidf", "{:.3f}"),
    "SO": ("loss/so", "{:.3f}"),
    "MCQT": ("loss/mcqt", "{:.3f}"),
    "MLM acc": ("acc/mlm", "{:.3f}"),
    "TF-IDF R²": ("r2/tfidf", "{:.3f}"),
    "SO acc": ("acc/so", "{:.3f}"),
    "MCQT acc": ("acc/mcqt", "{:.3f}"),
    "facet cosine": ("facets/mean_cosine", "{:.3f}"),
    "facet variance": (LEAST_VARIANCE, "{:.4f}"),
}
NOTE = (
    "Losses, accuracies and facets are those of the last validation. Facet variance is that of the facet that varies "
    "least, the time of a step is the median, and tokens leave out padding. Losses compare only between runs with the "
    "same objectives, weights and numbers of candidates."
)
Cells = dict[str, str]  # heading -> cell of one run


class ReportOptions(Settings):
    """Options of the command."""

    runs: list[str] = Field(min_length=1, description="run folders; an unfinished run is shown as far as it is")
    markdown: str | None = Field(None, title="FILE", description="write the table to this file as well")


COMMAND = CommandLine("pretrain/report.py", __doc__, ReportOptions, positional=("runs",))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    args = COMMAND.parse(argv)
    runs = read_runs(args.runs)
    print_table(runs)
    made = []
    if args.markdown:
        with atomic_write(args.markdown) as file:
            file.write(table(runs))
        made.append(("table", args.markdown))
    curves = ",".join(f"{Path(path).name}:{path}/tb" for path in args.runs)
    print_summary([*made, ("curves", f"tensorboard --logdir_spec {curves}")])


def read_runs(paths: Sequence[str]) -> list[Cells]:
    """Returns each run's last validation, median time of a step and tokens seen.

    Runs are named by their folders, or by their paths where two folders have the same name.

    Raises:
        UserError: Folders that hold no run, or no run has measured anything.
    """
    folders = [Path(path) for path in dict.fromkeys(paths)]
    if problems := [_no_run(folder) for folder in folders if not (folder / METRICS).is_file()]:
        raise UserError(*problems)
    records = [read_jsonl(folder / METRICS) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    names = [name if names.count(name) == 1 else str(folder) for folder, name in zip(folders, names, strict=True)]
    if not any(records):
        raise UserError(f"{', '.join(names)}: nothing measured yet; try again after the first step.")
    return [_cells(*run) for run in zip(folders, names, records, strict=True)]


def _no_run(folder: Path) -> str:
    """Returns the message for a folder that holds no run, with the nearest runs in, above and beside it."""
    inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    near = [
        *folder.parents,
        *(path.parent for place in (folder.parent, Path("runs")) for path in place.glob(f"*/{METRICS}")),
    ]
    known = {str(path) for path in near if (path / METRICS).is_file()}
    hint = f" Runs in it: {', '.join(inside)}." if inside else did_you_mean(str(folder), known)
    return f"{folder}: no run there (it has no {METRICS}).{hint}"


def _cells(folder: Path, name: str, records: Sequence[Mapping[str, Any]]) -> Cells:
    import yaml

    train, validation = ([one for one in records if one["split"] == split] for split in ("train", "validation"))
    last = with_least_variance(validation[-1]) if validation else {}
    state, settings = str(max((record["step"] for record in records), default=0)), folder / "settings.yaml"
    if not (folder / DONE).exists():
        planned = yaml.safe_load(settings.read_text(encoding="utf-8"))["train"] if settings.is_file() else {}
        state += f" of {planned.get('steps') or '?'}"
    cells = {title: form.format(last[key]) if key in last else "-" for title, (key, form) in COLUMNS.items()}
    paces = [record["speed/seconds_per_step"] for record in train if "speed/seconds_per_step" in record]
    tokens = [record["data/tokens"] for record in train if "data/tokens" in record]
    cells["ms a step"] = f"{1000 * statistics.median(paces):.0f}" if paces else "-"
    return {"run": name, "steps": state, **cells, "tokens": _short(sum(tokens)) if tokens else "-"}


def table(runs: Sequence[Cells]) -> str:
    """Returns a Markdown table with one line for each run."""
    rows = [[cell.replace("|", r"\|") for cell in cells] for cells in (runs[0], *(run.values() for run in runs))]
    rows.insert(1, ["---"] * len(rows[0]))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows) + f"\n{NOTE}\n"


def print_table(runs: Sequence[Cells]) -> None:
    """Prints the table turned round, a column for each run, so that it fits a terminal."""
    from rich.box import SIMPLE
    from rich.table import Table

    (corner, *names), *lines = zip(runs[0], *(run.values() for run in runs), strict=True)
    grid = Table(corner, *names, box=SIMPLE)
    for line in lines:
        grid.add_row(*line)
    table_console().print(grid, NOTE, "", sep="\n")


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


if __name__ == "__main__":
    run_command(main)
