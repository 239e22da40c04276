"""The engine of a run: the passes of a micro-batch, the update, saving and loading, on DeepSpeed.

Everything private of DeepSpeed that pretraining uses is here and nowhere else; checked with deepspeed 0.19.8.

**Why ZeRO 1 and 2 do not take DeepSpeed's own path.** On one H200 the paper's step (BERT-base, 30 x 128 tokens, bf16)
took 80 ms, of which the card worked 9. DeepSpeed's update took 31 ms: a scan for NaN, a norm and a new view for each
of 217 weights, 2,621 + 467 + 868 operators. Its hooks on each gradient took 13 ms of the backward pass.
`FlatGradients` replaces both by operations on one flat tensor for each group of parameters. The numbers are the same to
the bit (tests/pretrain/test_ds_configs.py). Forward and backward pass become one CUDA graph (pretrain/graphs.py).
"""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

from multicls.deepspeed_config import Precision
from multicls.distributed import safe_unpickling, uses_cuda
from multicls.errors import UserError
from multicls.modeling_multicls import UNPADDING, encoder_layers
from multicls.optim import parameter_groups
from pretrain.batches import MicroBatch
from pretrain.graphs import Graphs, pad_positions
from pretrain.metrics import NORMALIZED, Terms, loss_terms, measure
from pretrain.settings import PretrainSettings, TrainSettings

# Encoders whose step compiling halves on a GPU; BERT's takes 9 % to 17 % longer (docs/results.md).
GAIN_FROM_COMPILING = {"modernbert"}
# Of DeepSpeedZeroOptimizer; a newer DeepSpeed without one of them takes its own path.
NAMES = """
    bit16_groups bit16_groups_flat averaged_gradients dp_process_group loss_scale clip_grad _grad_acc_hooks
    _get_preflattened_grad_partition check_overflow get_grad_norm_direct unscale_and_clip_grads
    _update_model_bit16_weights
    """.split()  # noqa: SIM905
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class FlatGradients:
    """Sums the gradients of a step in one flat tensor a group, averages them over ranks, and hands them to DeepSpeed.

    The tensors lie like DeepSpeed's flat weights, of which each rank owns a part. As in DeepSpeed, ZeRO 2 averages in
    each micro-batch and keeps its own part of the sum, ZeRO 1 averages once a step. Several micro-batches are summed in
    `sum_dtype`.
    """

    def __init__(self, deepspeed_engine: Any, sum_dtype: torch.dtype) -> None:
        self._optimizer, self._sum_dtype = deepspeed_engine.optimizer, sum_dtype
        self._passes = int(deepspeed_engine.gradient_accumulation_steps())
        self._ranks = dist.get_world_size()
        self._rank = dist.get_rank()
        # One pass is not summed; ZeRO 1 sums on each rank what ZeRO 2 sums after averaging.
        self._averages_each = self._passes == 1 or deepspeed_engine.zero_optimization_stage() == 2
        self._done = 0
        for hook in self._optimizer._grad_acc_hooks:
            hook.remove()
        self._optimizer._grad_acc_hooks.clear()
        self._weights: list[list[torch.nn.Parameter]] = self._optimizer.bit16_groups
        self.flat: list[Tensor] = []
        self._views: list[list[Tensor]] = []
        self._sums: list[Tensor] = []
        for weights, whole in zip(self._weights, self._optimizer.bit16_groups_flat, strict=True):
            flat = torch.zeros_like(whole)
            begins = [w.data.storage_offset() - whole.storage_offset() for w in weights]
            pairs = zip(begins, weights, strict=True)
            self.flat.append(flat)
            self._views.append([flat[begin:][: w.numel()].view(w.shape) for begin, w in pairs])
        self._optimizer.check_overflow = lambda **_: None  # the norm is not finite then, either
        self._optimizer.get_grad_norm_direct = self._norm
        self._optimizer.unscale_and_clip_grads = self._unscale_and_clip
        # The weights are views of the flat ones already.
        self._optimizer._update_model_bit16_weights = lambda _: None

    def gather(self) -> None:
        """Moves the gradients of a backward pass to the flat tensors: one operator a group. A graph may capture it."""
        for weights, views in zip(self._weights, self._views, strict=True):
            pairs = [(v, w.grad) for v, w in zip(views, weights, strict=True) if w.grad is not None]
            if len(pairs) < len(weights):
                torch._foreach_zero_(views)
            if pairs:
                torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
            for weight in weights:
                weight.grad = None

    def add(self) -> None:
        """Adds the gathered gradients of a micro-batch to the sums; after the last one, hands them to DeepSpeed."""
        gathered = [self._average(f) for f in self.flat] if self._averages_each else self.flat
        if self._passes == 1:
            self._sums = gathered
        elif not self._sums:
            self._sums = [gradients.to(self._sum_dtype, copy=True) for gradients in gathered]
        else:
            for total, gradients in zip(self._sums, gathered, strict=True):
                total.add_(gradients)
        self._done += 1
        if self._done < self._passes:
            return
        sums, self._sums, self._done = self._sums, [], 0
        if not self._averages_each:
            sums = [self._average(total) for total in sums]
        for number, partition in enumerate(sums):
            self._optimizer.averaged_gradients[number] = _Partition(partition)

    def _average(self, flat: Tensor) -> Tensor:
        """Returns this rank's part of the mean over the ranks, in place."""
        if self._ranks == 1:
            return flat
        flat.div_(self._ranks)
        size = len(flat) // self._ranks
        mine = flat[self._rank * size :][:size]
        dist.reduce_scatter_tensor(mine, flat)
        return mine

    def _norm(self, gradients: "_Partition", _weights: Any, norm_type: float = 2.0) -> Tensor:
        """Returns the norm of one group's gradients over all ranks; -1, DeepSpeed's sign, if it is not finite."""
        norm = torch.linalg.vector_norm(gradients.flat_partition, dtype=torch.float64)
        total = norm.square().float()
        if self._ranks > 1:
            dist.all_reduce(total, group=self._optimizer.dp_process_group)
        total = total.sqrt()
        return torch.where(total.isfinite(), total, -1.0)

    def _unscale_and_clip(self, partitions: Sequence[Tensor], norm: Tensor) -> None:
        """Divides a group's gradients by the loss scale, and so that the norm is at most the largest one.

        DeepSpeed's own function first waits for the norm, which `step` has checked already.
        """
        scale, largest = self._optimizer.loss_scale, self._optimizer.clip_grad
        clip = torch.clamp((norm / scale + 1e-6) / largest, min=1.0)
        for gradients in partitions:
            gradients.data.mul_(1.0 / (clip * scale))


class _Partition(list[Tensor]):
    """The gradients of a rank's part of a group, as DeepSpeed takes them flat: it reads `flat_partition`."""

    def __init__(self, flat_partition: Tensor) -> None:
        super().__init__([flat_partition])
        self.flat_partition = flat_partition


def why_not_flat(deepspeed_engine: Any) -> str:
    """Returns why the gradients take DeepSpeed's own path; "": they do not."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    optimizer = deepspeed_engine.optimizer
    if type(optimizer) is not DeepSpeedZeroOptimizer:
        return f"ZeRO stage {deepspeed_engine.zero_optimization_stage()}"
    if optimizer.cpu_offload:
        return "the optimizer is offloaded"
    if missing := [name for name in NAMES if not hasattr(optimizer, name)]:
        return f"this DeepSpeed has no {missing[0]}"
    return ""


class Engine:
    """A pretraining model with its optimizer on this rank's device, as DeepSpeed has it."""

    def __init__(
        self,
        deepspeed: Any,
        model: Any,
        ds_config: dict[str, Any],
        settings: PretrainSettings,
        *,
        universal: bool = False,
    ) -> None:
        """Builds the optimizer and DeepSpeed's engine around `model`, which is changed in place.

        Args:
            ds_config: The completed JSON.
            settings: With sizes and steps as numbers, and `graph` and `unpad` as `prepare_layers` has resolved them.
            universal: True if the checkpoint to load was converted to another number of ranks.
        """
        train, self._weights = settings.train, settings.objective.in_use
        if uses_cuda() and train.graph is True:
            # The accumulators of gradients belong to the stream they are made on. The legacy one cannot be captured.
            torch.cuda.set_stream(torch.cuda.Stream())
        model.freeze_unused(self._weights)  # or weight decay would change them
        checkpoint = ds_config.get("checkpoint", {}) | {"load_universal": universal}
        groups = parameter_groups(model, train.weight_decay, train.head_lr_factor)
        optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, fused=True)
        self.deepspeed = deepspeed.initialize(
            model=model, optimizer=optimizer, config=ds_config | {"checkpoint": checkpoint}
        )[0]
        self.module, self.device = self.deepspeed.module, torch.device(self.deepspeed.device)
        self._group, self._unpad = train.negatives_group, train.unpad is True
        self._passes = int(self.deepspeed.gradient_accumulation_steps())
        self._scale = torch.ones((), device=self.device)  # of the loss in fp16
        self._terms: dict[str, float | str] = {}  # of a recorded pass
        self._flat: FlatGradients | None = None
        self._graphs: Graphs | None = None
        self._notes: list[str] = []
        self._network = self.deepspeed
        if reason := why_not_flat(self.deepspeed):
            self._notes.append(f"gradients take DeepSpeed's own path: {reason}")
            if train.graph is True:
                self._notes.append(f"passes run without a CUDA graph: {reason}")
            return
        sums = ds_config.get("data_types", {}).get("grad_accum_dtype") or "fp32"
        self._flat, self._network = FlatGradients(self.deepspeed, DTYPES[sums]), self.module
        if train.graph is True:
            self._graphs = Graphs(self._recorded_pass, self._flat.flat, self.module.zero_grad)

    def set_learning_rate(self, rate: float) -> None:
        """Sets the rate of all groups; a group's factor multiplies it."""
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)

    def run_pass(
        self,
        batch: MicroBatch,
        normalizers: Tensor,
        seed: int,
        measured: bool = False,
    ) -> Terms:
        """Makes the forward and backward pass of a micro-batch, and the update after a step's last one.

        Args:
            normalizers: Divisors of the losses `NORMALIZED`, (3,).
            seed: Seeds the dropout.
            measured: Adds accuracies and facet statistics to the losses. A graph always has them.

        Returns:
            The terms of metrics, on the device.
        """
        inputs = {**batch.inputs, "normalizers": normalizers}
        if self.is_fp16:
            self._scale.fill_(self.deepspeed.optimizer.loss_scale)
        if self._graphs and not self._graphs.problem:
            values = self._graphs(pad_positions(inputs), seed)
            if self._graphs.problem:
                reason = self._graphs.problem
                self._notes.append(f"warning: passes run without a CUDA graph: {reason}")
            pairs = zip(self._terms.items(), values.unbind(), strict=True)
            terms: Terms = {name: (value, count) for (name, count), value in pairs}
        else:
            torch.manual_seed(seed)
            terms = self._pass(inputs, measured)
        if self._flat:
            self._flat.add()
        self.deepspeed.step()  # updates the weights at the last micro-batch, before that it only counts
        return terms

    def _recorded_pass(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns the values of all terms in one tensor; `_terms` gets their names and counts."""
        terms = self._pass(inputs, measured=True)
        self._terms = {name: count for name, (_, count) in terms.items()}
        values = [torch.as_tensor(value, device=self.device) for value, _ in terms.values()]
        return torch.stack([value.double() for value in values])

    def _pass(self, inputs: Mapping[str, Tensor], measured: bool) -> Terms:
        """Makes a forward and a backward pass; the gradients are then in the flat tensors, or in DeepSpeed's."""
        inputs = dict(inputs)
        normalizers = dict(zip(NORMALIZED, inputs.pop("normalizers").unbind(), strict=True))
        outputs = self._forward(inputs, normalizers, tuple(self._weights))
        weighted = [self._weights[name] * loss for name, loss in outputs.losses.items()]
        total = mask_nonfinite(torch.stack(weighted).sum())
        if self._flat:
            total = total / self._passes
            if self.is_fp16:
                total = total * self._scale
            total.backward()
            self._flat.gather()
        else:
            self.deepspeed.backward(total)
        terms = loss_terms(outputs.losses, normalizers)
        return terms | (measure(outputs, inputs, normalizers, self._group) if measured else {})

    def _forward(
        self,
        inputs: Mapping[str, Tensor],
        normalizers: Mapping[str, Tensor] | None = None,
        objectives: Sequence[str] = (),
        group_size: int | None = None,
    ) -> Any:
        return self._network(
            **inputs,
            normalizers=normalizers,
            objectives=objectives,
            group_size=group_size or self._group,
            unpad=self._unpad,
        )

    def evaluate(self, batch: MicroBatch, normalizers: Tensor, group_size: int) -> Terms:
        """Returns the terms of all metrics of a micro-batch, in evaluation mode and without gradients."""
        divisors = dict(zip(NORMALIZED, normalizers.unbind(), strict=True))
        with torch.no_grad(), self.evaluation():
            outputs = self._forward(batch.inputs, divisors, tuple(self._weights), group_size)
        terms = loss_terms(outputs.losses, divisors)
        return terms | measure(outputs, batch.inputs, divisors, group_size)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Puts the model into evaluation mode. Compiled layers run uncompiled, or each length would compile anew."""
        self.deepspeed.eval()
        torch.compiler.set_stance("force_eager")
        try:
            yield
        finally:
            torch.compiler.set_stance("default")
            self.deepspeed.train()

    def new_notes(self) -> list[str]:
        """Returns lines for the log that have not been returned before."""
        notes, self._notes = self._notes, []
        return notes

    def encode(self, **inputs: Any) -> Any:
        """Returns the encoder's output with facets for tokenized texts, in the mode that the model is in."""
        return self._forward(inputs)

    @property
    def was_updated(self) -> bool:
        """True if the last step has changed the weights."""
        return bool(self.deepspeed.was_step_applied())

    @property
    def is_fp16(self) -> bool:
        """True if gradients may overflow, upon which DeepSpeed halves the loss scale."""
        return bool(self.deepspeed.fp16_enabled())

    def state(self) -> dict[str, float]:
        """Returns the metrics of the optimizer: the norm of the gradients before clipping, and fp16's loss scale."""
        values = {"optim/grad_norm": float(self.deepspeed.get_global_grad_norm() or 0.0)}
        if self.is_fp16:
            values["optim/loss_scale"] = float(self.deepspeed.optimizer.loss_scaler.cur_scale)
        return values

    def save(self, folder: Path, tag: str) -> None:
        """Saves the state to `folder/tag`, each file flushed to the disk. All ranks must call it."""

        def save(state_dict: Any, path: str) -> None:
            with open(path, "wb") as file:  # by a path, torch would not report why it cannot write
                torch.save(state_dict, file)
                file.flush()
                os.fsync(file.fileno())

        self.deepspeed.checkpoint_engine.save = save
        info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
        try:
            self.deepspeed.save_checkpoint(
                str(folder), tag=tag, save_latest=False, client_state=info
            )
        finally:
            del self.deepspeed.checkpoint_engine.save

    def load(self, folder: Path, tag: str) -> None:
        """Loads the state in `folder/tag`. All ranks must call it."""
        optimizer = self.deepspeed.optimizer
        ours = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        with safe_unpickling(folder / tag):
            path, _ = self.deepspeed.load_checkpoint(str(folder), tag=tag)
        assert path is not None, f"DeepSpeed found no checkpoint {tag} in {folder}"
        if self.deepspeed.load_universal_checkpoint():
            # In stage 3 DeepSpeed gives all groups the weight decay of the first, and one shared counter of steps.
            for group, values in zip(optimizer.param_groups, ours, strict=True):
                group.update(values)
            # It also leaves the steps on the CPU, where the fused AdamW of a GPU cannot read them.
            for parameter, moments in optimizer.optimizer.state.items():
                moments["step"] = moments["step"].to(parameter.device, copy=True)


def mask_nonfinite(total: Tensor) -> Tensor:
    """Returns `total`, multiplied by NaN if it is not finite: its gradients then are not finite either."""
    return total * torch.where(total.detach().isfinite(), 1.0, torch.nan)


def prepare_layers(
    model: Any, train: TrainSettings, precision: Precision
) -> tuple[TrainSettings, list[str]]:
    """Applies the settings that change how layers compute.

    Returns:
        The settings with `unpad`, `compile` and `graph` as True or False, and lines for the log.

    Raises:
        UserError: A setting does not work with this encoder, device or precision.
    """
    kind, notes, on_gpu = model.config.encoder.model_type, list[str](), uses_cuda()
    if train.activation_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UserError(f"train.activation_checkpointing: {kind} has none; leave it out.")
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if on_gpu:
        keep_mask_on_device()
    compiles = train.compile is True or (
        train.compile == "auto" and on_gpu and precision != "fp32" and kind in GAIN_FROM_COMPILING
    )
    unpad = _leaves_out_padding(model, train, precision, compiles, notes)
    compiles = compiles and not unpad
    if compiles:
        for layer in encoder_layers(model.multicls.encoder):  # the names of the weights stay
            layer.compile(dynamic=False)
        notes.append("the encoder's layers are compiled; the first steps take a minute or more")
    graph = train.graph is True or (train.graph == "auto" and on_gpu)
    if graph and train.activation_checkpointing:
        graph = False
        notes.append("passes run without a CUDA graph: layers are recomputed")
    elif graph and not on_gpu:
        notes.append("train.graph: there is no GPU, so that passes are repeated, not replayed")
    resolved = {"unpad": unpad, "compile": compiles, "graph": graph}
    return train.model_copy(update=resolved), notes


def _leaves_out_padding(
    model: Any, train: TrainSettings, precision: Precision, compiles: bool, notes: list[str]
) -> bool:
    """Returns True if the encoder is to leave out the padding, and sets the attention that does."""
    kind, has_flash = model.config.encoder.model_type, find_spec("flash_attn") is not None
    works = kind in UNPADDING and uses_cuda() and precision != "fp32"
    rate = attention_dropout(model)
    loses_dropout = rate > 0 and not has_flash
    if not train.unpad or (train.unpad == "auto" and (not works or loses_dropout or compiles)):
        return False
    if not works:
        raise UserError(
            f"train.unpad: needs a GPU, bf16 or fp16, and one of {', '.join(UNPADDING)}; this is {kind} in {precision}."
        )
    model.set_attn_implementation("flash_attention_2" if has_flash else "varlen")
    if loses_dropout:
        notes.append(
            "warning: train.unpad: torch's attention of packed sequences has no dropout, so the encoder's rate of "
            f"{rate:g} there is not applied. The package flash-attn has it."
        )
    return True


def attention_dropout(model: Any) -> float:
    """Returns the dropout rate of the encoder's attention weights; torch's attention of packed sequences has none."""
    if model.config._attn_implementation == "varlen":
        return 0.0
    names = ("attention_probs_dropout_prob", "attention_dropout")
    return max(float(getattr(model.config.encoder, name, 0.0) or 0.0) for name in names)


def keep_mask_on_device() -> None:
    """Makes transformers pass the padding mask to attention without reading it on the host in each forward pass.

    It leaves the mask out if a batch has no padding. To find out, the host would wait for the device.
    """

    for name, function in {"sdpa": sdpa_mask, "eager": eager_mask}.items():  # MPNet's is eager

        def mask(*args: Any, function: Any = function, **kwargs: Any) -> Any:
            return function(*args, **(kwargs | {"allow_is_bidirectional_skip": False}))

        AttentionMaskInterface.register(name, mask)


def convert_to_universal(source: Path, target: Path) -> None:
    """Converts a checkpoint to DeepSpeed's universal form, in this process."""
    from deepspeed.checkpoint.ds_to_universal import main

    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    options |= {"strict": True, "inject_missing_state": True}
    with _reading(source):
        main(argparse.Namespace(input_folder=str(source), output_folder=str(target), **options))
    (target.parent / "latest_universal").unlink(missing_ok=True)


def fp32_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Loads the weights of a checkpoint in fp32, from the master weights where the precision has them."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with _reading(checkpoint):
        weights = get_fp32_state_dict_from_zero_checkpoint(
            str(checkpoint.parent), tag=checkpoint.name
        )
        whole = checkpoint / "mp_rank_00_model_states.pt"  # stage 1: frozen weights are only there
        if whole.exists():
            weights = torch.load(whole, weights_only=True, map_location="cpu")["module"] | weights
    return {name: tensor.float() for name, tensor in weights.items()}


@contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    """Lets DeepSpeed read a checkpoint without running code in it and without printing."""
    with safe_unpickling(checkpoint), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        yield
