"""Exports a checkpoint of a pretraining run as a Hugging Face model folder.

python pretrain/export.py runs/base --output exports/base
python pretrain/export.py runs/base --step 20000 --output exports/base_at_20000
python pretrain/export.py runs/base --multi_vector exports/base_vectors
"""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field
from pydantic_settings import CliPositionalArg

from multicls.cards import (
    inherited_metadata,
    write_multi_vector_encoder,
    write_sentence_transformer,
)
from multicls.console import print_summary
from multicls.errors import UserError, run_command
from multicls.files import atomic_folder, lock_holder, read_json, write_json
from multicls.settings import Settings, parse
from pretrain.card import write_card
from pretrain.run_folder import check_whole, checkpoint_path, saved_steps
from pretrain.settings import ProbeSettings

EXPORT_INFO = "export.json"  # in RUN/model: facts for the card; in an export its step, too
FACTS = ("documents", "sentences", "tokens", "sources", "hub_datasets")  # of a manifest: no paths
WEIGHTS = "model.safetensors"


class ExportOptions(Settings):
    """Options of the command."""

    run: CliPositionalArg[Path] = Field(description="run folder of pretrain/run.py, in any state")
    step: int | None = Field(None, description="step of the checkpoint; default: the newest one")
    output: Path | None = Field(None, description="new folder, or an earlier export to replace")
    multi_vector: Path | None = Field(
        None, description="the same for sentence_transformers.MultiVectorEncoder: K vectors a text"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exports a checkpoint. Returns the exit code."""
    options = parse(ExportOptions, argv, prog="pretrain/export.py", doc=__doc__)
    run_folder, flags = (
        options.run,
        {"output": options.output, "multi_vector": options.multi_vector},
    )
    targets = {flag: folder for flag, folder in flags.items() if folder}
    if options.output == options.multi_vector:  # both are None, too
        raise UserError("set --output, --multi_vector, or both, each to a folder of its own.")
    if not (run_folder / "settings.yaml").exists():
        raise UserError(f"{run_folder}: is not a run folder of pretrain/run.py.")
    steps = saved_steps(run_folder / "checkpoints")
    step = max(steps, default=0) if options.step is None else options.step
    if step not in steps:
        known = f"has checkpoints of steps {', '.join(map(str, steps))}"
        raise UserError(f"{run_folder}: {known if steps else 'has no checkpoint to export yet'}.")
    for flag, folder in targets.items():
        check_target(f"--{flag} {folder}", folder, run_folder)
    for flag, folder in targets.items():
        write_model(run_folder, step, folder, multi_vector=flag == "multi_vector")
    lines = [("model", f"{folder} (step {step} of {run_folder})") for folder in targets.values()]
    print_summary(lines, next_command(next(iter(targets.values()))))
    return 0


def check_target(flag: str, folder: Path, run_folder: Path) -> None:
    """Raises UserError if an export may not replace `folder`; `flag` is what the user wrote."""
    if folder.resolve() == (run_folder / "hf").resolve() and lock_holder(run_folder):
        raise UserError(f"{flag}: the training writes this folder; set another one.")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if folder.is_file() or (names and not names >= {EXPORT_INFO, WEIGHTS}):
        raise UserError(f"{flag}: exists and is no export; set a new folder.")


def next_command(folder: Path, probe: ProbeSettings | None = None) -> str:
    """Returns a command that fine-tunes an exported model on labelled rows, with a head that every model has."""
    command = ["python", "finetune/run.py", "--model", str(folder), "--head", "mean"]
    rows = probe or ProbeSettings()
    command += ["--train_file", rows.file or "ROWS.csv"]
    command += ["--text_column", rows.text_column] if rows.text_column else []
    command += ["--label_column", rows.label_column] if rows.label_column != "label" else []
    return shlex.join(command)


def describe_model(
    model: Any, tokenizer: Any, run_folder: Path, source: str, manifest: Mapping[str, Any]
) -> None:
    """Writes configuration, tokenizer and origin of a new model to `RUN/model`: resume and export need no more.

    Call it before DeepSpeed changes the model's precision, which the configuration would then state.

    Args:
        source: Checkpoint that the weights come from; "": random weights.
        manifest: Manifest of the corpus.
    """
    from multicls.build import quiet_transformers

    with atomic_folder(run_folder / "model") as fresh, quiet_transformers():
        model.save_pretrained(fresh, state_dict={})
        (fresh / WEIGHTS).unlink(missing_ok=True)
        tokenizer.save_pretrained(fresh)
        write_sentence_transformer(fresh)
        corpus = {key: manifest.get(key) for key in FACTS}
        corpus["language"] = manifest.get("made_from", {}).get("settings", {}).get("language")
        metadata = inherited_metadata(source) if source else {}
        commit = getattr(model.config, "_commit_hash", None)  # of the Hub
        info = {"metadata": metadata, "corpus": corpus, "base_commit": commit}
        write_json(fresh / EXPORT_INFO, info)


def restore_model(folder: Path) -> tuple[Any, Any]:
    """Returns the model of a `RUN/model` folder without weights, and its tokenizer. Raises UserError if incomplete."""
    from transformers import AutoConfig, AutoModelForPreTraining, AutoTokenizer

    import multicls.modeling_multicls  # noqa: F401 (registers the model)

    if not (folder / EXPORT_INFO).exists():
        raise UserError(
            f"{folder}: is missing or incomplete; it holds the model's configuration and tokenizer, and a run writes "
            "it when it starts. Copy it from where the run was trained."
        )
    options = {"trust_remote_code": False, "local_files_only": True}
    config = AutoConfig.from_pretrained(folder, **options)
    model = AutoModelForPreTraining.from_config(config, trust_remote_code=False)
    return model, AutoTokenizer.from_pretrained(folder, **options)


def write_model(run_folder: Path, step: int, output: Path, *, multi_vector: bool = False) -> None:
    """Writes the checkpoint of `step` as a Hugging Face folder; replaces an earlier one when the new one is whole.

    sentence-transformers reads it as a SentenceTransformer, or as a MultiVectorEncoder if `multi_vector` is True.

    Raises:
        UserError: The checkpoint was deleted meanwhile, as a running training does, or the run has no `RUN/model`.
    """
    from multicls.build import quiet_transformers
    from pretrain.engine import fp32_weights

    model, _ = restore_model(run_folder / "model")
    checkpoint = checkpoint_path(run_folder / "checkpoints", step)
    try:
        check_whole(checkpoint)
        model.load_state_dict(fp32_weights(checkpoint))
    except FileNotFoundError:
        raise UserError(f"{checkpoint}: was deleted meanwhile; export a newer one.") from None
    info = read_json(run_folder / "model" / EXPORT_INFO) | {"step": step}
    info["encoder"] = "MultiVectorEncoder" if multi_vector else "SentenceTransformer"
    with atomic_folder(output) as fresh, quiet_transformers():
        shutil.copytree(run_folder / "model", fresh, dirs_exist_ok=True)
        model.save_pretrained(fresh)
        if multi_vector:
            write_multi_vector_encoder(fresh)
        write_json(fresh / EXPORT_INFO, info)
        write_card(fresh, run_folder, model.config, info)


if __name__ == "__main__":
    run_command(main)
