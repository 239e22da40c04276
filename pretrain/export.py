"""The Hugging Face folder of a run: weights, tokenizer, code and a model card."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from multicls.initialize import quiet_transformers
from multicls.settings import to_yaml
from pretrain.settings import PretrainSettings

CARD = """---
library_name: transformers
base_model: {base_model}
tags: [multicls-bert, continued-pretraining]
---
# Multi-CLS BERT, K = {facets}, continued from {base_model}

{steps} optimizer steps of {triples} examples ({parts} consecutive parts each) on {data}.

| validation | value |
|---|---|
{metrics}

The tokenizer puts the facets in: `[CLS] [C1..CK] a [SEP] b [SEP]`. It takes all text for text: a literal "[MASK]" in it
is split into pieces (pass `split_special_tokens=False` to change that).

```python
from transformers import AutoModel, AutoTokenizer

folder = "."  # this folder, or its Hub id
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModel.from_pretrained(folder, trust_remote_code=True)
outputs = model(**tokenizer("A sentence.", return_tensors="pt"))
print(outputs.facet_embeddings.shape)  # (1, {embeddings}, {hidden})
```

With `import multicls` the same works without `trust_remote_code`.

<details><summary>Settings</summary>

```yaml
{settings}```
</details>
"""


def full_weights(engine: Any) -> dict[str, Tensor]:
    """All parameters in fp32 on the CPU, gathered over ranks: every rank must call it, rank 0 gets them."""
    from deepspeed.utils import safe_get_full_fp32_param

    state: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        full = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if full is None:
            full = _gathered(parameter)
        if dist.get_rank() == 0:
            state[name] = full.detach().float().cpu().clone()
    return state


def _gathered(parameter: torch.nn.Parameter) -> Tensor:
    if not hasattr(parameter, "ds_id"):  # not partitioned (ZeRO stages 0 to 2)
        return parameter
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        return parameter.detach().clone()


def export(
    engine: Any,
    tokenizer: Any,
    folder: Path,
    settings: PretrainSettings,
    *,
    base_model: str,
    data: str,
    metrics: Mapping[str, float],
) -> None:
    """Writes the folder; an earlier export is replaced only when the new one is whole. All ranks must call it."""
    state = full_weights(engine)
    if dist.get_rank() == 0:
        fresh, old = folder.with_name(".hf_new"), folder.with_name(".hf_old")
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)
        model = engine.module
        for tied, source in model.all_tied_weights_keys.items():
            state.setdefault(tied, state[source])
        with quiet_transformers():
            model.save_pretrained(fresh, state_dict=state)
            tokenizer.save_pretrained(fresh)
        card = CARD.format(
            base_model=base_model,
            facets=model.config.num_facets,
            embeddings=model.config.num_embeddings_per_sequence,
            hidden=model.config.hidden_size,
            steps=settings.train.steps,
            triples=settings.train.triples * settings.train.micro_batches,
            parts=model.config.num_parts,
            data=data,
            metrics="\n".join(f"| {name} | {value:.4f} |" for name, value in sorted(metrics.items())),
            settings=to_yaml(settings),
        )
        (fresh / "README.md").write_text(card, encoding="utf-8")
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
