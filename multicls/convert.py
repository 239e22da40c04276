"""Converts a checkpoint of the authors' code (`model.pt`) to a Hugging Face folder with all pretraining heads.

python -m multicls.convert model.pt --base bert-base-uncased --num_facets 5 --facet_layers 4 8 --output runs/authors

The sizes and the tokenizer are those of the BERT that they started from.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import CliPositionalArg

from multicls.cards import write_sentence_transformer
from multicls.console import print_summary
from multicls.errors import UserError, first_line, run_command
from multicls.files import atomic_folder
from multicls.settings import Settings, parse

IGNORED = re.compile(r"sent\.mf\.v_\d+\.|t2f\.|lm\.decoder\.|bert\.embeddings\.position_ids$")
PREFIXES = {  # beginnings of names: theirs -> ours
    "bert.": "multicls.encoder.",
    "trans.": "order.transform.",
    "sent.so.seq_relationship.": "order.classifier.",
    "lm.": "mlm.lm.cls.predictions.",
    "tok.tf_idf.transform.": "tfidf.",
    "tok.tf_idf.": "tfidf.",
}


class ConvertOptions(Settings):
    """Options of the command."""

    checkpoint: CliPositionalArg[Path] = Field(
        description="model.pt of the authors' code, {'sd': state dict, 'epoch'}"
    )
    output: Path = Field(description="the folder to write, new or empty")
    num_facets: int = Field(ge=1, description="K; num_facet in the authors' training.conf")
    facet_layers: list[int] = Field(
        [], description="layers followed by inserted linears; their diversify_hidden_layer"
    )
    base: str = Field(description="the BERT that it was started from: folder or Hub id")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    args = parse(ConvertOptions, argv, prog="python -m multicls.convert", doc=__doc__)
    if args.output.is_file() or (args.output.is_dir() and any(args.output.iterdir())):
        raise UserError(f"--output {args.output}: exists already; set a new or empty folder.")
    from multicls.build import build, quiet_transformers  # imports torch

    state = _read_checkpoint(args.checkpoint)
    facets = args.model_dump(include={"num_facets", "facet_layers"})
    model, tokenizer = build(args.base, random_weights=True, report=lambda _: None, **facets)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    try:
        weights = _renamed(state, args)
        ties = model.all_tied_weights_keys
        model.load_state_dict(weights | {name: weights[same] for name, same in ties.items()})
    except (KeyError, RuntimeError) as error:
        raise UserError(
            "the checkpoint does not fit --base, --num_facets and --facet_layers: "
            f"{' '.join(str(error).split())}"
        ) from None
    with atomic_folder(args.output) as folder, quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_sentence_transformer(folder)
    next_command = f"python finetune/run.py --model {args.output} --head multicls"
    print_summary([("model", args.output)], next_command)


def _read_checkpoint(path: Path) -> dict[str, Any]:
    """Loads the state dict of a `model.pt`; unpickles only tensors and plain containers. Raises UserError."""
    import torch

    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises many types
        raise UserError(f"{path}: does not load safely: {first_line(error)}") from None
    state = checkpoint.get("sd") if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict):
        raise UserError(f"{path}: has no state dict under 'sd'; is it of the authors' code?")
    return {name: tensor for name, tensor in state.items() if not IGNORED.match(name)}


def _renamed(state: dict[str, Any], options: ConvertOptions) -> dict[str, Any]:
    """Returns the weights by our names."""
    import torch

    # The row of the task types that their fine-tuning uses is added to the token types: both are summed before the
    # LayerNorm, so this is exact. Their third token type is left out: no input has it.
    types, tasks = (f"bert.embeddings.{kind}_type_embeddings.weight" for kind in ("token", "task"))
    state[types] = state[types][:2] + state.pop(tasks)[0]
    facets, renamed = range(options.num_facets), {}
    for level, layer in enumerate(options.facet_layers):
        names = [f"facet_lin_emb.{level}.{k}.weight" for k in facets]
        name = f"multicls.encoder.encoder.layer.{layer - 1}.facets.weight"
        renamed[name] = torch.cat([state.pop(name) for name in names])
    for weight in ("dense.weight", "LayerNorm.weight", "LayerNorm.bias"):
        parts = [state.pop(f"sent.mf.s_{k + 1}.{weight}") for k in facets]
        joined = torch.cat(parts) if weight == "dense.weight" else torch.stack(parts)
        renamed[f"multicls.facet_head.{weight}"] = joined
    for name in list(state):
        if prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), ""):
            renamed[PREFIXES[prefix] + name.removeprefix(prefix)] = state.pop(name)
    return renamed | state  # torch refuses what is left by name


if __name__ == "__main__":
    run_command(main)
