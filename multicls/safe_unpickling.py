"""Loads DeepSpeed's checkpoints without running code that they may hold."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from multicls.errors import UserError, first_line


@contextmanager
def safe_unpickling(path: Path) -> Iterator[None]:
    """Makes DeepSpeed read the files of a checkpoint with `weights_only=True`; the folder may be somebody else's.

    Checked with deepspeed 0.19.8.

    Raises:
        UserError: the files hold other objects than DeepSpeed writes.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    force = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # stronger than the weights_only=False that DeepSpeed passes
    before = os.environ.get(force)
    os.environ[force] = "1"
    try:
        with torch.serialization.safe_globals(
            [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
        ):
            yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: holds other objects than DeepSpeed writes; it was not loaded: {first_line(error)}"
        ) from None
    finally:
        os.environ.pop(force)
        if before is not None:
            os.environ[force] = before
