"""Analyses a run with a saved model: how isotropic its embedding is, which layers count, how alike the facets are.

python finetune/analyze.py results/k5-isobn/mrpc-full/p1-d1-s1

Shape legend: N examples, D dimensions, K facets.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

import numpy as np
from pydantic import Field
from pydantic_settings import CliPositionalArg

from finetune.settings import RunSettings, flatten
from finetune.tasks import Array
from multicls.console import print_summary
from multicls.errors import UserError, run_command
from multicls.files import write_json
from multicls.settings import Settings, load_settings, parse

if TYPE_CHECKING:
    from finetune.encoding import Encoded
    from finetune.heads.modeling_task import TaskModel


class AnalyzeOptions(Settings):
    """Options of the command."""

    run: CliPositionalArg[str] = Field(description="run folder with a saved model")
    examples: int = Field(1000, ge=20, description="dev rows to read")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(AnalyzeOptions, argv, prog="finetune/analyze.py", doc=__doc__)
    folder = Path(options.run)
    numbers, output = analyze_run(folder, options.examples), folder / "analysis.json"
    write_json(output, numbers)
    print_summary((key, np.round(value, 3).tolist()) for key, value in flatten(numbers).items())
    print_summary([("numbers", output)])
    return 0


def analyze_run(folder: Path, examples: int) -> dict[str, Any]:
    """Returns the numbers of a run before and after its training, from `examples` dev rows of its first task."""
    before, after, rows = load_models(folder, examples)
    states = {"before": read_states(before, rows), "after": read_states(after, rows)}
    variance = {name: explained_variance(arrays["pooled"]) for name, arrays in states.items()}
    variance["before, IsoBN"] = explained_variance(by_isobn(states["before"]["pooled"]))
    numbers: dict[str, Any] = {"rows": len(rows), "EV1, EV2, EV3": variance}
    if states["after"]["layers"].size:
        numbers["layers"] = states["after"]["layers"].mean(axis=0).tolist()
    if states["after"]["facets"].shape[1] > 1:
        numbers["facets, mean cosine"] = {n: mean_cosine(of["facets"]) for n, of in states.items()}
    return numbers


def load_models(folder: Path, examples: int) -> tuple["TaskModel", "TaskModel", "Encoded"]:
    """Returns the model that a run started from, its saved one, and at most `examples` dev rows of its first task."""
    from finetune.encoding import Encoded
    from finetune.heads.build import build_model, load_fine_tuned
    from finetune.run import load_tasks
    from finetune.subsets import draw_rows

    if not (folder / "model").is_dir():
        raise UserError(f"{folder}: no run with a saved model; make one with --save_model.")
    settings = load_settings(RunSettings, [folder / "settings.yaml"])
    data = load_tasks(settings)
    before, _ = build_model(settings, [part.task for part in data])
    after, tokenizer = load_fine_tuned(str(folder / "model"))
    dev = data[0].dev
    drawn = [dev[row] for row in draw_rows(len(dev), examples, 1)]
    return before, after, Encoded(data[0].task, drawn, tokenizer)


def by_isobn(raw_ND: Array) -> Array:
    """Returns the embeddings after IsoBN with the statistics of all rows and beta 1."""
    import torch

    from finetune.heads.isobn import IsotropicBatchNorm

    iso_bn = IsotropicBatchNorm(raw_ND.shape[1], momentum=1.0, beta=1.0)
    return np.asarray(iso_bn(torch.from_numpy(raw_ND)).numpy())


def read_states(model: "TaskModel", rows: "Encoded") -> dict[str, Array]:
    """Returns the model's states for N rows (sequences of choice tasks), without dropout, in float32.

    "pooled", what the classifier reads (N, E), without the means over spans; "facets", their last hidden states
    (N, K, D); "layers", the weights (N, layers + 1) of the head HIRE, of others (N, 0).
    """
    import torch

    from finetune.training import predict_rows

    width, size = model.head.width, model.encoder.config.hidden_size
    number = getattr(model.encoder.config, "num_facets", 0)

    def read(output: Any) -> torch.Tensor:
        facets = output.hidden_states[-1][:, 1 : 1 + number].flatten(1)
        layers = output.features[:, :0] if output.layer_weights is None else output.layer_weights
        return torch.cat([output.features[:, :width], facets, layers], dim=1)

    table = predict_rows(model, rows, 0, "fp32", 32, read, output_hidden_states=True)
    table = table.reshape(len(rows) * rows.sequences_per_row, -1)
    pooled, facets, layers = np.split(table, [width, width + number * size], axis=1)
    return {"pooled": pooled, "facets": facets.reshape(len(table), number, size), "layers": layers}


def explained_variance(embeddings_ND: Array) -> list[float]:
    """Returns EV_1 to EV_3, the share of the variance of the k largest principal components (IsoBN, Eq. 9)."""
    values = np.linalg.svd(embeddings_ND - embeddings_ND.mean(axis=0), compute_uv=False) ** 2
    return [float(share) for share in values[:3].cumsum() / values.sum()]


def mean_cosine(facets_NKD: Array) -> float:
    """Returns the mean cosine between two facets of an example: of K unit vectors (|sum|^2 - K) / (K^2 - K)."""
    unit_NKD = facets_NKD / np.linalg.norm(facets_NKD, axis=-1, keepdims=True)
    number = facets_NKD.shape[1]
    return float(((unit_NKD.sum(axis=1) ** 2).sum(axis=-1).mean() - number) / (number**2 - number))


if __name__ == "__main__":
    run_command(main)
