"""Multi-CLS models (arXiv:2210.05043) on any encoder. Travels with saved models: needs torch and transformers alone.

Shape legend: G groups of n examples (the examples of a group are each other's negatives), P parts of an example,
B = P * G * n sequences, L tokens, D hidden size, K facets (extra CLS tokens), S = max(K, 1) embeddings of one sequence,
M labelled positions, V vocabulary, C classes.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPoolingAndCrossAttentions,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils import can_return_tuple

from .configuration_multicls import MultiClsConfig

IGNORE_INDEX = -100  # label of positions without a target
OBJECTIVES = ("mlm", "tfidf", "so", "mcqt", "anchor")
PACKED_ATTENTION = ("varlen", "flash_attention_2")  # implementations that read packed sequences
UNPADDING = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "modernbert")  # tested


class FacetLinear(nn.Linear):
    """One linear map D -> D without bias for each facet: y_k = W_k h_k. The K matrices are stacked, (K * D, D)."""

    def __init__(self, num_facets: int, hidden_size: int) -> None:
        super().__init__(hidden_size, num_facets * hidden_size, bias=False)

    def forward(self, hidden_BKD: Tensor, centred: bool = False) -> Tensor:
        """Maps (B, K, D) to (B, K, D); `centred` subtracts the mean of the K matrices first (section 2.6)."""
        weight_KDD = self.weight.unflatten(0, (-1, self.in_features))
        if centred:
            weight_KDD = weight_KDD - weight_KDD.mean(dim=0)
        return torch.einsum("bkd,ked->bke", hidden_BKD, weight_KDD)


class FacetLayerNorm(nn.LayerNorm):
    """One LayerNorm for each facet; weight and bias are (K, D)."""

    def forward(self, hidden_BKD: Tensor) -> Tensor:
        """Normalises (B, K, D) over D, then scales and shifts with the facet's weights."""
        normed = F.layer_norm(hidden_BKD, hidden_BKD.shape[-1:], eps=self.eps)
        return normed * self.weight + self.bias


def encoder_layers(encoder: PreTrainedModel) -> list[nn.Module]:
    """Returns the encoder's one list of `num_hidden_layers` layers of one class. Raises ValueError if there is none."""
    depth, kind = encoder.config.num_hidden_layers, encoder.config.model_type
    lists = [list(module) for module in encoder.modules() if isinstance(module, nn.ModuleList)]
    lists = [layers for layers in lists if len(layers) == depth and len({*map(type, layers)}) == 1]
    if len(lists) != 1:
        raise ValueError(
            f"model_type '{kind}' has no list of {depth} layers of its own (found {len(lists)} such lists), so no "
            "facet layers can be inserted; set facet_layers to [] to train it without them"
        )
    return lists[0]


def insert_facets(layer: nn.Module, _args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
    """Applies a layer's inserted linear layers to its output at the facet positions (section 2.5).

    A forward hook. [CLS] and text stay the output of the plain layer, (B, L, D) or a tuple that begins with it.
    Sequences that are packed into one, (1, T, D), begin at `cu_seq_lens_q`. Those of padding, at the end, may be
    shorter than the facets.
    """
    linear: Any = layer.facets
    hidden_BLD = output[0] if isinstance(output, tuple) else output
    count, starts = linear.out_features // linear.in_features, kwargs.get("cu_seq_lens_q")
    if starts is None:
        cls, facets_BKD, text = hidden_BLD.split([1, count, hidden_BLD.shape[1] - 1 - count], 1)
        inserted = torch.cat([cls, linear(facets_BKD), text], dim=1)
    else:
        positions = starts[:-1, None] + torch.arange(1, 1 + count, device=starts.device)
        positions = positions.flatten().clamp(max=hidden_BLD.shape[1] - 1)
        facets_BKD = hidden_BLD[0].index_select(0, positions).unflatten(0, (-1, count))
        inserted = hidden_BLD.index_copy(1, positions, linear(facets_BKD).flatten(0, 1)[None])
    return (inserted, *output[1:]) if isinstance(output, tuple) else inserted


def varlen_attention(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attends within packed sequences, which begin at `cu_seq_lens_q`, with torch's flash attention: (1, T, H, D).

    An attention function of transformers. It needs a GPU and 16 bits, and has no dropout of the attention's weights.
    `sliding_window` is w: a token sees the w - 1 tokens before it and as many after it.
    """
    from torch.nn.attention import varlen  # in torch 2.10 and newer

    starts, length = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    query, key, value = (s[0].transpose(0, 1) for s in (query_1HTD, key_1HTD, value_1HTD))
    reach = -1 if sliding_window is None else sliding_window - 1
    options: Any = {"scale": scaling, "window_size": (reach, reach)}
    attended: Any = varlen.varlen_attn(query, key, value, starts, starts, length, length, **options)
    return attended[None], None


AttentionInterface.register("varlen", varlen_attention)


class TopicTable(nn.Module):
    """The topics of a text: its place in the latent semantic analysis of a corpus (Deerwester et al., 1990).

    topics = u @ table, divided by its length, with u_v = (1 + ln count_v) idf_v for each token v of the text. Nothing
    in it is trained; `multicls.topics.fit_topics` makes it, and special tokens have an idf of 0.
    """

    idf: Tensor
    table: Tensor

    def __init__(self, vocabulary: int, num_topics: int) -> None:
        super().__init__()
        self.register_buffer("idf", torch.zeros(vocabulary))
        self.register_buffer("table", torch.zeros(vocabulary, num_topics))

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> "TopicTable":
        """Returns the table with this state."""
        table = cls(*state["table"].shape)
        table.load_state_dict(state)
        return table

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Returns the topics (B, T), in fp32 and of length 1, of token ids (B, L); 0 for a text of unknown words."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        # Equal tokens are neighbours after sorting, and make runs; c of them count c times by 1 / c of their weight. So
        # no table of the vocabulary is made, and a text may be long.
        ids_BL, order_BL = input_ids.sort(dim=1)
        real_BL = mask.gather(1, order_BL).to(self.idf.dtype)
        run_BL = F.pad((ids_BL[:, 1:] != ids_BL[:, :-1]).long().cumsum(dim=1), (1, 0))
        lengths_BL = torch.zeros_like(real_BL).scatter_add(1, run_BL, real_BL)
        counts_BL = lengths_BL.gather(1, run_BL).clamp(min=1)
        weights_BL = real_BL * (1 + counts_BL.log()) / counts_BL * self.idf[ids_BL]
        sums_BT = torch.einsum("bl,blt->bt", weights_BL.float(), self.table[ids_BL].float())
        return F.normalize(sums_BT, dim=-1)


@dataclass
class MultiClsModelOutput(BaseModelOutputWithPoolingAndCrossAttentions):
    """The encoder's output with `facet_embeddings` c_k, (B, S, D), and `topics`, (B, T), of a model that has them."""

    facet_embeddings: Tensor | None = None
    topics: Tensor | None = None


@dataclass
class MultiClsForPreTrainingOutput(MultiClsModelOutput, MaskedLMOutput):
    """Output of `MultiClsForPreTraining`. The fields of objectives that are not computed are None.

    `loss` is the sum of `losses`. `logits` are masked LM's, (M, V) in row-major order; without labels (B, L, V).
    """

    losses: dict[str, Tensor] | None = None  # scalars by objective
    mcqt_scores: tuple[Tensor, Tensor | None] | None = None  # of `part_scores`
    so_logits: Tensor | None = None  # (B, 2); class 1 is "swapped"
    tfidf: Tensor | None = None  # (B, L - K), [CLS] and the text


def mcqt_scores(queries_nSD: Tensor, candidates_mSD: Tensor, best_pair_weight: float) -> Tensor:
    """Returns the score of each query (..., n, S, D) with each candidate (..., m, S, D): (..., n, m), fp32 at least.

    Eq. 2: s(x, y) = lambda * max_ij cos(x_i, y_j) + (1 - lambda) * cos(sum_i x_i, sum_j y_j), without a temperature.
    """
    queries, candidates = _fp32(queries_nSD), _fp32(candidates_mSD)
    unit_queries, unit_candidates = F.normalize(queries, dim=-1), F.normalize(candidates, dim=-1)
    pairs = unit_queries.flatten(-3, -2) @ unit_candidates.flatten(-3, -2).mT  # (..., n * S, m * S)
    pairs = pairs.unflatten(-1, candidates.shape[-3:-1]).unflatten(-3, queries.shape[-3:-1])
    sums = F.normalize(queries.sum(dim=-2), dim=-1) @ F.normalize(candidates.sum(dim=-2), dim=-1).mT
    return best_pair_weight * pairs.amax(dim=(-1, -3)) + (1.0 - best_pair_weight) * sums


def part_scores(
    facets_BSD: Tensor, num_parts: int, best_pair_weight: float, group_size: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scores the parts of a part-major batch (all A, then all B, then all C), group by group in one batched product.

    Within a part the n examples of a group are neighbours; without `group_size` all examples are one group. In the
    first scores, (G * n, 2n), row q compares A_q with all B, then all C of its group; in the second C_q with all B,
    then all A. Without C they are (G * n, n) and None. The target of query q of a group is column q. A batch that does
    not divide into parts and groups is a ValueError.
    """
    sequences = len(facets_BSD)
    examples, rest = divmod(sequences, num_parts)
    size = group_size or examples
    if rest or examples % size:
        raise ValueError(
            f"{sequences} sequences do not divide into {num_parts} parts and groups of {size} examples"
        )
    first, second, *third = facets_BSD.unflatten(0, (num_parts, examples // size, size)).unbind()
    if not third:
        return mcqt_scores(first, second, best_pair_weight).flatten(0, 1), None
    queries = torch.stack([first, third[0]])
    candidates = torch.stack([torch.cat([second, other], dim=1) for other in (third[0], first)])
    from_first, from_third = mcqt_scores(queries, candidates, best_pair_weight).flatten(1, 2)
    return from_first, from_third


def mcqt_loss(
    scores: tuple[Tensor, Tensor | None], group_size: int | None = None, scale: float = 1.0
) -> Tensor:
    """Returns the MCQT loss of `part_scores`: the sum of both directions' mean cross-entropies. Chance: 2 ln(2n).

    `scale` multiplies the scores; the paper has 1.
    """
    queries = len(scores[0])
    targets = torch.arange(queries, device=scores[0].device) % (group_size or queries)
    directions = [direction for direction in scores if direction is not None]
    mean = F.cross_entropy(scale * torch.cat(directions), targets.repeat(len(directions)))
    return mean * len(directions)


class MultiClsPreTrainedModel(PreTrainedModel):
    """Base class of the Multi-CLS models. Attention, precision and checkpointing are the encoder's."""

    config_class = MultiClsConfig
    config: MultiClsConfig
    base_model_prefix = "multicls"
    supports_gradient_checkpointing: Any = property(
        lambda self: self.base_model.encoder.supports_gradient_checkpointing
    )
    _supports_sdpa = True
    _supports_flash_attn = True
    _keys_to_ignore_on_load_unexpected = [r"^mlm\.", r"^tfidf\.", r"^order\."]  # noqa: RUF012
    # Losses are means: a Trainer divides them by its accumulation steps.
    accepts_loss_kwargs = False


class MultiClsModel(MultiClsPreTrainedModel):
    """An encoder with facets. The weights have the names of `AutoModel`'s, under `encoder.`.

    Its inputs are tokenized as `[CLS] [C1] ... [CK] text [SEP]` by the tokenizer saved with it.
    """

    def __init__(self, config: MultiClsConfig) -> None:
        super().__init__(config)
        config.check_embedding()
        self.encoder = AutoModel.from_config(config.encoder, dtype=torch.get_default_dtype())
        layers = encoder_layers(self.encoder) if config.facet_layers else []
        for layer in [layers[number - 1] for number in config.facet_layers or []]:
            layer.add_module("facets", FacetLinear(config.num_facets, config.hidden_size))
            layer.register_forward_hook(insert_facets, with_kwargs=True)
        shape = config.num_embeddings_per_sequence, config.hidden_size
        # Facet embeddings c_k = LayerNorm(GELU(W_{O,k} h_k)), (B, S, D), from the last hidden states of the facets.
        dense, norm = FacetLinear(*shape), FacetLayerNorm(shape, eps=config.layer_norm_eps)
        head = OrderedDict(dense=dense, gelu=nn.GELU(), LayerNorm=norm)
        self.facet_head: Any = nn.Sequential(head)
        self.topics: TopicTable | None = None
        if config.num_topics:
            self.topics = TopicTable(config.vocab_size, config.num_topics)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Returns the encoder's word embeddings."""
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the encoder's word embeddings."""
        self.encoder.set_input_embeddings(value)

    def add_topics(self, state: Mapping[str, Tensor]) -> None:
        """Adds a `TopicTable` with this state, of the model's vocabulary."""
        self.topics = TopicTable.of(state)
        self.config.num_topics = self.topics.table.shape[1]

    def facet_states(self, hidden_BLD: Tensor) -> Tensor:
        """Returns (B, S, D): the hidden states at the facet positions, or of [CLS] if there are no facets."""
        return hidden_BLD[:, self.config.facet_slice if self.config.num_facets else slice(1)]

    def embed_sentences(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Returns an embedding of each text, (B, F): the encoder's own, or the parts that `config.embedding` names.

        Several parts stand side by side. Each has the same length, so that each weighs the same, and together they have
        length 1: a cosine is the mean of those of the parts. The encoder reads `config.encoder_tokens`, topics all.
        """
        ids_BL, whole_BL = input_ids, attention_mask
        if whole_BL is None:
            whole_BL = torch.ones_like(ids_BL)
        mask_BL = whole_BL
        if limit := self.config.encoder_tokens:
            last_B1 = ids_BL.gather(1, whole_BL.sum(dim=1, keepdim=True) - 1)  # [SEP]
            is_cut_B1 = (whole_BL.sum(dim=1, keepdim=True) > limit).long()
            ids_BL, mask_BL = ids_BL[:, :limit], whole_BL[:, :limit]
            end_L = (torch.arange(ids_BL.shape[1], device=ids_BL.device) == limit - 1).long()
            ids_BL = torch.where((end_L * is_cut_B1).bool(), last_B1, ids_BL)
            token_type_ids = None if token_type_ids is None else token_type_ids[:, :limit]
        outputs = self(ids_BL, mask_BL, token_type_ids, with_topics=False, return_dict=True)
        hidden_BLD = outputs.last_hidden_state
        if not self.config.embedding:
            own_BD = self.pool(hidden_BLD, mask_BL)
            return F.normalize(own_BD, dim=-1) if self.config.normalize else own_BD
        parts = list[Tensor]()
        for name in self.config.embedding.split("+"):
            if name == "facets":
                facets_BSD = F.normalize(_fp32(outputs.facet_embeddings), dim=-1)
                parts.append(F.normalize(facets_BSD.flatten(1), dim=-1))
            elif name == "topics":
                assert self.topics is not None, "the model has no topics"
                parts.append(self.topics(input_ids, whole_BL))
            else:
                parts.append(F.normalize(_fp32(self.pool(hidden_BLD, mask_BL, name)), dim=-1))
        return torch.cat(parts, dim=-1) / len(parts) ** 0.5

    def pool(self, hidden_BLD: Tensor, mask_BL: Tensor, pooling: str = "") -> Tensor:
        """Returns the last hidden state of [CLS], or the mean of those that are no facets or padding, (B, D).

        `pooling` is "mean" or "cls"; by default that of the configuration.
        """
        if (pooling or self.config.pooling) == "cls":
            return hidden_BLD[:, 0]
        kept_BL = mask_BL.clone()
        kept_BL[:, self.config.facet_slice] = 0
        sums_BD = torch.einsum("bl,bld->bd", kept_BL.to(hidden_BLD.dtype), hidden_BLD)
        return sums_BD / kept_BL.sum(dim=1, keepdim=True)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        unpad: bool = False,
        real_positions: Tensor | None = None,
        sequence_starts: Tensor | None = None,
        with_topics: bool = True,
        **kwargs: Any,
    ) -> MultiClsModelOutput:
        """Encodes (B, L) token ids. Further arguments are the encoder's.

        The attention mask is (B, L): one of four dimensions would replace the local attention of encoders such as
        ModernBERT. Token types are left out where the encoder has none. `unpad` computes the T real tokens alone, with
        packed attention: `real_positions` (T,) are theirs in the flattened batch, and sequence i begins at the i-th of
        `sequence_starts` (B + 1,); without them the host waits for the device. Padding may follow as more sequences.
        `with_topics` false leaves out a model's topics. A ValueError names an encoder or attention without `unpad`, or
        sequences without room for facets.
        """
        if input_ids is not None and input_ids.shape[1] <= self.config.num_facets:
            raise ValueError(f"{input_ids.shape[1]} tokens have no room for [CLS] and the facets")
        kwargs |= {"input_ids": input_ids, "attention_mask": attention_mask, "return_dict": True}
        if self.config.has_token_types and token_type_ids is not None:
            kwargs["token_type_ids"] = token_type_ids
        if unpad:
            kwargs |= {"real": real_positions, "starts": sequence_starts}
        outputs = self._encode_unpadded(**kwargs) if unpad else self.encoder(**kwargs)
        facets_BSD = self.facet_head(self.facet_states(outputs.last_hidden_state))
        topics_BT = None
        if self.topics is not None and with_topics and input_ids is not None:
            topics_BT = self.topics(input_ids, attention_mask)
        return MultiClsModelOutput(**outputs, facet_embeddings=facets_BSD, topics=topics_BT)

    def _encode_unpadded(self, real: Tensor | None, starts: Tensor | None, **kwargs: Any) -> Any:
        """Encodes T tokens as one sequence, (1, T); the hidden states elsewhere are 0."""
        input_ids = kwargs.pop("input_ids")
        attention_mask = kwargs.pop("attention_mask")
        kind, attention = self.encoder.config.model_type, self.config._attn_implementation
        if kind not in UNPADDING or attention not in PACKED_ATTENTION:
            raise ValueError(
                f"unpad: needs attn_implementation='varlen' or 'flash_attention_2', which run on a GPU, and one of the "
                f"encoders {', '.join(UNPADDING)}; this is {kind} with '{attention}'"
            )
        rows, length = input_ids.shape
        if real is None or starts is None:
            real = attention_mask.flatten().nonzero().squeeze(1)
            starts = F.pad(attention_mask.sum(dim=1).cumsum(0), (1, 0))
        starts = starts.to(torch.int32)
        kwargs |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        kwargs |= {"max_length_q": length, "max_length_k": length}
        kwargs["position_ids"] = (real % length)[None] + self.config.position_offset
        if "token_type_ids" in kwargs:
            kwargs["token_type_ids"] = kwargs["token_type_ids"].flatten()[real][None]
        packed_TD = self.encoder(input_ids.flatten()[real][None], **kwargs).last_hidden_state[0]
        hidden = packed_TD.new_zeros(rows * length, packed_TD.shape[1])
        hidden_BLD = hidden.index_copy(0, real, packed_TD).unflatten(0, (rows, length))
        return BaseModelOutput(last_hidden_state=hidden_BLD)


class GivenStates(nn.Module):
    """Stands in for the encoder of a masked-LM model: returns the hidden states that it gets."""

    def forward(self, *_: Any, inputs_embeds: Tensor | None = None, **__: Any) -> BaseModelOutput:
        """Returns `inputs_embeds` as the last hidden state."""
        return BaseModelOutput(last_hidden_state=inputs_embeds)


class MaskedLMHead(nn.Module):
    """The MLM head of the encoder's own `AutoModelForMaskedLM`, for any hidden states on any architecture."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        device = torch.empty(0).device
        with torch.device("meta"):  # the encoder in it takes no memory
            self.lm = AutoModelForMaskedLM.from_config(config, dtype=torch.get_default_dtype())
        setattr(self.lm, self.lm.base_model_prefix, GivenStates())
        self.lm.to_empty(device=device)  # `post_init` of the model around it draws the weights
        self.lm._tied_weights_keys = self.lm.all_tied_weights_keys = {}

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the logits (..., V) of hidden states (..., D)."""
        logits = self.lm(inputs_embeds=hidden.flatten(0, -2)[None], return_dict=True).logits
        return logits.squeeze(0).unflatten(0, hidden.shape[:-1])


class MultiClsForMaskedLM(MultiClsPreTrainedModel):
    """The encoder with facets and its MLM head; weights as in `MultiClsForPreTraining`."""

    def __init__(self, config: MultiClsConfig) -> None:
        super().__init__(config)
        self.multicls = MultiClsModel(config)
        self.mlm = MaskedLMHead(config.encoder)
        inside = f"mlm.lm.{self.mlm.lm.base_model_prefix}."
        self._tied_weights_keys = {  # name -> name of the original, as in the encoder's own class
            f"mlm.lm.{name}": f"mlm.lm.{original}".replace(inside, "multicls.encoder.")
            for name, original in (type(self.mlm.lm)._tied_weights_keys or {}).items()
        }
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """Returns the decoder of the MLM head."""
        return self.mlm.lm.get_output_embeddings() or self.mlm.lm.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the decoder of the MLM head."""
        self.mlm.lm.set_output_embeddings(new_embeddings)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Returns logits (B, L, V); `labels`, (B, L), have -100 where there is no target."""
        kwargs["return_dict"] = True
        outputs = self.multicls(input_ids, attention_mask, token_type_ids, **kwargs)
        logits_BLV = self.mlm(outputs.last_hidden_state)
        loss = _cross_entropy(logits_BLV, labels)
        return MaskedLMOutput(loss, logits_BLV, outputs.hidden_states, outputs.attentions)


class MultiClsForPreTraining(MultiClsForMaskedLM):
    """The encoder with facets and the heads of its four objectives: MLM, TF-IDF, sentence order (SO) and MCQT.

    `multicls.build.build` starts it from any encoder's checkpoint.
    """

    def __init__(self, config: MultiClsConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        # The scaled TF-IDF of a token, (B, L, 1) from (B, L, D).
        dense, norm = nn.Linear(size, size), nn.LayerNorm(size, eps=config.layer_norm_eps)
        decoder = nn.Linear(size, 1)
        tfidf = OrderedDict(dense=dense, gelu=nn.GELU(), LayerNorm=norm, decoder=decoder)
        self.tfidf = nn.Sequential(tfidf)
        # Whether the two segments of a sequence are swapped: W2 (L_SO concat_k(h_k)), (B, 2) from (B, S, D).
        transform = nn.Linear(config.num_embeddings_per_sequence * size, size)
        classifier = nn.Linear(size, 2)
        order = OrderedDict(flatten=nn.Flatten(), transform=transform, classifier=classifier)
        self.order = nn.Sequential(order)
        self.post_init()

    def freeze_unused(self, objectives: Collection[str]) -> None:
        """Freezes the parameters that none of the `objectives` reaches, so that weight decay does not change them."""
        heads = {"tfidf": self.tfidf, "so": self.order, "mcqt": self.multicls.facet_head}
        unused = [head for name, head in heads.items() if name not in objectives]
        for module in [*unused, getattr(self.multicls.encoder, "pooler", None) or nn.Identity()]:
            module.requires_grad_(False)
        shared = self.get_input_embeddings().weight
        for parameter in self.mlm.parameters():
            parameter.requires_grad_(parameter is shared or "mlm" in objectives)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        tfidf_labels: Tensor | None = None,
        so_labels: Tensor | None = None,
        masked_positions: Tensor | None = None,
        anchor_targets: Tensor | None = None,
        group_size: int | None = None,
        normalizers: Mapping[str, Tensor | float] | None = None,
        objectives: Collection[str] | None = None,
        **kwargs: Any,
    ) -> MultiClsForPreTrainingOutput:
        """Computes the heads of the objectives, and the losses of those whose labels are passed.

        MCQT needs no labels but a part-major batch: all first parts, then all second parts, ... If B does not divide
        into parts and groups, MCQT is left out; with `objectives` or `group_size` set, this is a ValueError.

        Args:
            input_ids: (B, L), `[CLS] [C1..CK] segment [SEP] segment [SEP]`; like the next two, see `MultiClsModel`.
            labels: (B, L) masked-LM targets, -100 elsewhere; the MLM head is computed where they are, only.
            tfidf_labels: (B, L - K) targets in 0..10, without the facet positions; padding does not count.
            so_labels: (B,) 1 = the segments are swapped, 0 = in order, -100 = the part has one segment.
            masked_positions: (M,) ascending label indices in the flattened batch; None: the host waits for the device.
            anchor_targets: (B, D) embeddings that the model's own is held to; the loss is the mean of 1 - cosine.
            group_size: n, the examples that are each other's negatives in MCQT; None: all examples are one group.
            normalizers: Divisors of the summed "mlm", "tfidf" and "so" losses; None: their numbers of terms here.
            objectives: Those of `OBJECTIVES` to compute; None: all.
        """
        kwargs["return_dict"] = True
        encoded = self.multicls(input_ids, attention_mask, token_type_ids, **kwargs)
        hidden_BLD, facets_BSD = encoded.last_hidden_state, encoded.facet_embeddings
        wanted, parts = OBJECTIVES if objectives is None else objectives, self.config.num_parts
        count, heads = (normalizers or {}).get, dict[str, Any]()
        losses: dict[str, Tensor | None] = {}
        if "mcqt" in wanted and (objectives or group_size or len(facets_BSD) % parts == 0):
            scale = self.config.mcqt_scale
            scores = part_scores(facets_BSD, parts, self.config.mcqt_lambda, group_size)
            heads["mcqt_scores"], losses["mcqt"] = scores, mcqt_loss(scores, group_size, scale)
        if "mlm" in wanted:
            heads["logits"], targets = self._masked_lm(hidden_BLD, labels, masked_positions)
            losses["mlm"] = _cross_entropy(heads["logits"], targets, count("mlm"))
        if "tfidf" in wanted:
            heads["tfidf"] = self.tfidf(self._without_facets(hidden_BLD)).squeeze(-1)
            mask = heads["tfidf"].new_ones(hidden_BLD.shape[:2])
            real = self._without_facets(mask if attention_mask is None else attention_mask)
            if tfidf_labels is not None:
                errors = (_fp32(heads["tfidf"]) - tfidf_labels).square() * real
                losses["tfidf"] = errors.sum() / count("tfidf", real.sum().clamp(min=1))
        if "so" in wanted:
            heads["so_logits"] = self.order(self.multicls.facet_states(hidden_BLD))
            losses["so"] = _cross_entropy(heads["so_logits"], so_labels, count("so"))
        if "anchor" in wanted and anchor_targets is not None:
            mask = torch.ones_like(hidden_BLD[..., 0]) if attention_mask is None else attention_mask
            own_BD = _fp32(self.multicls.pool(hidden_BLD, mask))
            losses["anchor"] = 1 - F.cosine_similarity(own_BD, _fp32(anchor_targets)).mean()
        computed = {name: loss for name, loss in losses.items() if loss is not None}
        loss = torch.stack(list(computed.values())).sum() if computed else None
        return MultiClsForPreTrainingOutput(loss=loss, losses=computed, **encoded, **heads)

    def _masked_lm(
        self, hidden_BLD: Tensor, labels: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the MLM logits and targets of the labelled positions; without labels the logits of all."""
        if labels is None:
            return self.mlm(hidden_BLD), None
        if positions is None:
            positions = (labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
        states_MD = hidden_BLD.flatten(0, 1).index_select(0, positions)
        return self.mlm(states_MD), labels.flatten().index_select(0, positions)

    def _without_facets(self, values: Tensor) -> Tensor:
        """Returns (B, L - K, ...) from (B, L, ...): [CLS] and the text after the facets."""
        return torch.cat([values[:, :1], values[:, self.config.facet_slice.stop :]], dim=1)


def _fp32(values: Tensor) -> Tensor:
    """Returns 16-bit values in float32, others unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _cross_entropy(
    logits: Tensor, labels: Tensor | None, count: Tensor | float | None = None
) -> Tensor | None:
    """Returns the summed cross-entropy of (..., C) logits over `count`, or over the number of labels but -100."""
    if labels is None:
        return None
    logits, labels = _fp32(logits.flatten(0, -2)), labels.flatten()
    total = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / ((labels != IGNORE_INDEX).sum().clamp(min=1) if count is None else count)


class MultiClsForSequenceClassification(MultiClsPreTrainedModel):
    """A classifier on the re-parameterised sum of the facets (section 2.6), which keeps their weights apart.

    c = sum_k (W_{O,k} - mean_k' W_{O,k'}) h_k + b_k, W_{O,k} from pretraining, b_k from 0; no GELU, no LayerNorm.
    With a single embedding (K <= 1) there is nothing to centre: c = W_{O,1} h_1 + b_1.
    """

    def __init__(self, config: MultiClsConfig) -> None:
        super().__init__(config)
        self.num_labels = int(config.num_labels or 2)
        self.multicls = MultiClsModel(config)
        shape = config.num_embeddings_per_sequence, config.hidden_size
        self.facet_bias = nn.Parameter(torch.zeros(shape))
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            init.zeros_(self.facet_bias)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Classifies (B, L) token ids; `labels` and `config.problem_type` as in `BertForSequenceClassification`."""
        kwargs["return_dict"] = True
        outputs = self.multicls(input_ids, attention_mask, token_type_ids, **kwargs)
        facets_BSD = self.multicls.facet_states(outputs.last_hidden_state)
        mapped_BSD = self.multicls.facet_head.dense(facets_BSD, centred=facets_BSD.shape[1] > 1)
        logits_BC = self.classifier(self.dropout((mapped_BSD + self.facet_bias).sum(dim=1)))
        loss = None
        if labels is not None:
            loss = ForSequenceClassificationLoss(labels, _fp32(logits_BC), self.config)
        return SequenceClassifierOutput(loss, logits_BC, outputs.hidden_states, outputs.attentions)


# A saved folder has a copy of this module. Its configuration class does not replace that of an installed project.
if __package__ == "multicls" or MultiClsConfig.model_type not in transformers.CONFIG_MAPPING:
    transformers.AutoConfig.register(MultiClsConfig.model_type, MultiClsConfig, exist_ok=True)
MultiClsConfig.register_for_auto_class()
for auto_class, model_class in (
    (AutoModel, MultiClsModel),
    (AutoModelForMaskedLM, MultiClsForMaskedLM),
    (AutoModelForPreTraining, MultiClsForPreTraining),
    (AutoModelForSequenceClassification, MultiClsForSequenceClassification),
):
    auto_class.register(MultiClsConfig, model_class, exist_ok=True)
    model_class.register_for_auto_class(auto_class)  # the code is saved with each model
