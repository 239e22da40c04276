"""Analyses runs with a saved model: how isotropic the embedding is, which layers count, where the facets disagree.

python finetune/analyze.py results/k5-isobn/mrpc-full/p1-d1-s1

Shape legend: N examples, D dimensions, C classes or rows of a classifier, K facets, M members of an ensemble.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

import numpy as np
from pydantic import Field
from pydantic_settings import CliPositionalArg

from finetune.settings import RunSettings, flatten
from finetune.tasks import Array
from multicls.console import print_line, print_summary
from multicls.errors import UserError, run_command
from multicls.files import read_json, write_json
from multicls.settings import Settings, load_settings, parse

if TYPE_CHECKING:
    from finetune.encoding import Encoded
    from finetune.heads.modeling_task import TaskModel

UNCERTAIN = 0.2  # share of the examples, those with the most disagreement (Multi-CLS BERT)


class AnalyzeOptions(Settings):
    """Options of the command."""

    runs: CliPositionalArg[list[str]] = Field(
        min_length=1, description="folders of runs made with --save_model"
    )
    output: str = Field("analysis", description="folder for analysis.json")
    examples: int = Field(1000, ge=20, description="training rows to read, and dev rows")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(AnalyzeOptions, argv, prog="finetune/analyze.py", doc=__doc__)
    runs = dict[str, dict[str, Any]]()
    for name in options.runs:
        label, numbers = analyze_run(Path(name).resolve(), options.examples)
        if label in runs:
            raise UserError(f"{name}: a run of this name, {label}, is passed twice.")
        runs[label] = numbers
        print_line(f"{label}: {name}")
        print_summary((key, np.round(value, 3).tolist()) for key, value in flatten(numbers).items())
    output = Path(options.output, "analysis.json")
    write_json(output, runs)
    print_summary([("numbers", output)])
    return 0


def analyze_run(folder: Path, examples: int) -> tuple[str, dict[str, Any]]:
    """Returns the name of a run and its entry of analysis.json, from at most `examples` rows of each split.

    The run's saved model is compared with the model that it started from, on rows of its first task.

    Raises:
        UserError: There is no saved model.
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
    data, checkpoint = load_tasks(settings), find_checkpoint(settings.model)
    task, length = data[0].task, settings.max_length or data[0].task.max_length
    before, _ = build_model(settings, checkpoint, [part.task for part in data])
    after, tokenizer = load_fine_tuned(str(folder / "model"))
    drawn = [data[0].train[row] for row in draw_rows(len(data[0].train), examples, 1)]
    train = Encoded(task, drawn, tokenizer, length)
    states = {"before": read_states(before, train), "after": read_states(after, train)}
    weight = after.get_parameter("classifiers.0.weight").detach().cpu().numpy()
    pooled = {name: arrays["pooled"] for name, arrays in states.items()}
    numbers = {"rows": len(train), **isotropy_of(pooled, weight[:, : after.head.width])}  # no spans
    if (layers := states["after"]["layers"]).size:  # HIRE; of the first choice
        numbers["layers"] = layers[:: max(1, task.num_choices)].mean(axis=0).tolist()
    if states["after"]["facets"].shape[1] > 1:
        cosines = {name: facet_similarity(arrays["facets"]) for name, arrays in states.items()}
        means = {name: off_diagonal_mean(matrix) for name, matrix in cosines.items()}
        numbers["facets, mean cosine"] = means
        numbers["facets, cosines"] = {name: m.tolist() for name, m in cosines.items()}
    one_class = not (task.is_regression or task.multi_label)
    if one_class and states["after"]["facet_logits"].shape[1] > 1:  # heads of facets
        rows = draw_rows(len(data[0].dev), examples, 1)
        dev = Encoded(task, [data[0].dev[row] for row in rows], tokenizer, length)
        logits = {"facets": read_states(after, dev)["facet_logits"].swapaxes(0, 1)}
        alike = ("system", "train_size", "pretraining", "subset", "search", "data_sha256")
        records = {p.parent: read_json(p) for p in sorted(folder.parent.glob(f"*/{RECORD}"))}
        seeds = [p for p, other in records.items() if all(other[n] == record[n] for n in alike)]
        if len(seeds) > 1:
            members = [load_predictions(path, task.name)["dev"]["logits"][rows] for path in seeds]
            logits["seeds"] = np.stack(members)
        wrong = logits["facets"].mean(axis=0).argmax(axis=1) != dev.labels.numpy()
        numbers["disagreement"] = disagreement(logits, wrong)
    return f"{task.name}-{record['system']}-{folder.name}", numbers


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
            batch = rows.batch(range(start, min(start + 32, len(rows))))
            inputs = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
            output = model(**inputs, output_hidden_states=True)
            pooled = output.features[:, : model.head.width]  # without the spans
            facets = output.hidden_states[-1][:, 1 : 1 + num_facets]
            parts["pooled"].append(pooled)
            parts["facets"].append(facets)
            parts["layers"].append(pooled[:, :0] if (w := output.layer_weights) is None else w)
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


def isotropy_of(pooled: Mapping[str, Array], weight_CD: Array) -> dict[str, Any]:
    """Returns IsoBN's numbers (arXiv:2005.02178) of embeddings (N, D) "before" and "after" fine-tuning.

    `weight_CD` are the classifier's weights after it.
    """
    import torch

    from finetune.heads.isobn import IsotropicBatchNorm

    raw = pooled["before"]
    iso_bn = IsotropicBatchNorm(raw.shape[1], momentum=1.0, beta=1.0)  # over all rows at once
    normed = {
        "before, batch norm": raw / np.maximum(raw.std(axis=0), 1e-8),
        "before, IsoBN": iso_bn(torch.from_numpy(raw)).numpy(),
    }
    variance = {name: explained_variance(h) for name, h in {**pooled, **normed}.items()}
    quantiles = {name: np.quantile(h.std(axis=0), (0, 0.5, 1)) for name, h in pooled.items()}
    with np.errstate(invalid="ignore"):  # a constant dimension correlates with none
        pearson = {n: np.abs(np.nan_to_num(np.corrcoef(h.T))) for n, h in pooled.items()}
    shares = logit_variance(pooled["after"], weight_CD)
    return {
        "EV1, EV2, EV3": {name: values[:3].tolist() for name, values in variance.items()},
        "std min, median, max": {name: values.tolist() for name, values in quantiles.items()},
        "mean |Pearson|": {name: off_diagonal_mean(matrix) for name, matrix in pearson.items()},
        "logit variance of top 1, 5, 30": [float(shares[:k].sum()) for k in (1, 5, 30)],
    }


def explained_variance(embeddings_ND: Array) -> Array:
    """Returns EV_1, EV_2, ... (Eq. 9), (min(N, D),): the share of the variance of the k largest components.

    All are nan if the embeddings are all the same.
    """
    with np.errstate(invalid="ignore"):
        return np.asarray(_components(embeddings_ND).explained_variance_ratio_.cumsum())


def logit_variance(embeddings_ND: Array, weight_CD: Array) -> Array:
    """Returns each principal component's share of the logits' variance, largest component first (Figure 3).

    Var_i = w_i (W^T v_i)^2 with the i-th eigenvalue and eigenvector of the embeddings' covariance; shares are averaged
    over classes. The mean of the class weights does not affect predictions, so it is subtracted first.
    """
    weight = weight_CD - weight_CD.mean(axis=0) if len(weight_CD) > 1 else weight_CD
    components = _components(embeddings_ND)
    variance = components.explained_variance_ * (weight @ components.components_.T) ** 2
    total = np.maximum(variance.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    return np.asarray((variance / total).mean(axis=0))


def _components(embeddings_ND: Array) -> Any:
    from sklearn.decomposition import PCA

    return PCA(svd_solver="full").fit(np.asarray(embeddings_ND, dtype=np.float64))


def facet_similarity(facets_NKD: Array) -> Array:
    """Returns the mean cosine between each two facets of an example, (K, K)."""
    unit = facets_NKD / np.linalg.norm(facets_NKD, axis=-1, keepdims=True)
    return np.asarray(np.einsum("nid,njd->ij", unit, unit) / len(unit))


def off_diagonal_mean(matrix: Array) -> float:
    """Returns the mean of a square matrix without its diagonal."""
    return float(matrix[~np.eye(len(matrix), dtype=bool)].mean())


if __name__ == "__main__":
    run_command(main)
