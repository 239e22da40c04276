"""`hire`: hidden representation extractor and fusion network (Yang and Zhao, arXiv:1911.01940).

Shape legend: N = l + 1 representations H_0 (embeddings) .. H_l of a sequence, R = H_l.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import PreTrainedModel

from .modeling_task import Head, TaskModelConfig, dropout_of


class HireHead(Head):
    """Weighs all layers by a GRU that reads them, sums them, and fuses the sum with the last layer by a second GRU.

    U_i = the four final states of one two-layer bidirectional GRU over H_i (Eq. 2); alpha_i = ReLU(w^T U_i + b)
    (Eq. 3); S = softmax(alpha) (Eq. 4); A = sum_i S_i H_i (Eq. 5); M = [R; A; R+A; R*A] (Eq. 6); F = bidirectional
    GRU(M) (Eq. 7); embedding = tanh(W_1 C + b_1), C the first row of F (Eq. 8, with W_2 and b_2 in the classifier).

    Ablations are options: `layers` "none" (A = R), `fusion` False (C is the first row of A), `fusion_layers` 0 (of M)
    to 3 (Table 6). Padding does not reach the GRUs.
    """

    reads_layers = True
    dropout_before_classifier = False  # the paper's is in the encoder and the GRUs

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        super().__init__(config, encoder)
        size, options, dropout = self.width, config.head_options, dropout_of(config)
        self.layers, self.fuses = options.get("layers", "dynamic"), options.get("fusion", True)
        fusion_layers = options.get("fusion_layers", 2) if self.fuses else 0
        self.fusion, width = None, 4 * size if self.fuses else size
        if self.layers == "dynamic":
            self.reader = _gru(size, size, 2, dropout)
            self.importance = nn.Linear(4 * size, 1)
        if fusion_layers:
            self.fusion, width = _gru(4 * size, size, fusion_layers, dropout), 2 * size
        self.dense = nn.Linear(width, size)

    def forward(self, hidden: Tensor, mask: Tensor, layers: Sequence[Tensor]) -> Tensor:
        """Returns the embedding, (B, D), from all layers."""
        hidden_NBLD, lengths_B = torch.stack(list(layers)), mask.sum(dim=1).cpu()
        R = A = hidden_NBLD[-1]
        if self.layers == "dynamic":
            weights_BN = self.weigh(hidden_NBLD, lengths_B)
            A = torch.einsum("bn,nbld->bld", weights_BN.to(hidden_NBLD.dtype), hidden_NBLD)
        fused_BLE = torch.cat([R, A, R + A, R * A], dim=-1) if self.fuses else A
        if self.fusion is not None:
            packed, _ = self.fusion(_pack(fused_BLE, lengths_B))
            fused_BLE, _ = pad_packed_sequence(packed, batch_first=True)
        return torch.tanh(self.dense(fused_BLE[:, 0]))

    def weigh(self, hidden_NBLD: Tensor, lengths_B: Tensor) -> Tensor:
        """Returns S, (B, N). All layers of all sequences go through the GRU as one batch of N * B."""
        count, rows = hidden_NBLD.shape[:2]
        _, final_4XD = self.reader(_pack(hidden_NBLD.flatten(0, 1), lengths_B.repeat(count)))
        summaries = final_4XD.transpose(0, 1).reshape(count, rows, -1)
        scores_NB = self.importance(summaries).squeeze(-1).relu()
        return scores_NB.float().softmax(dim=0).T


def _gru(input_size: int, size: int, layers: int, dropout: float) -> nn.GRU:
    between = dropout if layers > 1 else 0.0  # torch warns of dropout in a single layer
    return nn.GRU(input_size, size, layers, batch_first=True, dropout=between, bidirectional=True)


def _pack(states_BLD: Tensor, lengths_B: Tensor) -> Any:
    return pack_padded_sequence(states_BLD, lengths_B, batch_first=True, enforce_sorted=False)


HEADS = {"hire": HireHead}
