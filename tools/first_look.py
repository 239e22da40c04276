"""Shows what a pretraining run has changed: its verdict, and a picture of the way there.

python tools/first_look.py runs/sample

The verdict is that of the run's log and of the model card: next-passage recall on held-out documents, or labelled rows
if the run had some, against the original model's own embedding. The picture, RUN/first_look.png, has the losses on
held-out text and the difference to the original model at each validation. To judge by other labelled rows, take
finetune/compare.py.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import pandas as pd
from pydantic import Field
from pydantic_settings import CliPositionalArg

from multicls.console import print_summary, print_verdict
from multicls.errors import UserError, run_command
from multicls.files import read_jsonl
from multicls.settings import Settings, parse

LOSSES = {"loss/mlm": "MLM", "loss/tfidf": "TF-IDF", "loss/mcqt": "MCQT"}


class Options(Settings):
    """Options of the command."""

    run: CliPositionalArg[Path] = Field(description="finished run folder of pretrain/run.py")


def draw(path: Path, found: Any, records: Sequence[dict[str, Any]]) -> None:
    """Draws the losses on held-out text, and each embedding's difference with its interval."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    table = pd.DataFrame(records).set_index("step")
    losses = table[[name for name in LOSSES if name in table]].rename(columns=LOSSES)
    shares = 100 * losses / losses.iloc[0]
    shares.plot(
        ax=left, marker="o", ylabel="% of the loss at step 0", title="Losses on held-out text"
    )
    for name in found.changes:
        key = f"probe/{name}_change"
        curve = 100 * table[[key]].dropna()
        (line,) = right.plot(curve.index, curve[key], marker="o", label=name)
        if f"{key}_low" in table:
            ends = (100 * table.loc[curve.index, f"{key}_{end}"] for end in ("low", "high"))
            right.fill_between(curve.index, *ends, color=line.get_color(), alpha=0.15)
    right.axhline(0, color="gray", linestyle="--")
    right.set(xlabel="step", ylabel="points", title="Difference to the original model, 95 %")
    right.legend()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the verdict and draws the picture."""
    options = parse(Options, argv, prog="tools/first_look.py", doc=__doc__)
    from pretrain.folder import RunFolder  # after --help
    from pretrain.verdict import read_verdict

    folder = RunFolder(options.run)
    if not folder.done.exists():
        raise UserError(f"{options.run}: not a finished run; train it with pretrain/run.py first.")
    found = read_verdict(folder)
    if found is None:
        command = "compare models on labelled rows by finetune/compare.py"
        raise UserError(f"{options.run}: the run has no score, and its log says why; {command}.")
    print_verdict(found.lines())
    records = [r for r in read_jsonl(folder.metrics) if r["split"] == "validation"]
    draw(options.run / "first_look.png", found, records)
    print_summary([("picture", options.run / "first_look.png")])
    return 0


if __name__ == "__main__":
    run_command(main)
