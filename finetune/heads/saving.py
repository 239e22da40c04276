"""Saves a fine-tuned model in a folder that loads without this project."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_import_files

import multicls
from finetune.heads.modeling_heads import PooledHead, TaskModel
from multicls.files import atomic_folder
from multicls.from_bert import quiet_transformers
from multicls.tokenization import facet_ids

ENTRY = "modeling_task"  # the saved folder's first module: imports what its head needs, and nothing else
MULTICLS_ENTRY = """
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel
from .modeling_multicls import MultiClsBertConfig, MultiClsBertModel

if MultiClsBertConfig.model_type not in CONFIG_MAPPING:
    AutoConfig.register(MultiClsBertConfig.model_type, MultiClsBertConfig)
    AutoModel.register(MultiClsBertConfig, MultiClsBertModel)
"""


def save_model(model: TaskModel, tokenizer: PreTrainedTokenizerBase, folder: Path, card: str = "") -> None:
    """Saves model, tokenizer and model card with the code that loads them.

    `AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)` loads the model without this
    project. The folder takes its name when it is whole, and everybody may read it.

    Args:
        card: content of README.md, from `finetune.show.cards.model_card`; "": none is written.
    """
    model.config.auto_map = {
        "AutoConfig": f"{ENTRY}.TaskModelConfig",
        "AutoModelForSequenceClassification": f"{ENTRY}.TaskModel",
    }
    heads = [model.config.head, *([model.config.pooling] if isinstance(model.head, PooledHead) else [])]
    files = {Path(__file__).with_name(f"{name}.py") for name in heads}
    files |= {Path(needed) for file in files for needed in get_relative_import_files(file)}
    entry = '"""Loads this model; written when it was saved."""\n\n'
    entry += "from .modeling_heads import TaskModel, TaskModelConfig\n"
    entry += "".join(f"from .{name} import Head as {name}\n" for name in heads)
    if model.config.encoder["model_type"] == "multicls-bert":
        entry += MULTICLS_ENTRY
        model.config.encoder["facet_ids"] = list(facet_ids(tokenizer))
        files |= {Path(multicls.__file__).with_name(f"{kind}_multicls.py") for kind in ("configuration", "modeling")}
    with atomic_folder(folder) as fresh, quiet_transformers():
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        for file in files:
            shutil.copy(file, fresh)
        (fresh / f"{ENTRY}.py").write_text(entry, encoding="utf-8")
        if card:
            (fresh / "README.md").write_text(card, encoding="utf-8")
