"""Analyses runs with a saved model: how isotropic the embedding is, which layers count, how alike the facets are.

python finetune/analyze.py results/k5-isobn/mrpc-full/p1-d1-s1
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

import numpy as np
from pydantic import Field
from pydantic_settings import CliPositionalArg

from finetune.settings import RunSettings
from multicls.console import print_line, print_summary
from multicls.errors import UserError, run_command
from multicls.files import read_json, write_json
from multicls.settings import Settings, load_settings, parse

if TYPE_CHECKING:
    from finetune.encoding import Encoded
    from finetune.heads.modeling_task import TaskModel
    from finetune.isotropy import Array
    from finetune.tasks import Task

SHOWN_ROWS = 40  # of the heat map of layers


class AnalyzeOptions(Settings):
    """Options of the command."""

    runs: CliPositionalArg[list[str]] = Field(
        min_length=1, description="folders of runs made with --save_model"
    )
    output: str = Field("analysis", description="folder for PNG and analysis.json")
    examples: int = Field(1000, ge=20, description="training rows to read")


@dataclass(frozen=True)
class LoadedRun:
    """A run's model before and after fine-tuning, and training rows of its first task."""

    label: str  # in figures and files
    task: Task
    models: dict[str, TaskModel]  # "before" and "after"
    rows: Encoded


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(AnalyzeOptions, argv, prog="finetune/analyze.py", doc=__doc__)
    output, numbers = Path(options.output), dict[str, dict[str, Any]]()
    for name in options.runs:
        run = load_run(Path(name).resolve(), options.examples)
        if run.label in numbers:
            raise UserError(f"{name}: a run of this name, {run.label}, is given twice.")
        print_line(f"{run.label}: {name}")
        output.mkdir(parents=True, exist_ok=True)
        numbers[run.label] = analyze_run(run, output)
    write_json(output / "analysis.json", numbers)
    print_summary([("figures", output / "*.png"), ("numbers", output / "analysis.json")])
    return 0


def load_run(folder: Path, examples: int) -> LoadedRun:
    """Loads the saved model of a run and training rows of its task, and builds the model that it started from.

    Raises:
        UserError: There is no saved model, or the rows cannot be analysed.
    """
    from finetune.encoding import Encoded
    from finetune.heads.build import build_model, find_checkpoint, load_fine_tuned
    from finetune.run import load_tasks
    from finetune.subsets import draw_rows

    if not (folder / "model").is_dir() or not (folder / "record.json").exists():
        raise UserError(f"{folder}: no run with a saved model; make one with run.py --save_model.")
    record = read_json(folder / "record.json")
    settings = load_settings(RunSettings, [folder / "settings.yaml"])
    data = load_tasks(settings)
    task, train = data[0].task, data[0].train
    rows = [train[index] for index in draw_rows(len(train), examples, 1)]
    checkpoint = find_checkpoint(settings.model)
    before = build_model(settings, checkpoint, [part.task for part in data])
    after, tokenizer = load_fine_tuned(str(folder / "model"))
    models = {"before": before, "after": after}
    encoded = Encoded(task, rows, tokenizer, settings.max_length or task.max_length)
    return LoadedRun(f"{task.name}-{record['system']}-{folder.name}", task, models, encoded)


def analyze_run(run: LoadedRun, output: Path) -> dict[str, Any]:
    """Draws the figures of one run; returns its entry of analysis.json."""
    from finetune import figures, isotropy

    states = {name: read_states(model, run.rows) for name, model in run.models.items()}
    pooled, facets, layers = (
        {name: arrays[kind] for name, arrays in states.items()}
        for kind in ("pooled", "facets", "layers")
    )
    numbers = {"rows": len(run.rows)} | isotropy_of(run, pooled, output)
    if layers["after"].size:  # HIRE
        importance = layers["after"][:: max(1, run.task.num_choices)]  # of the first choice
        figures.layers(output / f"layers-{run.label}.png", run.label, importance[:SHOWN_ROWS])
        numbers["layers"] = importance.mean(axis=0).tolist()
    if facets["after"].shape[1] > 1:
        cosines = {name: isotropy.facet_similarity(h) for name, h in facets.items()}
        means = {name: isotropy.off_diagonal_mean(matrix) for name, matrix in cosines.items()}
        numbers["facets, mean cosine"] = means
        numbers["facets, cosines"] = {name: m.tolist() for name, m in cosines.items()}
    return numbers


def read_states(model: TaskModel, rows: Encoded) -> dict[str, Array]:
    """Returns the model's states for N rows (sequences of choice tasks), without dropout, in float32.

    Returns:
        "pooled", what the classifier reads (N, E); "facets", their last hidden states (N, K, D); "layers", HIRE's
        weights (N, layers + 1), or (N, 0).
    """
    import torch

    from finetune.training import find_device

    device, _ = find_device()
    model.eval().to(device)
    num_facets = getattr(model.encoder.config, "num_facets", 0)
    parts: dict[str, list[torch.Tensor]] = defaultdict(list)
    with torch.inference_mode():
        for start in range(0, len(rows), 32):
            numbers = range(start, min(start + 32, len(rows)))
            batch = {name: tensor.to(device) for name, tensor in rows.batch(numbers).items()}
            del batch["labels"]
            output = model(**batch, output_hidden_states=True)
            layers = output.layer_weights
            pooled = output.features[:, : model.head.width]  # without the spans
            parts["pooled"].append(pooled)
            parts["facets"].append(output.hidden_states[-1][:, 1 : 1 + num_facets])
            parts["layers"].append(pooled[:, :0] if layers is None else layers)
    return {name: torch.cat(values).float().cpu().numpy() for name, values in parts.items()}


def isotropy_of(run: LoadedRun, pooled: Mapping[str, Array], output: Path) -> dict[str, Any]:
    """Draws and returns the figures and numbers of the IsoBN paper for the embeddings (N, E) before and after."""
    import torch

    from finetune import figures, isotropy
    from finetune.heads.isobn import IsotropicBatchNorm

    raw, model = pooled["before"], run.models["after"]
    iso_bn = IsotropicBatchNorm(raw.shape[1], momentum=1.0, beta=1.0)  # over all rows at once
    normed = {
        "before, batch norm": raw / np.maximum(raw.std(axis=0), 1e-8),
        "before, IsoBN": iso_bn(torch.from_numpy(raw)).numpy(),
    }
    variance = {name: isotropy.explained_variance(h) for name, h in {**pooled, **normed}.items()}
    stds = {name: h.std(axis=0) for name, h in pooled.items()}
    correlations = {name: isotropy.correlation(h) for name, h in pooled.items()}
    weight = model.get_parameter("classifiers.0.weight").detach().cpu().numpy()
    shares = isotropy.logit_variance(pooled["after"], weight[:, : model.head.width])  # no spans
    path = output / f"isotropy-{run.label}.png"
    figures.isotropy(path, run.label, variance, stds, correlations)
    mean = {name: isotropy.off_diagonal_mean(matrix) for name, matrix in correlations.items()}
    return {
        "EV1, EV2, EV3": {name: values[:3].tolist() for name, values in variance.items()},
        "std min, median, max": {n: np.quantile(s, (0, 0.5, 1)).tolist() for n, s in stds.items()},
        "mean |Pearson|": mean,
        "logit variance of top 1, 5, 30": [float(shares[:k].sum()) for k in (1, 5, 30)],
    }


if __name__ == "__main__":
    run_command(main)
