"""Loads a Hugging Face model, checks that it fits the tasks, and builds a head on it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multicls.cards import METHOD, PAPERS, TRANSFORMERS, cell, inherited_metadata, model_link
from multicls.errors import UserError, first_line
from multicls.files import REPOSITORY, missing_folder, read_json
from multicls.sample import SAMPLE, sample_model
from multicls.tokenization import model_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from finetune.heads.modeling_task import TaskModel
    from finetune.settings import RunSettings
    from finetune.tasks import Task

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
DOWNLOADED = ("*.json", "*.txt", "*.model", "README.md")
ENTRY = "task_model"  # a saved folder's first module, which imports all others
NOT_A_HEAD = ("__init__", "build", "modeling_task")


class Incompatible(UserError):
    """A head does not work on a model or task: no failure, a grid leaves such runs out."""


@lru_cache(maxsize=16)
def find_checkpoint(name: str) -> Path:
    """Returns the model folder `name`, that of `multicls.sample`, or the Hub's; if none fits, it is a `UserError`."""
    folder = sample_model() if name == SAMPLE and not Path(name).exists() else Path(name)
    if missing := missing_folder(name):
        raise UserError(f"--model {name}: {missing}")
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            for pattern in WEIGHTS:  # the second one only where there is none of the first
                folder = Path(snapshot_download(name, allow_patterns=[*DOWNLOADED, pattern]))
                if any(folder.glob(pattern)):
                    break
        except Exception as error:  # huggingface_hub, HTTP clients and sockets raise their own
            reason = first_line(error).rstrip(".")
            raise UserError(f"--model {name}: no such folder, nor on the Hub: {reason}.") from None
    if not (folder / "config.json").exists():
        raise UserError(f"--model {name}: holds no config.json; pass the exported model (RUN/hf).")
    if read_json(folder / "config.json").get("model_type") == "encoder-with-head":
        raise UserError(f"--model {name}: is fine-tuned; pass the model that it was trained from.")
    return folder


def build_model(settings: RunSettings, tasks: Sequence[Task]) -> tuple[TaskModel, Tokenizer]:
    """Returns the encoder of `settings.model` with a head and a classifier for each task, in float32; its tokenizer.

    New weights are drawn from torch's generator, seeded by `settings.seed`. No code in the model's folder runs. A wrong
    head is `Incompatible`, all else a `UserError`.
    """
    import torch
    from transformers import AutoModel

    from finetune.heads.modeling_task import IncompatibleHead, TaskModel, TaskModelConfig
    from multicls.build import load_problems, load_weights, quiet_transformers
    from multicls.embeddings import most_tokens

    torch.manual_seed(settings.seed)
    name, folder = settings.model, find_checkpoint(settings.model)
    with load_problems(str(folder)), quiet_transformers():
        encoder, _ = load_weights(AutoModel, str(folder), r"(.*\.)?pooler\..*")
        tokenizer = model_tokenizer(folder, encoder.config.vocab_size)
    least = len(tokenizer([""], [""])["input_ids"][0]) + 2  # a token of each of two texts
    most = most_tokens(encoder.config, tokenizer)
    longest = max(task.max_length for task in tasks)
    if not least <= longest <= most:
        raise UserError(f"--max_length {longest}: {name} reads {least} to {most} tokens.")
    config = TaskModelConfig(
        encoder=encoder.config,
        head=settings.head,
        head_options=settings.model_dump().get(settings.head, {}),
        pooling=settings.pooling,
        tasks=[task.describe() for task in tasks],
        dropout=settings.train.dropout,
    )
    try:
        return TaskModel(config, encoder), tokenizer
    except IncompatibleHead as error:
        raise Incompatible(f"--head {settings.head}: {name}: {error}") from None


def model_card(
    source: str,
    head: str,
    tasks: Sequence[Task],
    pooling: str = "",
    scores: str = "",
    training: str = "",
    **metadata: Any,
) -> str:
    """Returns the card of a fine-tuned model as Markdown with the Hub's metadata.

    Args:
        source: The model that it was trained from.
        pooling: The embedding that the heads isobn and cln read.
        scores: A table, or "" if finetune/compare.py's report has them.
        training: The recipe of finetune/run.py, or "" after finetune/compare.py.
        metadata: More of the Hub's, such as `datasets`.
    """
    from huggingface_hub import ModelCard, ModelCardData

    inherited, task = inherited_metadata(source), tasks[0]
    is_plain = not (task.num_choices or task.num_spans)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-classification" if is_plain else None,
        tags=["text-classification"],
        **metadata,
        **inherited,
    )
    papers = dict.fromkeys([*[METHOD] * (METHOD in (head, pooling)), head])
    card = ModelCard.from_template(
        data,
        template_path=str(REPOSITORY / "finetune" / "card.md.jinja"),
        cell=cell,
        tasks=tasks,
        task=task,
        is_plain=is_plain,
        head=head,
        start=model_link(inherited),
        scores=scores,
        training=training,
        license=inherited.get("license_name") or inherited.get("license"),
        transformers=TRANSFORMERS,
        citations=[PAPERS[name] for name in papers if name in PAPERS],
    )
    return str(card)


def load_fine_tuned(folder: str) -> tuple[TaskModel, Tokenizer]:
    """Returns model and tokenizer that `--save_model` has saved; what cannot be loaded is a `UserError`."""
    import multicls.modeling_multicls  # noqa: F401 (registers the model type of the encoder in it)
    from finetune.heads.modeling_task import TaskModel
    from multicls.build import load_problems, quiet_transformers

    with load_problems(folder), quiet_transformers():
        model: TaskModel = TaskModel.from_pretrained(folder)
        return model, model_tokenizer(folder, model.encoder.config.vocab_size)


def save_fine_tuned(model: TaskModel, tokenizer: Tokenizer, folder: Path, card: str = "") -> None:
    """Writes model, tokenizer, README.md and the code of all heads into a folder: it loads without this project."""
    from finetune.heads.modeling_task import MULTICLS
    from multicls.build import quiet_transformers

    model.config.auto_map = {
        "AutoConfig": f"{ENTRY}.TaskModelConfig",
        "AutoModelForSequenceClassification": f"{ENTRY}.TaskModel",
    }
    here = Path(__file__).parent
    files = sorted(file for file in here.glob("*.py") if file.stem not in NOT_A_HEAD)
    entry = '"""Loads this model; written when it was saved."""\n\n'
    entry += "from .modeling_task import TaskModel, TaskModelConfig\n"
    entry += "".join(f"from .{file.stem} import HEADS as {file.stem}_heads\n" for file in files)
    files.append(here / "modeling_task.py")
    if model.config.encoder["model_type"] == MULTICLS:
        entry += "from .modeling_multicls import MultiClsModel\n"  # it registers itself
        names = ("configuration_multicls.py", "modeling_multicls.py")
        files += [REPOSITORY / "multicls" / name for name in names]
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for file in files:
        shutil.copy(file, folder)
    (folder / f"{ENTRY}.py").write_text(entry, encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")
