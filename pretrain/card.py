"""The model card of a pretrained model: README.md and a picture of the losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from multicls.cards import CARD, METHOD, model_link, render_card
from multicls.files import read_json, read_jsonl

if TYPE_CHECKING:
    from multicls.configuration_multicls import MultiClsBertConfig

CURVES = "curves.png"
LEAST_VARIANCE = "least facets/variance"  # made of a record's facets/variance_k
TEMPLATE = Path(__file__).with_name("card.md.jinja")
PAPER_TOKENS = 2e9  # of the paper's BERT-base
TAGS = ["multicls-bert", "continued-pretraining", "fill-mask", "sentence-similarity", "sentence-transformers"]
OBJECTIVES = {  # in words, and above the curves
    "mlm": ("masked-LM", "masked-LM"),
    "tfidf": ("TF-IDF", "TF-IDF"),
    "so": ("sentence order (SO)", "SO"),
    "mcqt": ("multi-CLS quick thoughts (MCQT)", "MCQT"),
}
LOCAL = (("model", "checkpoint"), ("data", "corpus"), ("data", "local_copy"))  # settings that are paths
Record = Mapping[str, Any]


def write_card(folder: Path, run_folder: Path, step: int, config: MultiClsBertConfig, facts: Mapping[str, Any]) -> None:
    """Writes README.md and, if a step was measured, curves.png to the folder of an exported model.

    `facts` has what `origin_of` returned at the start of the run, under "origin"; an old run has none.
    """
    settings = yaml.safe_load((run_folder / "settings.yaml").read_text(encoding="utf-8"))
    records = [record for record in read_jsonl(run_folder / "metrics.jsonl") if record["step"] <= step]
    train, validation = ([one for one in records if one["split"] == split] for split in ("train", "validation"))
    origin = facts.get("origin", {})
    corpus, metadata = origin.get("corpus", {}), origin.get("metadata", {})
    tokens = sum(record.get("data/tokens", 0) for record in train)
    random_weights = settings["model"]["random_weights"]
    about = {"library_name": "transformers", "pipeline_tag": "feature-extraction", "tags": TAGS}
    text = render_card(
        TEMPLATE,
        {**metadata, **about, "datasets": sorted(set(corpus.get("datasets", {}).values()))},
        papers=[METHOD],
        title=f"Multi-CLS BERT with {config.num_facets} facets",
        start="started from random weights" if random_weights else f"continued from {model_link(metadata)}",
        config=config,
        corpus=corpus,
        about=origin.get("about", ""),
        settings=_settings_in_words(settings, step, tokens, config),
        software=_software(run_folder),
        curves=draw_curves(records, settings["objective"], folder / CURVES) and CURVES,
        validation=validation,
        examples=settings["run"]["eval_examples"],
        results=results_table(validation, settings["train"]["negatives_group"], config.num_parts),
        limits=_limits(settings, tokens, metadata),
        details=_without_paths(settings),
    )
    (folder / CARD).write_text(text, encoding="utf-8")


def _settings_in_words(settings: Record, step: int, tokens: float, config: MultiClsBertConfig) -> list[str]:
    """Returns what was trained and how, one sentence each."""
    train, length = settings["train"], settings["data"]["seq_length"]
    used = {name: weight for name, weight in settings["objective"].items() if weight}
    weights = {OBJECTIVES[name][0] if name in OBJECTIVES else name: weight for name, weight in used.items()}
    layers = ", ".join(map(str, config.facet_layers or []))
    sentences = [
        f"{step} of {train['steps']} planned optimizer steps of {train['global_batch_size']} examples. An example is "
        f"{config.num_parts} consecutive passages of one document, of {length} tokens at most.",
        f"AdamW: learning rate {train['learning_rate']:g} after a warm-up over {100 * train['warmup_ratio']:g} % of "
        f"the steps, then linear decay to 0; weight decay {train['weight_decay']:g}, gradient norm at most "
        f"{train['max_grad_norm']:g}, seed {train['seed']}.",
        "Objectives: " + ", ".join(f"{name} (weight {weight:g})" for name, weight in weights.items()) + ".",
        f"{config.num_facets} facets; linear layers for the facets after layers {layers or 'none'}; weight of the best "
        f"pair of facets in MCQT: {config.mcqt_lambda:g}. Groups of {train['negatives_group']} examples are each "
        "other's negatives.",
    ]
    return [*sentences, f"The model has read {tokens:,.0f} tokens in these steps."] if tokens else sentences


def _software(run_folder: Path) -> str:
    """Returns hardware, precision and versions in a sentence; "" if the run folder does not have them."""
    if not (run_folder / "env.json").exists():
        return ""
    env, resolved = read_json(run_folder / "env.json"), run_folder / "ds_config.json"
    precisions = read_json(resolved) if resolved.exists() else {}
    precision = next((name for name in ("bf16", "fp16") if precisions.get(name, {}).get("enabled")), "fp32")
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    code = f", multicls at commit {env['git_commit'][:12]}" if env.get("git_commit") else ""
    return f"{env.get('world_size', 1)} x {env.get('device', 'unknown device')} in {precision}; {versions}{code}."


def results_table(validation: Sequence[Record], group: int, parts: int) -> list[tuple[str, str, str, str]]:
    """Returns rows (measure in words, before training, now, value without any learning) of the validation.

    With n = `group` examples that are each other's negatives, each of P = `parts` passages, MCQT has n (P - 1)
    candidates in each of P - 1 directions.
    """
    if not validation:
        return []
    candidates, directions = group * (parts - 1), parts - 1
    percent, number = "{:.1%}".format, "{:.3f}".format
    measures: list[tuple[str, str, Callable[[float], str], str]] = [
        ("loss/total", "Weighted sum of the losses", number, ""),
        ("loss/mlm", "Masked-LM: cross-entropy of a masked token, nats", number, ""),
        ("acc/mlm", "Masked-LM: masked tokens predicted right", percent, ""),
        ("loss/tfidf", "TF-IDF: squared error of a token's weight on a scale of 0 to 10", number, ""),
        ("r2/tfidf", "TF-IDF: explained variance of the weights (R²)", number, "0"),
        ("loss/so", "SO: cross-entropy of the order of two segments, nats", number, number(math.log(2))),
        ("acc/so", "SO: orders predicted right", percent, "50.0%"),
        ("loss/mcqt", "MCQT: cross-entropy of the neighbouring passage, nats, summed over directions", number,
         number(directions * math.log(candidates)) if candidates else ""),
        ("acc/mcqt", f"MCQT: neighbouring passage found among {candidates}", percent, percent(1 / max(candidates, 1))),
        ("facets/mean_cosine", "Cosine of two facets of a text (near 1: the facets have collapsed)", number, ""),
        (LEAST_VARIANCE, "Least variance of a facet over texts (near 0: it is the same for every text)", number, ""),
    ]  # fmt: skip
    first, last = (with_least_variance(record) for record in (validation[0], validation[-1]))
    before = first if first["step"] == 0 and last["step"] > 0 else {}
    return [
        (words, form(before[key]) if key in before else "", form(last[key]), chance)
        for key, words, form, chance in measures
        if key in last
    ]


def with_least_variance(record: Record) -> Record:
    """Returns the record of a validation with the variance of the facet that varies least, if it has facets."""
    variances = [value for name, value in record.items() if name.startswith("facets/variance_")]
    return {**record, LEAST_VARIANCE: min(variances)} if variances else record


def draw_curves(records: Sequence[Record], objective: Mapping[str, float], path: Path) -> bool:
    """Draws the losses over the steps as a PNG, a panel for each objective in use, readable in black and white.

    Returns False, and draws nothing, if nothing was measured.
    """
    from matplotlib.figure import Figure

    used = [name for name in OBJECTIVES if objective[name] and any(f"loss/{name}" in record for record in records)]
    if not used:
        return False
    figure = Figure(figsize=(2.6 * len(used), 2.4), dpi=120, layout="constrained")
    for axes, name in zip(figure.subplots(1, len(used), squeeze=False)[0], used, strict=True):
        for split, style in (("train", "k-"), ("validation", "ko--")):
            measured = [one for one in records if one["split"] == split and f"loss/{name}" in one]
            style += "." * (len(measured) == 1 and split == "train")  # a single point makes no line
            steps, losses = [one["step"] for one in measured], [one[f"loss/{name}"] for one in measured]
            axes.plot(steps, losses, style, ms=4, lw=1, label=split)
        axes.set_title(OBJECTIVES[name][1], fontsize=9)
        axes.set_xlabel("optimizer step", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("loss", fontsize=8)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Software": None})
    return True


def _limits(settings: Record, tokens: float, metadata: Mapping[str, Any]) -> list[str]:
    """Returns what the model is not for, and what nobody has tested."""
    languages = ", ".join(metadata.get("language", [])) or "none"
    limits = [
        "It is an encoder: it generates no text, and labels need fine-tuning first. The classifier of "
        "`AutoModelForSequenceClassification` is untrained.",
        "The validation above scores its own objectives. This model has not been evaluated on any downstream task, nor "
        "for biases of its training data.",
        f"Languages of the base model and of the training data, as stated: {languages}. No other was tested.",
        f"It was trained on {settings['data']['seq_length']} tokens at a time; longer texts have not been tested.",
        "Its tokenizer inserts the facet tokens and pads on the right. With another tokenizer, or padding on the left, "
        "the embeddings are meaningless.",
    ]
    if tokens < PAPER_TOKENS / 10:
        limits.append(
            f"It was trained on little text: {tokens:,.0f} tokens; the paper's BERT-base read {PAPER_TOKENS:,.0f}. "
            "Do not expect the paper's results."
        )
    return limits


def _without_paths(settings: Record) -> str:
    """Returns the settings as YAML without those that are paths, or say where and how often to write."""
    kept = {group: {name: value for name, value in fields.items() if (group, name) not in LOCAL}
            for group, fields in settings.items() if group != "run"}  # fmt: skip
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)


def origin_of(metadata: Mapping[str, Any], manifest: Record) -> dict[str, Any]:
    """Returns what the card says about where a run begins, for JSON; nothing in it is a path.

    `metadata` is what `multicls.cards.inherited_metadata` says about the checkpoint, `manifest` the corpus's.
    """
    language = manifest.get("made_from", {}).get("splitter", {}).get("language")
    languages = dict.fromkeys([*metadata.get("language", []), *([language] if language else [])])
    totals = {key: manifest[key] for key in ("documents", "sentences", "tokens")}
    corpus = totals | {"sources": manifest["sources"], "datasets": manifest.get("hub_datasets", {})}
    return {"metadata": {**metadata, "language": list(languages)}, "corpus": corpus}
