"""Analyses runs with a saved model: how isotropic the embedding is, which layers count, where the facets disagree.

python finetune/analyze.py results/k5-isobn/mrpc-full/p1-d1-s1
python finetune/analyze.py results/k5-multicls/mrpc-full/p1-d1-s*

Shape legend: N examples, D dimensions, C classes or rows of a classifier, K facets, M members of an ensemble.
"""

import sys
from collections.abc import Mapping, Sequence
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

UNCERTAIN = 0.2  # share of the examples, those with the most disagreement (Multi-CLS BERT)


class AnalyzeOptions(Settings):
    """Options of the command."""

    runs: CliPositionalArg[list[str]] = Field(
        min_length=1, description="run folder with a model; further ones differ in the seed only"
    )
    examples: int = Field(1000, ge=20, description="dev rows to read")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(AnalyzeOptions, argv, prog="finetune/analyze.py", doc=__doc__)
    folders = [Path(name) for name in options.runs]
    numbers, output = analyze_run(folders, options.examples), folders[0] / "analysis.json"
    write_json(output, numbers)
    print_summary((key, np.round(value, 3).tolist()) for key, value in flatten(numbers).items())
    print_summary([("numbers", output)])
    return 0


def analyze_run(folders: Sequence[Path], examples: int) -> dict[str, Any]:
    """Returns the numbers of the run in the first folder, from at most `examples` dev rows of its first task.

    Its saved model is compared with the model that it started from. More folders hold runs that differ in their seed
    only, for the disagreement among seeds.

    Raises:
        UserError: There is no saved model.
    """
    import torch

    from finetune.encoding import Encoded
    from finetune.heads.build import build_model, load_fine_tuned
    from finetune.heads.isobn import IsotropicBatchNorm
    from finetune.heads.modeling_task import MulticlsHead
    from finetune.results import load_predictions, read_record
    from finetune.run import load_tasks
    from finetune.subsets import draw_rows

    if not (folders[0] / "model").is_dir():
        raise UserError(f"{folders[0]}: no run with a saved model; make one with --save_model.")
    settings = load_settings(RunSettings, [folders[0] / "settings.yaml"])
    data = load_tasks(settings)
    task = data[0].task
    before, _ = build_model(settings, [part.task for part in data])
    after, tokenizer = load_fine_tuned(str(folders[0] / "model"))
    drawn = draw_rows(len(data[0].dev), examples, 1)
    rows = Encoded(task, [data[0].dev[row] for row in drawn], tokenizer)
    states = {"before": read_states(before, rows), "after": read_states(after, rows)}
    weight = after.get_parameter("classifiers.0.weight").detach().cpu().numpy()
    raw, pooled = states["before"]["pooled"], states["after"]["pooled"]
    iso_bn = IsotropicBatchNorm(raw.shape[1], momentum=1.0, beta=1.0)  # over all rows at once
    shares = logit_variance(pooled, weight[:, : after.head.width])  # without the spans
    numbers: dict[str, Any] = {
        "rows": len(rows),
        "before": isotropy_of(raw),
        "before, batch norm": isotropy_of(raw / np.maximum(raw.std(axis=0), 1e-8)),
        "before, IsoBN": isotropy_of(iso_bn(torch.from_numpy(raw)).numpy()),
        "after": isotropy_of(pooled),
        "logit variance of top 1, 5, 30": [float(shares[:k].sum()) for k in (1, 5, 30)],
    }
    if states["after"]["layers"].size:
        numbers["layers"] = states["after"]["layers"].mean(axis=0).tolist()
    if states["after"]["facets"].shape[1] > 1:
        cosines = {name: mean_cosine(arrays["facets"]) for name, arrays in states.items()}
        numbers["facets, mean cosine"] = cosines
        if isinstance(after.head, MulticlsHead) and not (task.is_regression or task.multi_label):
            entries = [(read_record(folder) or {})["tasks"][0] for folder in folders]
            runs = [load_predictions(folder, task.name)["dev"]["logits"] for folder in folders]
            scales = [entry["temperature"] or 1.0 for entry in entries]  # as in the saved models
            seeds = np.stack([run[drawn] / t for run, t in zip(runs, scales, strict=True)])
            logits = {"facets": facet_logits(after, states["after"]["facets"], seeds[0])}
            if len(folders) > 1:
                logits["seeds"] = seeds
            wrong = logits["facets"].mean(axis=0).argmax(axis=1) != rows.labels.numpy()
            numbers["disagreement"] = disagreement(logits, wrong)
    return numbers


def read_states(model: "TaskModel", rows: "Encoded") -> dict[str, Array]:
    """Returns the model's states for N rows (sequences of choice tasks), without dropout, in float32.

    Returns:
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


def facet_logits(model: "TaskModel", facets_NKD: Array, logits: Array) -> Array:
    """Returns the logits (K, N, C) that a model would have if all facets contributed what one does, W (K c_k) + b.

    The head `multicls` is a sum of contributions c_k, so the mean over the facets is the model's `logits` (N, C).
    """
    import torch

    head: Any = model.cpu().head
    with torch.inference_mode():
        parts_KND = head.contributions(torch.from_numpy(facets_NKD)).transpose(0, 1)
        gaps_KND = len(parts_KND) * parts_KND - parts_KND.sum(dim=0)
        gaps_KNC = gaps_KND @ model.get_parameter("classifiers.0.weight")[:, : head.width].T
    # Of a choice task logits are (rows, choices), and gaps (K, sequences, 1).
    return logits + gaps_KNC.numpy().reshape(-1, *logits.shape)


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

    sums = {name: softmax(o, axis=-1).var(axis=0).sum(axis=-1) for name, o in outputs.items()}
    variance = pd.DataFrame(sums)
    most = variance.rank(ascending=False, method="first") <= np.ceil(UNCERTAIN * len(variance))
    numbers: dict[str, Any] = {
        "members": {name: len(logits) for name, logits in outputs.items()},
        "error rate": float(wrong_N.mean()),
        "error rate of the most uncertain": {n: float(wrong_N[most[n]].mean()) for n in most},
    }
    if len(outputs) > 1:
        numbers["overlap of the most uncertain"] = float(most.all(axis=1).sum() / most.sum().max())
        numbers["Spearman"] = float(variance.corr("spearman").iloc[0, 1])
    return numbers


def isotropy_of(embeddings_ND: Array) -> dict[str, Any]:
    """Returns IsoBN's measures of isotropy (arXiv:2005.02178); a constant dimension correlates with none.

    EV_k (Eq. 9) is the share of the variance of the k largest principal components.
    """
    import torch
    from sklearn.decomposition import PCA

    shares = PCA(svd_solver="full").fit(embeddings_ND).explained_variance_ratio_
    correlation = torch.corrcoef(torch.from_numpy(embeddings_ND.T)).nan_to_num().abs().numpy()
    return {
        "EV1, EV2, EV3": shares[:3].cumsum().tolist(),
        "std min, median, max": np.quantile(embeddings_ND.std(axis=0), (0, 0.5, 1)).tolist(),
        "mean |Pearson|": float(correlation[np.triu_indices(len(correlation), 1)].mean()),
    }


def logit_variance(embeddings_ND: Array, weight_CD: Array) -> Array:
    """Returns each principal component's share of the logits' variance, largest component first (Figure 3).

    Var_i = w_i (W^T v_i)^2 with the i-th eigenvalue and eigenvector of the embeddings' covariance; shares are averaged
    over classes. The mean of the class weights does not affect predictions, so it is subtracted first.
    """
    from sklearn.decomposition import PCA

    weight = weight_CD - weight_CD.mean(axis=0) if len(weight_CD) > 1 else weight_CD
    pca = PCA(svd_solver="full").fit(embeddings_ND)
    variance = pca.explained_variance_ * (weight @ pca.components_.T) ** 2
    return np.asarray((variance / variance.sum(axis=1, keepdims=True)).mean(axis=0))


def mean_cosine(facets_NKD: Array) -> float:
    """Returns the mean cosine between two facets of an example: of K unit vectors (|sum|^2 - K) / (K^2 - K)."""
    unit_NKD = facets_NKD / np.linalg.norm(facets_NKD, axis=-1, keepdims=True)
    number = facets_NKD.shape[1]
    return float(((unit_NKD.sum(axis=1) ** 2).sum(axis=-1).mean() - number) / (number**2 - number))


if __name__ == "__main__":
    run_command(main)
