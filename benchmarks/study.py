"""The study: do facets help? Pretrains each arm of benchmarks/study.yaml, fine-tunes all, and tests its questions.

python benchmarks/study.py --corpus CORPUS --data_dir DIR --output_dir runs/study --jobs 2

It runs the product's own commands, which skip what is finished: the same command resumes a stopped study. The answers
go to STUDY/study.md; STUDY/results/report.md has scores, calibration and costs. docs/study.md says what it showed once.
"""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import pandas as pd
import yaml
from pydantic import Field

from benchmarks.harness import Report
from finetune.estimates import Comparison, choose_candidates, compare, holm
from finetune.results import load_results
from multicls.errors import UserError, run_command
from multicls.files import REPOSITORY, atomic_write
from multicls.settings import Settings, parse


class Options(Settings):
    """Options of the study."""

    corpus: str = Field(description="corpus folder, made with the model's tokenizer")
    data_dir: str | None = Field(None, description="folder of the tasks; default: the Hub")
    output_dir: str = Field("runs/study", description="folder of the study")
    jobs: int = Field(1, ge=1, description="fine-tuning processes side by side")


def run(script: str, *words: object) -> None:
    """Runs a command of the project.

    Raises:
        UserError: It failed.
    """
    command = [sys.executable, str(REPOSITORY / script), *map(str, words)]
    print(f"$ {shlex.join(command[1:])}", flush=True)
    if code := subprocess.run(command, check=False).returncode:
        raise UserError(f"{script} ended with exit code {code}; the same command resumes.")


def pretrain(plan: Mapping[str, Any], options: Options) -> list[str]:
    """Pretrains each arm with each seed; returns the models as flags of finetune/grid.py."""
    models = ["--model", f"base={plan['model']}"]
    for seed in plan["seeds"]:
        for arm, recipes in plan["arms"].items():
            folder = Path(options.output_dir) / f"{arm}-{seed}"
            settings = plan["pretraining"] | {"train.seed": seed, "run.output_dir": folder}
            settings |= {"model.checkpoint": plan["model"], "data.corpus": options.corpus}
            flags = [f"--{name}={value}" for name, value in settings.items()]
            run("pretrain/run.py", "--recipe", "base", *recipes, *flags)
            models += ["--model", f"{arm}={folder / 'hf'}"]
    return models


def add_answers(report: Report, runs: pd.DataFrame, questions: Mapping[str, list[str]]) -> None:
    """Adds the table of questions for each size: difference, interval, and p-value corrected for all of them."""
    from finetune.report_tables import average_groups, make_groups

    keys, tests = list[tuple[str, str]](), list[Comparison]()
    for size, of_size in average_groups(make_groups(runs)).groupby("train_size"):
        systems = dict(zip(of_size["system"], of_size["estimate"], strict=True))
        for question, (first, second) in questions.items():
            keys.append((str(size), question))
            tests.append(compare(systems[first], systems[second]))
    corrected, rows = holm([test.p for test in tests]), []
    for key, test, p in zip(keys, tests, corrected, strict=True):
        low, high, difference = (100 * value for value in (*test.interval(), test.mean))
        rows.append([*key, f"{difference:+.2f}", f"{low:+.2f} to {high:+.2f}", f"{p:.3f}"])
    columns = ["train size", "question", "difference", "95 % interval", "corrected p"]
    report.table("Answers", columns, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs or resumes the study and writes its tables."""
    options = parse(Options, argv, prog="benchmarks/study.py", doc=__doc__)
    plan = yaml.safe_load((REPOSITORY / "benchmarks" / "study.yaml").read_text("utf-8"))
    output = Path(options.output_dir)
    models = pretrain(plan, options)
    recipe, results = output / "grid.yaml", output / "results"
    with atomic_write(recipe) as file:
        yaml.safe_dump(plan["grid"], file)
    data = ["--data_dir", options.data_dir] if options.data_dir else []
    flags = [*models, *data, "--output_dir", results, "--jobs", options.jobs]
    run("finetune/grid.py", "--recipe", recipe, *flags)
    run("finetune/report.py", results)
    runs, report = choose_candidates(load_results(results)), Report("The study")
    add_answers(report, runs, plan["questions"])
    report.write(output)
    return 0


if __name__ == "__main__":
    run_command(main)
