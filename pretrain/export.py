"""Exports a checkpoint of a pretraining run as a Hugging Face model folder.

python pretrain/export.py runs/base --output exports/base
python pretrain/export.py runs/base --step 20000 --output exports/base_at_20000
python pretrain/export.py runs/base --finish       # a run that was stopped for good: runs/base/hf
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field, model_validator

from multicls.command_line import CommandLine, fine_tuning_command, print_summary
from multicls.embeddings import write_sentence_transformer
from multicls.errors import UserError, did_you_mean, print_stderr, run_command
from multicls.files import atomic_folder, lock_holder, locked, read_json, read_jsonl, write_json
from multicls.settings import Settings
from pretrain.card import write_card
from pretrain.run_folder import COMPLETE, DONE, STOPPED, WEIGHTS, checkpoint_path, complete_steps, find_damage, status

if TYPE_CHECKING:
    from torch import Tensor

FACTS = "export.json"  # in an export: its step, origin and validation; in RUN/model: the origin
VOCABULARY_ROWS = ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias")


class ExportOptions(Settings):
    """Options of the command."""

    run: Path = Field(description="the run folder of pretrain/run.py, in any state")
    step: int | None = Field(None, description="step of the checkpoint; default: the newest whole one")
    output: Path | None = Field(None, description="new folder, or an earlier export to replace")
    finish: bool = Field(False, description="export to RUN/hf and mark the run as finished, instead of --output")

    @model_validator(mode="after")
    def _one_target(self) -> ExportOptions:
        if self.finish == (self.output is not None):
            raise ValueError("give either --output FOLDER, or --finish")
        return self


COMMAND = CommandLine("pretrain/export.py", __doc__, ExportOptions, positional=("run",))


def main(argv: Sequence[str] | None = None) -> int:
    """Exports a checkpoint and, if asked, ends the run with it. Returns the exit code."""
    args = COMMAND.parse(argv)
    run_folder, output = args.run, args.output or args.run / "hf"
    check_run(run_folder)
    if args.finish:
        text, finished = status(run_folder)
        if finished:
            print(f"{run_folder}: already {text}; the model is in {output}")
            return 0
        if lock_holder(run_folder) is not None:
            raise UserError(f"{run_folder}: is being trained; stop the training first (SIGTERM saves and leaves).")
    elif output.resolve() == (run_folder / "hf").resolve() and lock_holder(run_folder) is not None:
        raise UserError(f"--output {output}: the training writes this folder itself; give another one.")
    elif not _may_be_replaced(output):
        raise UserError(f"--output {output}: exists and is not an export of this program; give a new folder.")
    with locked(run_folder) if args.finish else nullcontext():  # no training may start meanwhile
        weights, step = load_weights(run_folder, args.step)
        print(f"exporting {checkpoint_path(run_folder / 'checkpoints', step)} to {output}", flush=True)
        facts = write_model(weights, run_folder, step, output)
        if args.finish:
            write_json(run_folder / DONE, {"step": step, "validation": facts["validation"]})
            (run_folder / STOPPED).unlink(missing_ok=True)
    done = f"{run_folder} is finished at step {step}" if args.finish else f"step {step} of {run_folder}"
    print_summary([("model", f"{output} ({done})")], fine_tuning_command(output))
    return 0


def check_run(run_folder: Path) -> None:
    """Refuses, with a `UserError`, a folder that is no run folder or lacks the model's configuration or checkpoints."""
    if not (run_folder / "settings.yaml").exists():
        runs = [str(path.parent) for path in run_folder.absolute().parent.glob("*/settings.yaml")]
        raise UserError(f"{run_folder}: is not a run folder of pretrain/run.py.{did_you_mean(str(run_folder), runs)}")
    if not (run_folder / "model" / FACTS).exists():
        raise UserError(
            f"{run_folder / 'model'}: is missing or not whole; it holds the model's configuration and tokenizer, and a "
            "training writes it when it starts. Copy it from where the run was trained."
        )
    if not complete_steps(run_folder / "checkpoints"):
        raise UserError(f"{run_folder}: has no checkpoint yet; wait for step run.save_every, or stop the training.")


def load_weights(run_folder: Path, step: int | None = None) -> tuple[dict[str, Tensor], int]:
    """Loads the weights of a checkpoint whose checksums are right; returns them and the checkpoint's step.

    Checks only the files that it reads. Without `step` it takes the newest whole checkpoint, with a warning for each
    damaged one, and again the newest if a training process deletes that one meanwhile.

    Raises:
        UserError: there is no checkpoint of that step, or it is damaged, or all are.
    """
    from safetensors.torch import load

    folder, damaged = run_folder / "checkpoints", set[int]()
    while steps := [number for number in complete_steps(folder) if number not in damaged]:
        if step is not None and step not in steps:
            raise UserError(f"--step {step}: {run_folder} has checkpoints of steps {', '.join(map(str, steps))}.")
        number = steps[-1] if step is None else step
        path = checkpoint_path(folder, number)
        damage = find_damage(path, [WEIGHTS])
        try:
            if not damage:
                return load((path / WEIGHTS).read_bytes()), number
        except FileNotFoundError as error:
            damage = str(error)
        if not (path / COMPLETE).exists():  # deleted by the training process
            continue
        problem = f"checkpoint {path} is damaged and cannot be exported: {damage}"
        if step is not None:
            raise UserError(f"{problem}. Give another --step, or none for the newest whole checkpoint.")
        print_stderr(f"WARNING: {problem}")
        damaged.add(number)
    raise UserError(f"{folder}: no whole checkpoint is left; nothing can be exported.")


def export(engine: Any, run_folder: Path, step: int) -> None:
    """Writes the engine's model to `RUN/hf` with what `describe_model` has written. All ranks must call it.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    from multicls.distributed import on_rank_0
    from pretrain.engine import full_weights

    weights = full_weights(engine)
    on_rank_0(lambda: write_model(weights, run_folder, step, run_folder / "hf"))


def describe_model(model: Any, tokenizer: Any, run_folder: Path, origin: Mapping[str, Any]) -> None:
    """Writes what an export needs besides weights to `RUN/model`; call it on rank 0 at the start of a fresh run.

    Call it before DeepSpeed changes the model's precision, which the configuration would then ask for, and the size of
    its vocabulary. `origin` is for the model card, from `pretrain.card.origin_of`.
    """
    from multicls.from_bert import quiet_transformers

    with atomic_folder(run_folder / "model") as fresh, quiet_transformers():
        model.save_pretrained(fresh, state_dict={})
        (fresh / WEIGHTS).unlink(missing_ok=True)
        tokenizer.save_pretrained(fresh)
        write_sentence_transformer(fresh)
        write_json(fresh / FACTS, {"origin": origin})


def write_model(weights: Mapping[str, Tensor], run_folder: Path, step: int, output: Path) -> dict[str, Any]:
    """Writes a Hugging Face folder; an earlier one is replaced only when the new one is whole.

    Returns what export.json says: the facts of `describe_model`, the step, and the last validation metrics.

    Raises:
        UserError: the folder cannot be written, or the weights do not have the vocabulary's size.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from multicls.configuration_multicls import MultiClsBertConfig

    config = MultiClsBertConfig.from_json_file(str(run_folder / "model" / "config.json"))
    weights = without_padding(weights, config.vocab_size)
    facts = read_json(run_folder / "model" / FACTS) | {"step": step, "validation": last_validation(run_folder, step)}
    try:
        with atomic_folder(output) as fresh:
            shutil.copytree(run_folder / "model", fresh, dirs_exist_ok=True)
            save_file(weights, fresh / WEIGHTS, metadata={"format": "pt"})
            write_json(fresh / FACTS, facts)
            write_card(fresh, run_folder, step, config, facts)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{output}: the export of step {step} could not be written: {error}. Make room.") from None
    return facts


def without_padding(weights: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Returns the weights without the rows that training appends to the vocabulary (for speed).

    Raises:
        UserError: a tensor of `VOCABULARY_ROWS` has fewer than `vocab_size` rows.
    """
    for name in VOCABULARY_ROWS:
        if len(weights[name]) < vocab_size:
            raise UserError(f"{name}: has {len(weights[name])} rows, but config.json says vocab_size = {vocab_size}.")
    return dict(weights) | {name: weights[name][:vocab_size].clone() for name in VOCABULARY_ROWS}


def last_validation(run_folder: Path, step: int) -> dict[str, float]:
    """Returns the metrics of the last validation up to `step`; {} if there is none."""
    records = read_jsonl(run_folder / "metrics.jsonl")
    records = [record for record in records if record["split"] == "validation" and record["step"] <= step]
    return {name: value for name, value in records[-1].items() if "/" in name} if records else {}


def _may_be_replaced(folder: Path) -> bool:
    if not folder.is_dir():
        return not folder.exists()
    names = {path.name for path in folder.iterdir()}
    return not names or names >= {FACTS, WEIGHTS}


if __name__ == "__main__":
    run_command(main)
