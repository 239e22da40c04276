"""`cln`: conditional layer normalisation, one encoder for several tasks.

y = (x - mu) / sqrt(var + eps) * (gamma + gamma_t) + (beta + beta_t), gamma_t and beta_t one row a task (Eq. 4).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from .modeling_task import IncompatibleHead, PooledHead, TaskModelConfig, base_encoder


class ConditionalLayerNorm(nn.LayerNorm):
    """A layer normalisation whose weight and bias each task changes by vectors of its own, which start at 0."""

    task: int = 0  # of the batch

    def __init__(self, norm: nn.LayerNorm, num_tasks: int) -> None:
        super().__init__(norm.normalized_shape, eps=norm.eps)
        self.weight, self.bias = norm.weight, norm.bias  # ModernBERT's bias is None: beta is 0
        self.task_weight = nn.Parameter(torch.zeros(num_tasks, *norm.normalized_shape))
        self.task_bias = nn.Parameter(torch.zeros(num_tasks, *norm.normalized_shape))

    def forward(self, input: Tensor) -> Tensor:
        """Returns the normalised input, (..., D)."""
        weight_D, bias_D = self.weight + self.task_weight[self.task], self.task_bias[self.task]
        if self.bias is not None:
            bias_D = self.bias + bias_D
        return F.layer_norm(input, self.normalized_shape, weight_D, bias_D, self.eps)


class ClnHead(PooledHead):
    """The embedding of `config.pooling`, on an encoder whose LayerNorms (also that of the embeddings) are conditional.

    With `train` "last_linear" the checkpoint's weights are frozen: gamma_t, beta_t, classifiers and new weights learn.
    """

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        if config.head_options.get("train", "full") == "last_linear":
            encoder.requires_grad_(False)
        super().__init__(config, encoder)
        norms = list[ConditionalLayerNorm]()
        for parent in list(base_encoder(encoder).modules()):  # without the head of the facets
            for name, child in parent.named_children():
                if isinstance(child, nn.LayerNorm):
                    norms.append(ConditionalLayerNorm(child, len(config.tasks)))
                    setattr(parent, name, norms[-1])
        if not norms:
            raise IncompatibleHead("its normalisations are no LayerNorms, which `cln` conditions.")
        self.norms = tuple(norms)  # no list: they are not to be registered a second time

    def select_task(self, task: int) -> None:
        """Makes the encoder use gamma_t and beta_t of that task."""
        for norm in self.norms:
            norm.task = task


HEADS = {"cln": ClnHead}
