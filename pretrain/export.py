"""Exports a checkpoint of a pretraining run as a Hugging Face model folder.

python pretrain/export.py runs/base --output exports/base
python pretrain/export.py runs/base --step 20000 --output exports/base_at_20000
python pretrain/export.py runs/base --average 3 --towards_base 0.5 --output exports/base_soup
python pretrain/export.py runs/base --multi_vector exports/base_vectors
"""

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field, PositiveInt
from pydantic_settings import CliPositionalArg

from multicls.cards import (
    MULTI_VECTOR_ENCODER,
    SENTENCE_TRANSFORMER,
    inherited_metadata,
    write_sentence_transformer,
)
from multicls.console import print_summary
from multicls.errors import UserError, print_stderr, run_command
from multicls.files import atomic_folder, lock_holder, read_json, write_json
from multicls.settings import Settings, load_settings, parse
from pretrain.card import write_card
from pretrain.run_folder import (
    BEFORE,
    DONE,
    SETTINGS,
    TOPICS,
    best_step,
    check_whole,
    checkpoint_path,
    saved_steps,
)
from pretrain.settings import ModelSettings, PretrainSettings, ProbeSettings

EXPORT_INFO = "export.json"  # in RUN/model: facts for the card; in an export its step, too
FACTS = ("documents", "sentences", "tokens", "sources", "hub_datasets")  # of a manifest: no paths
WEIGHTS = "model.safetensors"
LOCAL: Any = {"trust_remote_code": False, "local_files_only": True}  # for `from_pretrained`
HEADS = ("mean", "cls", "facets")  # embeddings that a head of fine-tuning has the name of


class ExportOptions(Settings):
    """Options of the command."""

    run: CliPositionalArg[Path] = Field(description="run folder of pretrain/run.py, in any state")
    step: int | None = Field(
        None, description="step of the checkpoint; default: the best or newest"
    )
    average: PositiveInt = Field(1, description="export the mean of this many last checkpoints")
    towards_base: float = Field(
        0.0, ge=0, le=1, description="share of the way back to the weights before training"
    )
    output: Path | None = Field(None, description="new folder, or an earlier export to replace")
    multi_vector: Path | None = Field(
        None, description="the same for sentence_transformers.MultiVectorEncoder: K vectors a text"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exports a checkpoint. Returns the exit code."""
    options = parse(ExportOptions, argv, prog="pretrain/export.py", doc=__doc__)
    run_folder, folder = options.run, options.output or options.multi_vector
    if folder is None or (options.output and options.multi_vector):
        raise UserError("set either --output or --multi_vector, to a new folder.")
    if not (run_folder / SETTINGS).exists():
        raise UserError(f"{run_folder}: is not a run folder of pretrain/run.py.")
    if options.towards_base and settings_of(run_folder).model.random_weights:
        raise UserError(f"{run_folder}: --towards_base: the run began with random weights.")
    steps = saved_steps(run_folder / "checkpoints")
    step = chosen_step(run_folder, steps) if options.step is None else options.step
    if step not in steps:
        known = f"has checkpoints of steps {', '.join(map(str, steps))}"
        raise UserError(f"{run_folder}: {known if steps else 'has no checkpoint to export yet'}.")
    steps = [number for number in steps if number <= step][-options.average :]
    if len(steps) < options.average:
        raise UserError(
            f"{run_folder}: --average {options.average}: has {len(steps)} checkpoint(s) up to step {step}; set fewer, "
            f"or train with --run.keep_checkpoints {options.average}."
        )
    is_multi_vector = options.multi_vector is not None
    flag = f"{'--multi_vector' if is_multi_vector else '--output'} {folder}"
    if folder.resolve() == (run_folder / "hf").resolve() and lock_holder(run_folder):
        raise UserError(f"{flag}: the training writes this folder; set another one.")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if folder.is_file() or (names and not names >= {EXPORT_INFO, WEIGHTS}):
        raise UserError(f"{flag}: exists and is no export; set a new folder.")
    write_model(run_folder, steps, folder, options.towards_base, multi_vector=is_multi_vector)
    what = f"step {', '.join(map(str, steps))} of {run_folder}"
    print_summary([("model", f"{folder} ({what})")], next_command(folder))
    return 0


def chosen_step(run_folder: Path, steps: Sequence[int]) -> int:
    """Returns the step of the best checkpoint where the run keeps it, else of the newest; 0: there is none."""
    newest = max(steps, default=0)
    if not settings_of(run_folder).run.keep_best:
        return newest
    if best := best_step(run_folder):
        return best if best in steps else newest
    if (run_folder / DONE).exists():
        print_stderr(
            f"note: no step was better than step 0, so {run_folder / 'hf'} is the model before training; this is that "
            f"of step {newest}"
        )
    return newest


def settings_of(run_folder: Path) -> PretrainSettings:
    """Returns the settings of a run, with its length and intervals in steps."""
    return load_settings(PretrainSettings, [run_folder / SETTINGS])


def next_command(folder: Path, probe: ProbeSettings | None = None, view: str = "") -> str:
    """Returns a command that fits a classifier on an exported model: a probe of `view`, or a head all models have."""
    rows = probe or ProbeSettings()
    head = (
        ["probe", "--pooling", view] if rows.file and view else [view if view in HEADS else "mean"]
    )
    command = ["python", "finetune/run.py", "--model", str(folder), "--head", *head]
    command += ["--train_file", rows.file or "ROWS.csv"]
    for name, value in rows.model_dump(exclude={"file"}, exclude_defaults=True).items():
        command += [f"--{name}", str(value)]
    return shlex.join(command)


def describe_model(
    model: Any, tokenizer: Any, run_folder: Path, source: str, manifest: Mapping[str, Any]
) -> None:
    """Writes configuration, tokenizer and origin of a new model to `RUN/model`: resume and export need no more.

    Call it before DeepSpeed changes the model's precision, which the configuration would then state.

    Args:
        source: Checkpoint that the weights come from; "": random weights.
    """
    from multicls.build import quiet_transformers

    with atomic_folder(run_folder / "model") as fresh, quiet_transformers():
        model.save_pretrained(fresh, state_dict={})
        (fresh / WEIGHTS).unlink(missing_ok=True)
        tokenizer.save_pretrained(fresh)
        write_sentence_transformer(fresh, SENTENCE_TRANSFORMER)
        corpus = {key: manifest.get(key) for key in FACTS}
        corpus["language"] = manifest.get("made_from", {}).get("settings", {}).get("language")
        metadata = inherited_metadata(source) if source else {}
        commit = getattr(model.config, "_commit_hash", None)  # of the Hub
        info = {"metadata": metadata, "corpus": corpus, "base_commit": commit}
        write_json(fresh / EXPORT_INFO, info)


def load_topics(run_folder: Path) -> dict[str, Any]:
    """Returns the state of the run's `TopicTable`, {} if it has none."""
    from safetensors.torch import load_file

    path = run_folder / TOPICS
    return load_file(path) if path.exists() else {}


def restore_model(folder: Path) -> tuple[Any, Any]:
    """Returns the model of a `RUN/model` folder without weights, and its tokenizer. Raises UserError if incomplete."""
    from transformers import AutoConfig, AutoModelForPreTraining, AutoTokenizer

    import multicls.modeling_multicls  # noqa: F401 (registers the model)

    if not (folder / EXPORT_INFO).exists():
        raise UserError(
            f"{folder}: is missing or incomplete; it holds the model's configuration and tokenizer, and a run writes "
            "it when it starts. Copy it from where the run was trained."
        )
    config = AutoConfig.from_pretrained(folder, **LOCAL)
    model = AutoModelForPreTraining.from_config(config, trust_remote_code=False)
    return model, AutoTokenizer.from_pretrained(folder, **LOCAL)


def build_model(
    model: ModelSettings, report: Callable[[str], None] = lambda line: None, facets: bool = True
) -> tuple[Any, Any]:
    """Returns a new model and its tokenizer; without `facets` it has none but those of the base model.

    huggingface_hub locks each file that it downloads.
    """
    from multicls.build import build
    from multicls.sample import SAMPLE, sample_model

    checkpoint = str(sample_model()) if model.checkpoint == SAMPLE else model.checkpoint
    fields = model.model_dump(exclude={"checkpoint", "num_topics"})
    if not facets:
        fields |= {"num_facets": None, "facet_layers": None}
    return build(checkpoint, **fields, report=report)


def model_before(run_folder: Path, facets: bool = True) -> tuple[Any, Any]:
    """Returns the model that a run began with, built again, and its tokenizer; see `build_model`."""
    import torch

    settings = settings_of(run_folder)
    commit = read_json(run_folder / "model" / EXPORT_INFO)["base_commit"]
    torch.manual_seed(settings.train.seed)
    model = settings.model.model_copy(update={"revision": commit or settings.model.revision})
    return build_model(model, facets=facets)


def untouched_model(run_folder: Path) -> tuple[Any, Any]:
    """Returns the model before training without new facets, as the run has saved it, and its tokenizer."""
    from transformers import AutoModelForPreTraining, AutoTokenizer

    from multicls.build import quiet_transformers  # registers the model, too

    folder = run_folder / BEFORE
    if not folder.exists():  # of a run without `run.keep_best`
        return model_before(run_folder, facets=False)
    with quiet_transformers():
        model = AutoModelForPreTraining.from_pretrained(folder, **LOCAL)
        return model, AutoTokenizer.from_pretrained(folder, **LOCAL)


def mean_weights(run_folder: Path, steps: Sequence[int]) -> dict[str, Any]:
    """Returns the mean of the fp32 weights of some checkpoints. Errors are those of `write_model`."""
    from pretrain.engine import fp32_weights

    sums: dict[str, Any] = {}
    for step in steps:
        checkpoint = checkpoint_path(run_folder / "checkpoints", step)
        try:
            check_whole(checkpoint)
            weights = fp32_weights(checkpoint)
        except FileNotFoundError:
            raise UserError(f"{checkpoint}: was deleted meanwhile; export a newer one.") from None
        sums = {name: sums.get(name, 0.0) + weight for name, weight in weights.items()}
    return {name: total / len(steps) for name, total in sums.items()}


def write_model(
    run_folder: Path,
    steps: Sequence[int],
    output: Path,
    towards_base: float = 0.0,
    *,
    multi_vector: bool = False,
) -> None:
    """Writes the mean of checkpoints as a Hugging Face folder; replaces an earlier one when the new one is whole.

    sentence-transformers reads it as a SentenceTransformer, or as a MultiVectorEncoder if `multi_vector` is True.

    Args:
        steps: Steps of the checkpoints; without any the model is that before training, without new facets.
        towards_base: Share of the way back to the weights before training (WiSE-FT, arXiv:2109.01903).

    Raises:
        UserError: A checkpoint was deleted meanwhile, as a running training does, the run has no `RUN/model`, or the
            base model is not available.
    """
    from multicls.build import quiet_transformers

    topics = load_topics(run_folder)
    if steps:
        model, tokenizer = restore_model(run_folder / "model")
        weights = mean_weights(run_folder, steps)
    else:
        model, tokenizer = untouched_model(run_folder)
        if topics:  # the vocabulary that they were made for, which may have new facets
            model.resize_token_embeddings(len(topics["idf"]), mean_resizing=False)
        weights = model.state_dict()
    if towards_base:
        base = model_before(run_folder)[0].state_dict()
        weights = {name: w.lerp(base[name], towards_base) for name, w in weights.items()}
    model.load_state_dict(weights)
    if topics:
        model.multicls.add_topics(topics)
    info = read_json(run_folder / "model" / EXPORT_INFO)
    info |= {"step": max(steps, default=0), "averaged_steps": list(steps)}
    info["towards_base"] = towards_base
    info["encoder"] = "MultiVectorEncoder" if multi_vector else "SentenceTransformer"
    with atomic_folder(output) as fresh, quiet_transformers():
        shutil.copytree(run_folder / "model", fresh, dirs_exist_ok=True)
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        if multi_vector:
            write_sentence_transformer(fresh, MULTI_VECTOR_ENCODER)
        write_json(fresh / EXPORT_INFO, info)
        write_card(fresh, run_folder, model.config, info)


if __name__ == "__main__":
    run_command(main)
