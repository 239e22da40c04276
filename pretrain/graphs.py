"""Records a function of tensors as CUDA graphs, one for each shape of its inputs, and replays them.

A replay takes the host 0.2 ms where the passes that it holds take 30 to 60 ms of launches (docs/results.md).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from multicls.errors import first_line

WARM_UPS = 3  # passes before a recording: they compile, and allocate what libraries keep
MOST = 32  # graphs; inputs of yet another shape run without one
TOLERANCE = 0.02  # relative difference of a replay from the pass before it; a lost dropout seed gives above 0.2

Inputs = dict[str, Tensor]
Function = Callable[[Inputs], Tensor]


@dataclass(eq=False)
class Graphs:
    """A function that is recorded at its first call with inputs of some shape and replayed at all later ones.

    On a CPU nothing is recorded: a replay calls the function on the same static inputs, so that all but the capture is
    the same code.

    Attributes:
        function: Maps inputs to a tensor, and fills `filled`. It may not wait for the device.
        filled: Tensors at fixed addresses that the function writes to.
        reset: Called when a recording has failed, before the function is called without one.
        problem: Why the function is not recorded any more; "": it is.
    """

    function: Function
    filled: Sequence[Tensor]
    reset: Callable[[], None] = lambda: None
    problem: str = ""
    _recorded: dict[Any, "_Recording"] = field(default_factory=dict)
    _pool: Any = None

    def __call__(self, inputs: Inputs, seed: int) -> Tensor:
        """Returns the function's result, in memory of its own, with torch's generators set to `seed` before it."""
        key = tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
        if key not in self._recorded and not self.problem and len(self._recorded) < MOST:
            self._record(key, inputs, seed)
        torch.manual_seed(seed)
        if recording := self._recorded.get(key):
            for name, tensor in inputs.items():
                recording.inputs[name].copy_(tensor, non_blocking=True)
            return recording.replay().clone()
        return self.function(inputs)

    def _record(self, key: Any, inputs: Inputs, seed: int) -> None:
        """Records the function and compares a replay with a call; sets `problem` if either fails."""
        static = {name: tensor.clone() for name, tensor in inputs.items()}
        for _ in range(WARM_UPS):
            torch.manual_seed(seed)
            result = self.function(static)
        expected = [tensor.float().clone() for tensor in (result, *self.filled)]
        device = result.device
        generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else None
        state = generator.clone_state() if generator else None  # a failed capture spoils the other
        try:
            torch.manual_seed(seed)
            recording = self._capture(static, device)
            torch.manual_seed(seed)
            found = [tensor.float() for tensor in (recording.replay(), *self.filled)]
            if far := _difference(found, expected) > TOLERANCE:
                self.problem = "a replay differs from the passes that it recorded"
        except RuntimeError as error:
            self.problem, far = first_line(error), True
            if generator and state:
                generator.graphsafe_set_state(state)
        if far:
            self._recorded.clear()
            self.reset()
        else:
            self._recorded[key] = recording

    def _capture(self, static: Inputs, device: torch.device) -> "_Recording":
        if device.type != "cuda":
            return _Recording(static, lambda: self.function(static))
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(device)
        # Other threads, such as NCCL's, may call CUDA meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            result = self.function(static)

        def replay() -> Tensor:
            graph.replay()
            return result

        return _Recording(static, replay)


@dataclass(frozen=True)
class _Recording:
    """The static inputs of a graph, and what replays it and returns its result."""

    inputs: Inputs
    replay: Callable[[], Tensor]


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the largest relative difference of two lists of tensors; 0 where the expected ones are not finite."""
    differences = [
        (torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b).clamp(min=1e-12)).item()
        for a, b in zip(found, expected, strict=True)
        if b.isfinite().all()
    ]
    return max(differences, default=0.0)


def pad_positions(inputs: Mapping[str, Tensor], multiple: int = 64) -> Inputs:
    """Returns the inputs with `masked_positions` padded to a multiple, so that few shapes occur.

    Position 0, which holds [CLS], has no label.
    """
    positions = inputs["masked_positions"]
    missing = -len(positions) % multiple
    padded = torch.nn.functional.pad(positions, (0, missing))
    return {**inputs, "masked_positions": padded}
