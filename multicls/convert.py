"""Converts a checkpoint of the authors' code (`model.pt`) to a Hugging Face folder with all pretraining heads.

python -m multicls.convert model.pt --num_facets 3 --facet_layers 1,3 --output runs/authors
python -m multicls.convert model.pt --tokenizer bert-base-uncased --output runs/authors   # training.conf beside it

Sizes are taken from the tensors. Facets and layers default to the values in `training.conf` beside the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from multicls.command_line import CommandLine, fine_tuning_command, print_summary
from multicls.embeddings import write_sentence_transformer
from multicls.errors import UserError, first_line, run_command
from multicls.files import atomic_folder
from multicls.from_bert import quiet_transformers
from multicls.settings import Settings
from multicls.tokenization import facet_ids, with_facets

if TYPE_CHECKING:
    from torch import Tensor

    from multicls.configuration_multicls import MultiClsBertConfig
    from multicls.modeling_multicls import MultiClsBertForPreTraining

THEIRS = {"num_facets": "num_facet", "facet_layers": "diversify_hidden_layer"}  # options -> names in training.conf
DEAD = re.compile(r"sent\.mf\.v_\d+\.|t2f\.|lm\.decoder\.|bert\.embeddings\.position_ids$")
RENAMED = {  # beginnings of names: theirs -> ours
    "bert.": "bert.",
    "trans.": "cls.order_transform.",
    "sent.so.seq_relationship.": "cls.seq_relationship.",
    "lm.": "cls.predictions.",
    "tok.tf_idf.": "cls.tfidf.",
}


class ConvertOptions(Settings):
    """Options of the command."""

    checkpoint: Path = Field(description="the model.pt of the authors' code, {'sd': state dict, 'epoch'}")
    output: Path = Field(description="the folder to write, new or empty")
    num_facets: int | None = Field(
        None, ge=0, description="K; default: num_facet in training.conf beside the checkpoint"
    )
    facet_layers: str | None = Field(
        None,
        description="layers, numbered from 1, after which facets pass their inserted linear layers, separated by "
        "commas; '' for none. The authors' code has the same numbers, as inputs of layers counted from 0. Default: "
        "diversify_hidden_layer in training.conf",
    )
    num_attention_heads: int | None = Field(None, description="default: hidden size / 64")
    mcqt_lambda: float = Field(0.1, ge=0, le=1, description="weight of the best facet pair")
    task_type_row: int = Field(
        0,
        description="row of the authors' task-type table to add to the token types: 0 as in their fine-tuning, or 5 "
        "as in their pretraining",
    )
    tokenizer: str | None = Field(
        None, description="folder or Hub id of the tokenizer to save with the model, with facets added"
    )


COMMAND = CommandLine("python -m multicls.convert", __doc__, ConvertOptions, positional=("checkpoint",))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    args = COMMAND.parse(argv)
    if args.output.is_file() or (args.output.is_dir() and any(args.output.iterdir())):
        raise UserError(f"--output {args.output}: exists already; give a new or empty folder.")
    state = read_checkpoint(args.checkpoint)
    stated = read_training_conf(args.checkpoint.with_name("training.conf"))
    found = {name: getattr(args, name) for name in THEIRS}
    found = {name: stated.get(THEIRS[name]) if value is None else str(value) for name, value in found.items()}
    if missing := [name for name, value in found.items() if value is None]:
        beside = f"{args.checkpoint}: no training.conf beside it states"
        raise UserError(*(f"{beside} {THEIRS[name]}; give --{name}." for name in missing))
    facets = {name: _integers(str(value), f"--{name}") for name, value in found.items()}
    others = args.model_dump(include={"num_attention_heads", "mcqt_lambda", "task_type_row"})
    model = convert(state, num_facets=facets["num_facets"][0], facet_layers=facets["facet_layers"], **others)
    tokenizer = _tokenizer(args.tokenizer, model.config) if args.tokenizer else None
    with atomic_folder(args.output) as folder, quiet_transformers():
        if tokenizer is not None:
            model.config.facet_ids = list(facet_ids(tokenizer))
            tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        write_sentence_transformer(folder)
    size, config = sum(p.numel() for p in model.parameters()), model.config
    shape = f"{config.num_hidden_layers} layers x {config.hidden_size}, K = {config.num_facets}, {config.facet_layers}"
    made = [("model", f"{args.output} ({size:,} parameters, {shape})")]
    if tokenizer is None:
        made.append(("missing", "the tokenizer; convert with --tokenizer bert-base-uncased, or the checkpoint's own"))
    print_summary(made, fine_tuning_command(args.output))


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Loads the state dict of a `model.pt`; unpickles only tensors and plain containers.

    Raises:
        UserError: the file does not exist or is not such a checkpoint.
    """
    import torch

    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"{path}: no such file; give the model.pt.") from None
    except Exception as error:  # the unpickler raises many types; each means that this is no plain checkpoint
        raise UserError(f"{path}: not a checkpoint that loads safely: {first_line(error)}") from None
    state = checkpoint.get("sd") if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict):
        raise UserError(f"{path}: has no state dict under 'sd'; is it a checkpoint of the authors' code?")
    return state


def read_training_conf(path: Path) -> dict[str, str]:
    """Reads the `key = value` lines of the authors' `training.conf`; a missing file has none."""
    if not path.exists():
        return {}
    pattern = re.compile(r"""^\s*["']?(\w+)["']?\s*[=:]\s*["']?([^"'#]*?)["']?\s*,?\s*(?:#.*)?$""")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return {match[1]: match[2].strip() for match in map(pattern.match, lines) if match}


def convert(
    state: dict[str, Tensor],
    *,
    num_facets: int,
    facet_layers: list[int],
    num_attention_heads: int | None = None,
    mcqt_lambda: float = 0.1,
    task_type_row: int = 0,
) -> MultiClsBertForPreTraining:
    """Builds a Multi-CLS model from a state dict of the authors' code. Arguments as in `ConvertOptions`.

    Row `task_type_row` of their task-type table is added to the token types: their pretraining adds row 5 to each
    token, their fine-tuning row 0. Both tables are summed before the LayerNorm, so the result is exact.

    Raises:
        UserError: tensors are missing, left over, or do not have the shapes that the arguments imply.
    """
    import torch

    from multicls.modeling_multicls import MultiClsBertForPreTraining

    state = {key: tensor for key, tensor in state.items() if not DEAD.match(key)}
    facets: dict[str, Any] = {"num_facets": num_facets, "facet_layers": facet_layers, "mcqt_lambda": mcqt_lambda}
    model_config = _config(state, num_attention_heads, **facets)
    task_types = _take(state, "bert.embeddings.task_type_embeddings.weight")
    if not 0 <= task_type_row < len(task_types):
        raise UserError(f"--task_type_row {task_type_row}: the checkpoint's table has rows 0..{len(task_types) - 1}.")
    token_types = _take(state, "bert.embeddings.token_type_embeddings.weight")
    converted = {"bert.embeddings.token_type_embeddings.weight": token_types + task_types[task_type_row]}
    for level, layer in enumerate(facet_layers):
        names = [f"facet_lin_emb.{level}.{k}.weight" for k in range(num_facets)]
        converted[f"bert.encoder.layer.{layer - 1}.facets.weight"] = torch.stack([_take(state, n) for n in names])
    for weight in ("dense.weight", "LayerNorm.weight", "LayerNorm.bias"):
        names = [f"sent.mf.s_{k}.{weight}" for k in range(1, num_facets + 1)]
        converted[f"bert.facet_head.{weight}"] = torch.stack([_take(state, n) for n in names])
    for theirs in list(state):
        for prefix, ours in RENAMED.items():
            if theirs.startswith(prefix):
                converted[ours + theirs.removeprefix(prefix)] = state.pop(theirs)
    if state:
        raise UserError(
            f"a model of {num_facets} facets and {len(facet_layers)} levels of inserted layers has no place for the "
            f"tensors {', '.join(sorted(state)[:5])}. Check --num_facets and --facet_layers."
        )
    converted["cls.predictions.decoder.weight"] = converted["bert.embeddings.word_embeddings.weight"]
    converted["cls.predictions.decoder.bias"] = converted["cls.predictions.bias"]
    model = MultiClsBertForPreTraining(model_config)
    try:
        model.load_state_dict(converted)
    except RuntimeError as error:
        raise UserError(f"the checkpoint does not fit: {' '.join(str(error).split())}") from None
    return model


def _config(state: dict[str, Tensor], num_attention_heads: int | None = None, **facets: Any) -> MultiClsBertConfig:
    """Returns the configuration with the sizes of the tensors."""
    from multicls.configuration_multicls import MultiClsBertConfig

    sizes = {
        "vocab_size": "embeddings.word_embeddings",
        "max_position_embeddings": "embeddings.position_embeddings",
        "type_vocab_size": "embeddings.token_type_embeddings",
        "intermediate_size": "encoder.layer.0.intermediate.dense",
    }
    rows = {field: _look(state, f"bert.{name}.weight").shape[0] for field, name in sizes.items()}
    hidden = _look(state, "bert.embeddings.word_embeddings.weight").shape[1]
    depth = len({key.split(".")[3] for key in state if key.startswith("bert.encoder.layer.")})
    heads = hidden // 64 if num_attention_heads is None else num_attention_heads
    if heads < 1 or hidden % heads:
        raise UserError(f"--num_attention_heads: {heads} does not divide the hidden size {hidden}; give the right one.")
    shape: dict[str, Any] = rows | {"hidden_size": hidden, "num_hidden_layers": depth, "num_attention_heads": heads}
    try:
        return MultiClsBertConfig(**shape, **facets)
    except ValueError as error:
        raise UserError(f"{error}.") from None


def _look(state: dict[str, Tensor], name: str) -> Tensor:
    if name not in state:
        raise UserError(f"the checkpoint has no tensor {name}: is it a pretraining checkpoint of the authors' code?")
    return state[name]


def _take(state: dict[str, Tensor], name: str) -> Tensor:
    _look(state, name)
    return state.pop(name)


def _integers(text: str, flag: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(" ", "").split(",") if part]
    except ValueError:
        raise UserError(f"{flag} {text}: write whole numbers, separated by commas.") from None


def _tokenizer(name: str, config: MultiClsBertConfig) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = with_facets(AutoTokenizer.from_pretrained(name, trust_remote_code=False), config.num_facets)
    except (OSError, ValueError) as error:
        raise UserError(f"--tokenizer {name}: {first_line(error)}") from None
    if len(tokenizer) != config.vocab_size:
        raise UserError(f"--tokenizer {name}: has {len(tokenizer)} tokens, but the checkpoint has {config.vocab_size}.")
    return tokenizer


if __name__ == "__main__":
    run_command(main)
