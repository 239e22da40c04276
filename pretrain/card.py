"""The model card (README.md) of a pretrained model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from multicls.cards import CARD, METHOD, PAPERS, TRANSFORMERS, cell, model_link
from multicls.files import read_json, read_jsonl
from pretrain.folder import RunFolder
from pretrain.verdict import read_verdict

TEMPLATE = Path(__file__).with_name("card.md.jinja")
FILLS_MASKS = 0.25  # masked-word accuracy from which on the card offers to fill masks
SHOWN = ("loss/", "acc/", "r2/", "facets/mean", "probe/")
TAGS = ["multicls", "continued-pretraining", "sentence-similarity", "sentence-transformers"]


def write_card(output: Path, folder: RunFolder, config: Any, info: Mapping[str, Any]) -> None:
    """Writes README.md to the folder of an exported model.

    Args:
        info: The export's `step`, the `metadata` of its base model and facts about its `corpus`.
    """
    settings = yaml.safe_load(folder.settings.read_text(encoding="utf-8"))
    step, records = info["step"], read_jsonl(folder.metrics)
    records = [record for record in records if record["step"] <= step]
    validation = [record for record in records if record["split"] == "validation"]
    corpus, metadata = info["corpus"], dict(info["metadata"])
    datasets = corpus["hub_datasets"] or {}
    languages = [*metadata.get("language", []), corpus["language"]]
    languages = [name for name in dict.fromkeys(languages) if name not in (None, "auto")]
    metadata["language"] = languages or None
    is_random = settings["model"]["random_weights"]
    # A head that no step has trained is new in the model before training, too.
    fills_masks = bool(validation) and validation[-1].get("acc/mlm", 0.0) >= FILLS_MASKS
    data = ModelCardData(
        **metadata,
        library_name="transformers",
        pipeline_tag="feature-extraction",
        tags=[*TAGS, "fill-mask"] if fills_masks else TAGS,
        datasets=sorted(set(datasets.values())) or None,
    )
    begin = "random weights" if is_random else model_link(metadata)
    if info.get("base_commit"):
        begin += f" (commit {info['base_commit'][:10]})"
    ds_config = read_json(folder.path / "ds_config.json")
    enabled = [name for name in ("bf16", "fp16") if ds_config.get(name, {}).get("enabled")]
    shown = {group: dict(fields) for group, fields in settings.items() if group != "run"}
    del shown["model"]["checkpoint"], shown["data"]["corpus"]  # paths
    if teacher := shown["model"]["teacher"]:
        shown["model"]["teacher"] = Path(teacher).name if Path(teacher).is_dir() else teacher
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        config=config,
        begin=begin,
        start=f"{'started' if is_random else 'continued'} from {begin}",
        transformers=TRANSFORMERS,
        **info,
        datasets=datasets,
        cell=cell,
        settings=settings,
        tokens=sum(record.get("data/tokens", 0) for record in records),
        env=read_json(folder.path / "env.json"),
        precision=(enabled or ["fp32"])[0],
        details=yaml.safe_dump(shown, sort_keys=False, allow_unicode=True),
        chance=1 / (settings["train"]["negatives_group"] * (config.num_parts - 1)),
        results=_results(validation, probe_only=not step),
        fills_masks=fills_masks,
        verdict=read_verdict(folder, step),
        probe=_probe(settings) if any("probe/mean" in record for record in validation) else "",
        validated=validation[-1]["step"] if validation else 0,
        parts="mean+facets+topics" if config.num_facets else "mean+topics",
        citation=PAPERS[METHOD],
    )
    card.save(output / CARD)


def _results(
    validation: Sequence[Mapping[str, Any]], probe_only: bool
) -> list[tuple[str, str, str]]:
    """Returns rows (metric, before training, now) of the validations; of step 0 the losses are of new facets."""
    if not validation:
        return []
    first, last = validation[0], validation[-1]
    before = first if first["step"] == 0 < last["step"] else {}
    return [
        (name, f"{before[name]:.3f}" if name in before else "", f"{value:.3f}")
        for name, value in last.items()
        if name.startswith("probe/" if probe_only else SHOWN) and "_change" not in name
    ]


def _probe(settings: Mapping[str, Any]) -> str:
    """Returns what the run's probe measured, in words."""
    chose = ", which chose the step" if settings["run"]["keep_best"] else ""
    if settings["probe"]["file"]:
        return f"a linear model on frozen embeddings of labelled rows{chose}"
    return f"next-passage recall of held-out documents{chose}"
