"""Exports a checkpoint of a pretraining run as a Hugging Face model folder.

python pretrain/export.py runs/base --output exports/base
python pretrain/export.py runs/base --step 20000 --output exports/base_at_20000
"""

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field
from pydantic_settings import CliPositionalArg

from multicls.cards import (
    EXPORT_INFO,
    SENTENCE_CONFIG,
    inherited_metadata,
    write_sentence_transformer,
)
from multicls.console import print_summary
from multicls.errors import UserError, print_stderr, run_command
from multicls.files import atomic_folder, lock_holder, read_json, write_json
from multicls.settings import Settings, load_settings, parse
from pretrain.card import write_card
from pretrain.folder import RunFolder
from pretrain.settings import ModelSettings, PretrainSettings

WHOLE_TEXT = (
    1_000_000  # tokens of a text that sentence-transformers passes to a model with topics, at most
)
FACTS = ("documents", "sentences", "tokens", "sources", "hub_datasets")  # of a manifest: no paths
WEIGHTS = "model.safetensors"
LOCAL: Any = {"trust_remote_code": False, "local_files_only": True}  # for `from_pretrained`


class ExportOptions(Settings):
    """Options of the command."""

    run: CliPositionalArg[Path] = Field(description="run folder of pretrain/run.py, in any state")
    step: int | None = Field(
        None, description="step of the checkpoint; default: the best or newest"
    )
    output: Path = Field(description="new folder, or an earlier export to replace")


def main(argv: Sequence[str] | None = None) -> int:
    """Exports a checkpoint. Returns the exit code."""
    options = parse(ExportOptions, argv, prog="pretrain/export.py", doc=__doc__)
    folder, output = RunFolder(options.run), options.output
    if not folder.settings.exists():
        raise UserError(f"{folder.path}: is not a run folder of pretrain/run.py.")
    steps = folder.saved_steps
    step = chosen_step(folder, steps) if options.step is None else options.step
    if step not in steps:
        known = f"has checkpoints of steps {', '.join(map(str, steps))}"
        raise UserError(f"{folder.path}: {known if steps else 'has no checkpoint to export yet'}.")
    if output.resolve() == folder.export.resolve() and lock_holder(folder.path):
        raise UserError(f"--output {output}: the training writes this folder; set another one.")
    names = {path.name for path in output.iterdir()} if output.is_dir() else set()
    if output.is_file() or (names and not names >= {EXPORT_INFO, WEIGHTS}):
        raise UserError(f"--output {output}: exists and is no export; set a new folder.")
    write_model(folder, step, output)
    command = next_command(output, settings_of(folder))
    print_summary([("model", f"{output} (step {step} of {folder.path})")], command)
    return 0


def chosen_step(folder: RunFolder, steps: Sequence[int]) -> int:
    """Returns the step of the best checkpoint where the run keeps it, else of the newest; 0: there is none."""
    keeps_best, best = settings_of(folder).run.keep_best, folder.best_step
    if keeps_best and not best and folder.done.exists():
        print_stderr(
            f"note: no step was better than step 0, so {folder.export} is the model before training; this is that of "
            f"step {max(steps, default=0)}"
        )
    return best if keeps_best and best in steps else max(steps, default=0)


def settings_of(folder: RunFolder) -> PretrainSettings:
    """Returns the settings of a run, with its length and intervals in steps."""
    return load_settings(PretrainSettings, [folder.settings])


def next_command(folder: Path, settings: PretrainSettings) -> str:
    """Returns a command that compares an exported model with the original one on labelled rows."""
    rows = settings.probe
    command = ["python", "finetune/compare.py", "--train_file", rows.file or "ROWS.csv"]
    for name, value in rows.model_dump(exclude={"file"}, exclude_defaults=True).items():
        command += [f"--{name}", str(value)]
    if not settings.model.random_weights:
        command += ["--model", f"original={settings.model.checkpoint}"]
    return shlex.join([*command, "--model", f"mine={folder}"])


def describe_model(
    model: Any, tokenizer: Any, folder: RunFolder, source: str, manifest: Mapping[str, Any]
) -> None:
    """Writes configuration, tokenizer and origin of a new model to `RUN/model`: resume and export need no more.

    Call it before DeepSpeed changes the model's precision, which the configuration would then state.

    Args:
        source: Checkpoint that the weights come from; "": random weights.
    """
    from multicls.build import quiet_transformers

    with atomic_folder(folder.model) as fresh, quiet_transformers():
        model.save_pretrained(fresh, state_dict={})
        (fresh / WEIGHTS).unlink(missing_ok=True)
        tokenizer.save_pretrained(fresh)
        write_sentence_transformer(fresh, model.sentence_files)
        corpus = {key: manifest.get(key) for key in FACTS}
        corpus["language"] = manifest.get("made_from", {}).get("settings", {}).get("language")
        info = {
            "metadata": inherited_metadata(source) if source else {},
            "corpus": corpus,
            "base_commit": getattr(model.config, "_commit_hash", None),  # of the Hub
            "new_weights": sorted(model.new_weights),
        }
        write_json(fresh / EXPORT_INFO, info)


def load_topics(folder: RunFolder) -> dict[str, Any]:
    """Returns the state of the run's `TopicTable`, {} if it has none."""
    from safetensors.torch import load_file

    return load_file(folder.topics) if folder.topics.exists() else {}


def restore_model(folder: RunFolder) -> tuple[Any, Any]:
    """Returns the model of a run's `RUN/model` without weights, and its tokenizer. Raises UserError if incomplete.

    The model's attribute `new_weights` names those that were new when the run began.
    """
    from transformers import AutoConfig, AutoModelForPreTraining, AutoTokenizer

    import multicls.modeling_multicls  # noqa: F401 (registers the model)

    path = folder.model
    if not (path / EXPORT_INFO).exists():
        raise UserError(
            f"{path}: is missing or incomplete; it holds the model's configuration and tokenizer, and a run writes "
            "it when it starts. Copy it from where the run was trained."
        )
    config = AutoConfig.from_pretrained(path, **LOCAL)
    model = AutoModelForPreTraining.from_config(config, trust_remote_code=False)
    model.new_weights = frozenset(read_json(path / EXPORT_INFO).get("new_weights", []))
    return model, AutoTokenizer.from_pretrained(path, **LOCAL)


def build_model(
    model: ModelSettings, report: Callable[[str], None] = lambda line: None, facets: bool = True
) -> tuple[Any, Any]:
    """Returns a new model and its tokenizer; without `facets` it has none but those of the base model.

    huggingface_hub locks each file that it downloads.
    """
    from multicls.build import build
    from multicls.sample import SAMPLE, sample_model

    checkpoint = str(sample_model()) if model.checkpoint == SAMPLE else model.checkpoint
    fields = model.model_dump(exclude={"checkpoint", "num_topics", "teacher"})
    if not facets:
        fields |= {"num_facets": None, "facet_layers": None}
    return build(checkpoint, **fields, report=report)


def model_before(folder: RunFolder) -> tuple[Any, Any]:
    """Returns the model that a run began with, without new facets, and its tokenizer.

    With `run.keep_best` the run has saved it; else it is built again.
    """
    import torch
    from transformers import AutoModelForPreTraining, AutoTokenizer

    from multicls.build import quiet_transformers  # registers the model, too

    if folder.before.exists():
        with quiet_transformers():
            model = AutoModelForPreTraining.from_pretrained(folder.before, **LOCAL)
            return model, AutoTokenizer.from_pretrained(folder.before, **LOCAL)
    settings, commit = settings_of(folder), read_json(folder.model / EXPORT_INFO)["base_commit"]
    torch.manual_seed(settings.train.seed)
    source = settings.model.model_copy(update={"revision": commit or settings.model.revision})
    return build_model(source, facets=False)


def read_whole_texts(config: Any, folder: Path) -> None:
    """Lets sentence-transformers pass whole texts to a model with topics; its encoder reads as much as before.

    Args:
        folder: The exported model, with the files of sentence-transformers.
    """
    sentence = read_json(folder / SENTENCE_CONFIG)
    before = sentence.get("max_seq_length") or config.max_tokens
    config.encoder_tokens = min(before, config.max_tokens)
    write_json(folder / SENTENCE_CONFIG, sentence | {"max_seq_length": WHOLE_TEXT})


def write_model(folder: RunFolder, step: int, output: Path) -> None:
    """Writes the model of a step as a Hugging Face folder; replaces an earlier one when the new one is whole.

    Args:
        step: Step of a checkpoint; 0: the model before training, without new facets.

    Raises:
        UserError: The checkpoint was deleted meanwhile, as a running training does, the run has no `RUN/model`, or the
            base model is not available.
    """
    from multicls.build import quiet_transformers
    from pretrain.engine import fp32_weights

    topics = load_topics(folder)
    if step:
        model, tokenizer = restore_model(folder)
        info = read_json(folder.model / EXPORT_INFO)
        model.freeze_unused(settings_of(folder).objective.in_use)
        frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
        info["new_weights"] = sorted(model.new_weights & frozen)  # which no step has trained
        try:
            folder.meta(step)  # refuses a damaged one
            model.load_state_dict(fp32_weights(folder.checkpoint(step)))
        except FileNotFoundError:
            path = folder.checkpoint(step)
            raise UserError(f"{path}: was deleted meanwhile; export a newer one.") from None
    else:
        model, tokenizer = model_before(folder)
        info = read_json(folder.model / EXPORT_INFO)
        if topics:  # the vocabulary that they were made for, which may have new facets
            model.resize_token_embeddings(len(topics["idf"]), mean_resizing=False)
    if topics:
        model.multicls.add_topics(topics)
    info["step"] = step
    with atomic_folder(output) as fresh, quiet_transformers():
        shutil.copytree(folder.model, fresh, dirs_exist_ok=True)
        if topics:
            read_whole_texts(model.config, fresh)
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        write_json(fresh / EXPORT_INFO, info)
        write_card(fresh, folder, model.config, info)


if __name__ == "__main__":
    run_command(main)
