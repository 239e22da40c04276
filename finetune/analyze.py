"""Analyses runs with a saved model: how isotropic the embedding is, which layers count, where the facets disagree.

python finetune/analyze.py results/k5-isobn/mrpc-full/p1-d1-s1

Shape legend: N examples, D dimensions, C classes or rows of a classifier, K facets, M members of an ensemble.
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
from finetune.tasks import Array
from multicls.console import print_line, print_summary
from multicls.errors import UserError, run_command
from multicls.files import read_json, write_json
from multicls.settings import Settings, load_settings, parse

if TYPE_CHECKING:
    from finetune.encoding import Encoded
    from finetune.heads.modeling_task import TaskModel
    from finetune.tasks import Task

SHOWN_ROWS = 40  # of the heat map of layers
UNCERTAIN = 0.2  # share of the examples, those with the most disagreement (Multi-CLS BERT)


class AnalyzeOptions(Settings):
    """Options of the command."""

    runs: CliPositionalArg[list[str]] = Field(
        min_length=1, description="folders of runs made with --save_model"
    )
    output: str = Field("analysis", description="folder for PNG and analysis.json")
    examples: int = Field(1000, ge=20, description="training rows to read, and dev rows")


@dataclass(frozen=True)
class LoadedRun:
    """A run's model before and after fine-tuning, and rows of its first task."""

    label: str  # in figures and files
    task: Task
    models: dict[str, TaskModel]  # "before" and "after"
    train: Encoded
    dev: Encoded
    members: Array  # dev logits (M, N, C) of this run and of those that differ in the seed
    labels: Array  # of dev, (N,)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(AnalyzeOptions, argv, prog="finetune/analyze.py", doc=__doc__)
    output, numbers = Path(options.output), dict[str, dict[str, Any]]()
    for name in options.runs:
        run = load_run(Path(name).resolve(), options.examples)
        if run.label in numbers:
            raise UserError(f"{name}: a run of this name, {run.label}, is passed twice.")
        print_line(f"{run.label}: {name}")
        output.mkdir(parents=True, exist_ok=True)
        numbers[run.label] = analyze_run(run, output)
    write_json(output / "analysis.json", numbers)
    print_summary([("figures", output / "*.png"), ("numbers", output / "analysis.json")])
    return 0


def load_run(folder: Path, examples: int) -> LoadedRun:
    """Loads the saved model of a run and rows of its task, and builds the model that it started from.

    Raises:
        UserError: There is no saved model, or the rows cannot be analysed.
    """
    from finetune.encoding import Encoded
    from finetune.heads.build import build_model, find_checkpoint, load_fine_tuned
    from finetune.results import RECORD, load_predictions
    from finetune.run import load_tasks
    from finetune.subsets import draw_rows

    if not (folder / "model").is_dir() or not (folder / RECORD).exists():
        raise UserError(f"{folder}: no run with a saved model; make one with run.py --save_model.")
    record = read_json(folder / RECORD)
    settings = load_settings(RunSettings, [folder / "settings.yaml"])
    data = load_tasks(settings)
    task, checkpoint = data[0].task, find_checkpoint(settings.model)
    before = build_model(settings, checkpoint, [part.task for part in data])
    after, tokenizer = load_fine_tuned(str(folder / "model"))
    drawn = {"train": data[0].train, "dev": data[0].dev}
    indices = {name: draw_rows(len(rows), examples, 1) for name, rows in drawn.items()}
    length = settings.max_length or task.max_length
    rows = {
        name: Encoded(task, [drawn[name][index] for index in chosen], tokenizer, length)
        for name, chosen in indices.items()
    }
    alike = ("system", "train_size", "pretraining", "subset", "search", "data_sha256")
    others = {path.parent: read_json(path) for path in sorted(folder.parent.glob(f"*/{RECORD}"))}
    folders = [p for p, other in others.items() if all(other[n] == record[n] for n in alike)]
    dev = [load_predictions(path, task.name)["dev"] for path in folders]
    return LoadedRun(
        label=f"{task.name}-{record['system']}-{folder.name}",
        task=task,
        models={"before": before, "after": after},
        **rows,
        members=np.stack([member["logits"][indices["dev"]] for member in dev]),
        labels=dev[0]["labels"][indices["dev"]],
    )


def analyze_run(run: LoadedRun, output: Path) -> dict[str, Any]:
    """Draws the figures of one run; returns its entry of analysis.json."""
    states = {name: read_states(model, run.train) for name, model in run.models.items()}
    pooled, facets = (
        {name: arrays[kind] for name, arrays in states.items()} for kind in ("pooled", "facets")
    )
    numbers = {"rows": len(run.train)} | isotropy_of(run, pooled, output)
    if (layers := states["after"]["layers"]).size:  # HIRE
        importance = layers[:: max(1, run.task.num_choices)]  # of the first choice
        draw_layers(output / f"layers-{run.label}.png", run.label, importance[:SHOWN_ROWS])
        numbers["layers"] = importance.mean(axis=0).tolist()
    if facets["after"].shape[1] > 1:
        cosines = {name: facet_similarity(h) for name, h in facets.items()}
        means = {name: off_diagonal_mean(matrix) for name, matrix in cosines.items()}
        numbers["facets, mean cosine"] = means
        numbers["facets, cosines"] = {name: m.tolist() for name, m in cosines.items()}
    one_class = not (run.task.is_regression or run.task.multi_label)
    if one_class and states["after"]["facet_logits"].shape[1] > 1:  # heads of facets
        logits = read_states(run.models["after"], run.dev)["facet_logits"].swapaxes(0, 1)
        seeds = {"seeds": run.members} if len(run.members) > 1 else {}
        wrong = logits.mean(axis=0).argmax(axis=1) != run.labels
        numbers["disagreement"] = disagreement({"facets": logits, **seeds}, wrong)
    return numbers


def read_states(model: TaskModel, rows: Encoded) -> dict[str, Array]:
    """Returns the model's states for N rows (sequences of choice tasks), without dropout, in float32.

    Returns:
        "pooled", what the classifier reads (N, E); "facets", their last hidden states (N, K, D); "layers", HIRE's
        weights (N, layers + 1), or (N, 0); "facet_logits" (rows, K, C) of `facet_logits`, or (rows, 0).
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
            facets = output.hidden_states[-1][:, 1 : 1 + num_facets]
            parts["pooled"].append(pooled)
            parts["facets"].append(facets)
            parts["layers"].append(pooled[:, :0] if layers is None else layers)
            parts["facet_logits"].append(facet_logits(model, facets, output.logits))
    return {name: torch.cat(values).float().cpu().numpy() for name, values in parts.items()}


def facet_logits(model: TaskModel, facets_NKD: Any, logits_NC: Any) -> Any:
    """Returns the logits (N, K, C) that a model would have if all facets contributed what one does, W (K c_k) + b.

    Their mean over the facets is the model's logits. The head `multicls` is a sum of contributions c_k; other heads
    have no such logits: (N, 0).
    """
    from finetune.heads.pooling import MulticlsHead

    if not isinstance(model.head, MulticlsHead) or facets_NKD.shape[1] < 2:
        return logits_NC[:, :0]
    parts_NKD = model.head.dense(facets_NKD, centred=model.head.centred) + model.head.bias
    gaps_NKD = parts_NKD.shape[1] * parts_NKD - parts_NKD.sum(dim=1, keepdim=True)
    weight_CD = model.get_parameter("classifiers.0.weight")[:, : model.head.width]
    gaps_NKC = gaps_NKD @ weight_CD.T
    if choices := model.config.tasks[0]["num_choices"]:  # a sequence each, with one output
        gaps_NKC = gaps_NKC.squeeze(-1).unflatten(0, (-1, choices)).transpose(1, 2)
    return logits_NC[:, None] + gaps_NKC


def disagreement(outputs: Mapping[str, Array], wrong_N: Array) -> dict[str, Any]:
    """Returns how the disagreement among facets, and among seeds, relates to a run's errors and to each other.

    Disagreement is the variance of the members' probabilities, summed over classes: our reading of Multi-CLS BERT,
    which compares the 20 % of the examples with the most of it.

    Args:
        outputs: logits (M, N, C) by kind of member.
        wrong_N: True where the run's answer is wrong.
    """
    import pandas as pd
    from scipy.special import softmax

    variance = pd.DataFrame(
        {name: softmax(o, axis=-1).var(axis=0).sum(axis=-1) for name, o in outputs.items()}
    )
    most = variance.rank(ascending=False, method="first") <= np.ceil(UNCERTAIN * len(variance))
    numbers: dict[str, Any] = {
        "rows": len(wrong_N),
        "members": {name: len(logits) for name, logits in outputs.items()},
        "error rate": float(wrong_N.mean()),
        "error rate of the most uncertain": {n: float(wrong_N[most[n]].mean()) for n in most},
    }
    if len(outputs) > 1:
        numbers["overlap of the most uncertain"] = float(most.all(axis=1).sum() / most.sum().max())
        numbers["Spearman"] = float(variance.corr("spearman").iloc[0, 1])
    return numbers


def isotropy_of(run: LoadedRun, pooled: Mapping[str, Array], output: Path) -> dict[str, Any]:
    """Draws and returns IsoBN's figures and numbers (arXiv:2005.02178) of embeddings (N, D) before and after."""
    import torch

    from finetune.heads.isobn import IsotropicBatchNorm

    raw, model = pooled["before"], run.models["after"]
    iso_bn = IsotropicBatchNorm(raw.shape[1], momentum=1.0, beta=1.0)  # over all rows at once
    normed = {
        "before, batch norm": raw / np.maximum(raw.std(axis=0), 1e-8),
        "before, IsoBN": iso_bn(torch.from_numpy(raw)).numpy(),
    }
    variance = {name: explained_variance(h) for name, h in {**pooled, **normed}.items()}
    stds = {name: h.std(axis=0) for name, h in pooled.items()}
    with np.errstate(invalid="ignore"):  # a constant dimension correlates with none
        pearson = {n: np.abs(np.nan_to_num(np.corrcoef(h.T))) for n, h in pooled.items()}
    weight = model.get_parameter("classifiers.0.weight").detach().cpu().numpy()
    shares = logit_variance(pooled["after"], weight[:, : model.head.width])  # no spans
    draw_isotropy(output / f"isotropy-{run.label}.png", run.label, variance, stds)
    return {
        "EV1, EV2, EV3": {name: values[:3].tolist() for name, values in variance.items()},
        "std min, median, max": {n: np.quantile(s, (0, 0.5, 1)).tolist() for n, s in stds.items()},
        "mean |Pearson|": {name: off_diagonal_mean(matrix) for name, matrix in pearson.items()},
        "logit variance of top 1, 5, 30": [float(shares[:k].sum()) for k in (1, 5, 30)],
    }


def explained_variance(embeddings_ND: Array) -> Array:
    """Returns EV_1, EV_2, ... (Eq. 9), (min(N, D),): the share of the k largest squared singular values.

    They are those of the centred embeddings. All are nan if the embeddings are all the same.
    """
    squares = np.linalg.svd(_centred(embeddings_ND), compute_uv=False) ** 2
    with np.errstate(invalid="ignore"):
        return np.asarray(np.cumsum(squares) / squares.sum())


def logit_variance(embeddings_ND: Array, weight_CD: Array) -> Array:
    """Returns each principal component's share of the logits' variance, largest component first (Figure 3).

    Var_i = w_i (W^T v_i)^2 with the i-th eigenvalue and eigenvector of the embeddings' covariance; shares are averaged
    over classes. The mean of the class weights does not affect predictions, so it is subtracted first.
    """
    weight = weight_CD - weight_CD.mean(axis=0) if len(weight_CD) > 1 else weight_CD
    _, singular, directions = np.linalg.svd(_centred(embeddings_ND), full_matrices=False)
    variance = singular**2 * (weight @ directions.T) ** 2
    total = np.maximum(variance.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    return np.asarray((variance / total).mean(axis=0))


def facet_similarity(facets_NKD: Array) -> Array:
    """Returns the mean cosine between each two facets of an example, (K, K)."""
    unit = facets_NKD / np.linalg.norm(facets_NKD, axis=-1, keepdims=True)
    return np.asarray(np.einsum("nid,njd->ij", unit, unit) / len(unit))


def off_diagonal_mean(matrix: Array) -> float:
    """Returns the mean of a square matrix without its diagonal."""
    return float(matrix[~np.eye(len(matrix), dtype=bool)].mean())


def _centred(embeddings_ND: Array) -> Array:
    embeddings = np.asarray(embeddings_ND, dtype=np.float64)
    return np.asarray(embeddings - embeddings.mean(axis=0))


def draw_isotropy(
    path: Path, title: str, variance: Mapping[str, Array], stds: Mapping[str, Array]
) -> None:
    """Draws IsoBN's Figures 7 (EV_k) and 4 (standard deviations (D,) of the dimensions), by name of the embedding."""
    import pandas as pd
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    curves = pd.DataFrame({name: pd.Series(values[:50]) for name, values in variance.items()})
    curves.index += 1
    styles = ["k-", "k--", "k:", "k-."]
    curves.plot(ax=left, style=styles, title="Explained variance", xlabel="k", ylim=(0, 1.02))
    logs = [np.log10(np.maximum(std, 1e-10)) for std in stds.values()]
    right.hist(logs, 40, histtype="step", color=["black", "0.6"], label=list(stds))
    right.set(title="Standard deviation of the dimensions", xlabel="log10 of it")
    right.legend()
    figure.savefig(path, dpi=110)


def draw_layers(path: Path, title: str, importance: Array) -> None:
    """Draws HIRE's Figure 2: the importance of the layers for each example, (rows, layers + 1)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    panel = figure.subplots()
    image = panel.imshow(importance, cmap="Greys", aspect="auto")
    panel.set(title=title, xlabel="layer (0: the embeddings)", ylabel="example")
    figure.colorbar(image, ax=panel, label="importance")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    run_command(main)
