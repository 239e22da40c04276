"""Looks into fine-tuned models: how isotropic the embedding is, which layers count, how alike the facets are.

python finetune/analyze.py --model results/models/RUN_ID --before CHECKPOINT --data_dir glue --output_dir analysis
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/, whose names must not hide packages

import numpy as np
from pydantic import Field

from finetune.data.tasks import TASKS, Task, find_task
from finetune.settings import FinetuneSettings, OwnDataSettings
from finetune.store.results import Array, Record, Store
from multicls.command_line import CommandLine, print_summary
from multicls.console import Progress
from multicls.errors import UserError, run_command
from multicls.files import atomic_write, write_json
from multicls.settings import Settings, load_settings
from multicls.words import counted

if TYPE_CHECKING:
    from finetune.data.encoding import Encoded
    from finetune.data.examples import LabeledExample, TaskData
    from finetune.heads.checkpoint import Checkpoint
    from finetune.heads.modeling_heads import TaskModel

FEWEST, SHOWN_EXAMPLES = 20, 40  # rows to say anything about; rows of the heat map by example
DISAGREEMENT = (
    "Overlap: the share of the 20 % of rows on which the facets disagree most that is among the 20 % on which the runs "
    "do. Spearman: of the two disagreements (variances of the probabilities) over all rows."
)


class AnalyzeOptions(Settings):
    """Options of the command."""

    model: list[str] = Field(min_length=1, description="the folders of saved models, or of plain checkpoints")
    before: str | None = Field(None, description="checkpoint that they were fine-tuned from, for comparison")
    task: str | None = Field(None, description="default: the (first) task that a model was fine-tuned on")
    train_file: str | None = Field(None, description="your own rows, as for finetune/run.py")
    dev_file: str | None = Field(None, description="your own dev rows")
    text_column: str | None = Field(None, description="the text's column, or text1,text2; default: the training's")
    label_column: str | None = Field(None, description="column of the label; default: the training's")
    data_dir: str | None = Field(None, description="folder of the tasks, as for run.py; default: the hub")
    train_from_dev: bool = Field(False, description="take dev rows for train rows, for lack of these")
    ensemble: str | None = Field(
        None, title="HEAD", description="compare facets with runs of that head in the model's results folder"
    )
    output_dir: str = Field("analysis", description="folder for PNG, CSV and analysis.json")
    examples: int = Field(1000, ge=FEWEST, description="rows of train, and of dev")
    trust_remote_code: bool = Field(False, description="run the Python code in the model's folder")


COMMAND = CommandLine("finetune/analyze.py", __doc__, AnalyzeOptions)


@dataclass
class AnalyzedModel:
    """A model to look into."""

    folder: str
    task: Task
    data: TaskData  # the rows of the task
    index: int  # the task's number among the model's
    states: dict[str, TaskModel]  # the model itself by "before" and "after" fine-tuning, either or both
    checkpoint: Checkpoint  # whose tokenizer reads the rows
    run: Record | None = None  # its line of results, if it lies in a results folder

    @property
    def label(self) -> str:
        """Its name in figures and files."""
        head = next(iter(self.states.values())).config.head
        return f"{self.task.name}-{head}-{Path(self.folder).resolve().name}"

    def encode(self, rows: Sequence[LabeledExample]) -> Encoded:
        """Returns the rows as token ids, at the run's own length or the paper's."""
        from finetune.data.encoding import Encoded
        from finetune.heads.checkpoint import load_tokenizer

        own = self.run if self.run and self.run["task"] == self.task.name else None
        wanted = own["resolved"]["max_length"] if own else self.task.max_length
        max_length = min(wanted, int(self.checkpoint.encoder.get("max_position_embeddings", 512)))
        return Encoded(self.task, rows, load_tokenizer(self.checkpoint, max_length), max_length)

    def weights(self) -> dict[str, Array]:
        """Returns the classifier's weights (C, E) by state, without those of span tasks after the embedding."""
        return {
            name: model.get_parameter(f"classifiers.{self.index}.weight").detach().cpu().numpy()[:, : model.head.width]
            for name, model in self.states.items()
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    args = COMMAND.parse(argv)
    if args.task and args.train_file:
        raise UserError("--train_file takes the place of --task: give one of them.")
    several = [load_analyzed(folder, args) for folder in args.model]
    if len({analyzed.label for analyzed in several}) < len(several):
        raise UserError("--model: a model is given twice.")
    numbers: dict[str, Any] = {}
    output = Path(args.output_dir)
    for analyzed in several:
        print(f"{analyzed.label}: {analyzed.folder}", flush=True)
        numbers[analyzed.label] = look_into(analyzed, args)
    _write_overviews(output, numbers)
    write_json(output / "analysis.json", numbers)
    made = {"figures": f"{output}/*.png", "tables": f"{output}/*.csv", "numbers": f"{output}/analysis.json"}
    print_summary(made.items())
    return 0


def load_analyzed(folder: str, args: AnalyzeOptions) -> AnalyzedModel:
    """Loads a model that finetune/run.py saved, or builds the head `cls` or `multicls` on a plain checkpoint.

    Raises:
        UserError: model, task or rows are missing, or do not go together.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    from finetune.heads.building import build_head, describe
    from finetune.heads.checkpoint import find_checkpoint
    from finetune.heads.modeling_heads import TaskModelConfig
    from multicls.from_bert import quiet_transformers

    def build(name: str, tasks: Sequence[Task], **values: Any) -> TaskModel:
        values |= {"model": name, "task": ",".join(task.name for task in tasks)}
        found = find_checkpoint(name, args.trust_remote_code)
        return build_head(load_settings(FinetuneSettings, flags=values), found, tasks)

    checkpoint = find_checkpoint(folder, args.trust_remote_code)
    if checkpoint.model_type != TaskModelConfig.model_type:
        if not args.task and not args.train_file:
            raise UserError(f"--model {folder}: a plain checkpoint has no task; add --task.")
        task, data = _read_rows(args, args.task or "")
        model = build(folder, [task], head="multicls" if checkpoint.num_facets else "cls")
        return AnalyzedModel(folder, task, data, 0, {"before": model}, checkpoint)
    with quiet_transformers():
        states = {"after": AutoModelForSequenceClassification.from_pretrained(checkpoint.folder)}
    config, place = states["after"].config, Path(folder).resolve()
    run = next((one for one in Store(place.parents[1]).records() if one["run_id"] == place.name), None)
    names = [about["name"] for about in config.tasks]
    name = args.task or names[0]
    if name not in names:
        raise UserError(f"--task {name}: {folder} is fine-tuned on {', '.join(names)}.")
    if name not in TASKS and not args.train_file:
        raise UserError(f"--model {folder}: fine-tuned on your own rows; add --train_file.")
    about = config.tasks[names.index(name)]
    task, data = _read_rows(args, name, about)
    if describe(task, about.get("max_length")) != about:
        raise UserError(f"--model {folder}: fine-tuned on {name}; these rows have other columns or labels.")
    if args.before:
        torch.manual_seed(run["seed"] if run else 0)  # as finetune/run.py does it: the same new weights
        options = {f"{config.head}.{name}": value for name, value in config.head_options.items()}
        tasks = [task] if args.train_file else [find_task(name) for name in names]
        states = {"before": build(args.before, tasks, head=config.head, pooling=config.pooling, **options)} | states
    return AnalyzedModel(folder, task, data, names.index(name), states, checkpoint, run)


def look_into(analyzed: AnalyzedModel, args: AnalyzeOptions) -> dict[str, Any]:
    """Analyzes one model and writes its figures; returns its entry in analysis.json."""
    from finetune.data.splits import draw_rows
    from finetune.show import figures

    task, data, output = analyzed.task, analyzed.data, Path(args.output_dir)
    train, dev = (
        [rows[row] for row in sorted(draw_rows(len(rows), min(args.examples, len(rows)), 1))]
        for rows in (data.train or data.dev, data.dev)
    )
    if len(train) < FEWEST or (not task.num_choices and len({row.label for row in train}) < 2):
        count = counted(len(train), "train row")
        raise UserError(f"{task.name}: {count}, at least {FEWEST} with different labels are needed.")
    encoded, encoded_dev = analyzed.encode(train), analyzed.encode(dev)
    embeddings = {name: read(model, encoded, analyzed.index)["pooled"] for name, model in analyzed.states.items()}
    found = {name: read(model, encoded_dev, analyzed.index) for name, model in analyzed.states.items()}
    entry: dict[str, Any] = {"model": analyzed.folder, "before": args.before}
    entry |= {"train_rows": len(train), "dev_rows": len(dev)}
    if args.ensemble:
        entry["disagreement"] = disagreement_of(analyzed, found, dev, args.ensemble)
    output.mkdir(parents=True, exist_ok=True)
    entry |= isotropy_of(analyzed, embeddings, encoded.labels.numpy(), output)
    for name, model in analyzed.states.items():
        if found[name]["states"].shape[1] > 1:
            entry.setdefault("facets", {}).update(facets_of(model, found[name]["states"], name))
    if "after" in found and (layers := found["after"]["layers"]).size:
        choices = [f" {choice}" for choice in range(task.num_choices)] or [""]
        ids = [example.id + choice for example in dev for choice in choices]
        path = output / f"layers-{analyzed.label}.csv"
        _write_columns(path, {"id": ids, **{f"layer {number}": row for number, row in enumerate(layers.T)}})
        shown = dict(zip(ids[:SHOWN_EXAMPLES], layers, strict=False))
        figures.layers(path.with_suffix(".png"), path.stem, shown, "example")
        entry["layers"] = layers.mean(axis=0).tolist()
    return entry


def read(model: TaskModel, rows: Encoded, task: int) -> dict[str, Array]:
    """Returns the model's embeddings and outputs for N rows, without dropout, in float32.

    Returns:
        "pooled", what the classifier reads (N, E); "states", the facets' last hidden states (N, K, D); "facets", the
        part of each in the embedding (N, K, E) or nothing (N, 0); "layers", HIRE's weights (N, layers + 1) or
        nothing; "logits" (rows, C). N is the number of sequences for choice tasks.
    """
    import torch

    from finetune.train.loop import find_device

    device, _ = find_device()
    model.eval().to(device)
    count = getattr(model.encoder.config, "num_facets", 0)
    found: dict[str, list[torch.Tensor]] = defaultdict(list)
    with torch.inference_mode(), closing(Progress("analyzing", len(rows), unit="rows")) as progress:
        for start in range(0, len(rows), 32):
            progress.update(start)
            batch = rows.batch(range(start, min(start + 32, len(rows))), device)
            output = model(**batch, task=task, output_hidden_states=True)
            states = output.hidden_states[-1][:, 1 : 1 + count]
            parts = {"pooled": output.pooled, "states": states, "facets": output.facets,
                     "layers": output.layer_weights, "logits": output.logits}  # fmt: skip
            for name, part in parts.items():
                found[name].append(output.pooled[:, :0] if part is None else part)
    return {name: torch.cat(parts).float().cpu().numpy() for name, parts in found.items()}


def disagreement_of(
    analyzed: AnalyzedModel, found: Mapping[str, Mapping[str, Array]], dev: Sequence[LabeledExample], head: str
) -> dict[str, Any]:
    """Returns how far the facets of a model disagree where runs of `head` in its results folder do, by system.

    Raises:
        UserError: it has no facets, lies in no results folder, or there are no such runs.
    """
    from finetune.stats.disagreement import compare_with_runs, facet_logits

    if analyzed.run is None:
        raise UserError(f"--ensemble: {analyzed.folder} lies in no results folder with runs to compare it with.")
    facets_NKE, weight = found["after"]["facets"], analyzed.weights()["after"]
    if facets_NKE.shape[1] < 2:
        raise UserError(f"--ensemble: {analyzed.label}: its embedding is no sum of facets.")
    logits = facet_logits(facets_NKE.swapaxes(0, 1), weight, found["after"]["logits"].reshape(-1, len(weight)))
    logits = logits.reshape(len(logits), len(dev), -1)  # of a choice task a row's choices side by side
    store = Store(Path(analyzed.folder).resolve().parents[1])
    return compare_with_runs(store, analyzed.run, analyzed.task.name, head, dev, logits)


def isotropy_of(
    analyzed: AnalyzedModel, embeddings: Mapping[str, Array], labels: Array, output: Path
) -> dict[str, Any]:
    """Draws and returns the figures and numbers of the IsoBN paper for the embedding that the classifier reads.

    Args:
        embeddings: (N, E) by state.
        labels: (rows,).
        output: folder for the PNG and the CSVs.
    """
    import torch

    from finetune.heads.isobn import IsotropicBatchNorm
    from finetune.show import figures, isotropy

    task, (first, *_, last) = analyzed.task, [*embeddings, *embeddings]
    raw = embeddings[first]
    normed = {  # over all rows at once, the paper's beta for Table 2 and Figure 7
        f"{first}, batch norm": raw / np.maximum(raw.std(axis=0), 1e-8),
        f"{first}, IsoBN": IsotropicBatchNorm(raw.shape[1], momentum=1.0, beta=1.0)(torch.from_numpy(raw)).numpy(),
    }
    variance = {name: isotropy.explained_variance(values) for name, values in {**embeddings, **normed}.items()}
    stds = {name: values.std(axis=0) for name, values in embeddings.items()}
    correlations = {name: isotropy.correlation(values) for name, values in embeddings.items()}
    if task.num_choices:  # a row for each choice: is it the right one?
        labels = (np.arange(task.num_choices) == labels[:, None]).ravel().astype(int)
    weights = analyzed.weights()
    classifiers = {"classifier": weights["after"]} if "after" in weights else {}
    classifiers["regression"] = isotropy.reference_classifier(embeddings[last], labels, task.is_regression)
    shares = {name: isotropy.logit_variance(embeddings[last], weight) for name, weight in classifiers.items()}

    matrices = {name: matrix for name, (matrix, _) in correlations.items()}
    figures.isotropy(output / f"isotropy-{analyzed.label}.png", analyzed.label, variance, stds, shares, matrices)
    columns = {"component or dimension": np.arange(raw.shape[1])}
    for kind, table in (("EV", variance), ("logit variance", shares), ("std", stds)):
        columns |= {f"{kind} {name}": values for name, values in table.items()}
    _write_columns(output / f"isotropy-{analyzed.label}.csv", columns)
    for name, (matrix, order) in correlations.items():
        with atomic_write(output / f"correlation-{analyzed.label}-{name}.csv") as file:
            np.savetxt(file, matrix, "%.3f", ",", header=",".join(map(str, order)), comments="")
    numbers: dict[str, Any] = {
        "EV1, EV2, EV3": {name: values[:3].tolist() for name, values in variance.items()},
        "std min, median, max": {name: np.quantile(values, (0, 0.5, 1)).tolist() for name, values in stds.items()},
        "mean |Pearson|": {name: isotropy.between(matrix) for name, matrix in matrices.items()},
        "logit variance of top 1, 5, 30": {
            name: [float(values[:top_k].sum()) for top_k in (1, 5, 30)] for name, values in shares.items()
        },
    }
    if analyzed.run and len(weights) == 2:  # the very classifier that the run began with
        change = isotropy.classifier_change(embeddings[last], weights["before"], weights["after"])
        numbers["classifier before and after"] = dict(zip(("cosine", "L2 distance"), change, strict=True))
    return numbers


def facets_of(model: TaskModel, states_NKD: Array, name: str) -> dict[str, Any]:
    """Returns cosines between the facets' hidden states h_k, and between W_O,k h_k if the head has such matrices."""
    from finetune.show.isotropy import between, facet_similarity

    facets = {f"h_k {name}": states_NKD}
    for module in model.head.modules():
        if type(module).__name__ == "FacetLinear":  # the model's own copy of the class, or the project's
            weight_KED = module.get_parameter("weight").detach().cpu().numpy()
            facets[f"W_k h_k {name}"] = np.einsum("nkd,ked->nke", states_NKD, weight_KED)
    cosines = {name: facet_similarity(values) for name, values in facets.items()}
    return {name: {"mean cosine": between(table), "cosines": table.tolist()} for name, table in cosines.items()}


def _write_overviews(output: Path, numbers: Mapping[str, Any]) -> None:
    """Writes layers.png, facets.png and disagreement.md, with a row for each model."""
    import pandas as pd

    from finetune.show import figures
    from finetune.show.tables import Table, markdown

    if layers := {label: entry["layers"] for label, entry in numbers.items() if "layers" in entry}:
        figures.layers(output / "layers.png", "Importance of the layers, mean over dev", layers, "model")
    if facets := {label: entry["facets"] for label, entry in numbers.items() if "facets" in entry}:
        figures.facets(output / "facets.png", facets)
    columns = ("facets of", "runs of", "runs", "rows", "overlap", "by chance", "Spearman")
    frame = pd.DataFrame([(label, system, *(f"{value:.3g}" for value in found.values()))
                          for label, entry in numbers.items()
                          for system, found in entry.get("disagreement", {}).items()], columns=columns)  # fmt: skip
    if not frame.empty:
        text = markdown(Table("Disagreement of facets and of runs", frame, [DISAGREEMENT]))
        with atomic_write(output / "disagreement.md") as file:
            file.write(text)
        print(text)


def _write_columns(path: Path, columns: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        csv.writer(file).writerows([columns, *zip_longest(*columns.values(), fillvalue="")])


def _read_rows(args: AnalyzeOptions, name: str, about: Mapping[str, Any] | None = None) -> tuple[Task, TaskData]:
    """Returns the user's own rows, or those of the task `name`; `about` is what a saved model says of its task."""
    from finetune.data.own_rows import own_settings, read_own
    from finetune.data.reading import read_task

    if args.train_file:
        known = own_settings(about) if about else {}
        asked = args.model_dump(include={"train_file", "dev_file", "text_column", "label_column"}, exclude_none=True)
        return read_own(OwnDataSettings(**known | asked))
    return find_task(name), read_task(find_task(name), args.data_dir, args.train_from_dev)


if __name__ == "__main__":
    run_command(main)
