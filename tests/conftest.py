"""Fixtures of all tests: no network, the folder of real data, a tiny BERT."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before anything imports Hugging Face libraries, and for every process that a test starts.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
if "PYTEST_XDIST_WORKER" in os.environ:  # tests side by side: a core each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in every background job of a script; processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "tests/test_pages.py",
    "tests/slurm",
    "tests/test_encoders_whole_way.py",
    "tests/pretrain/test_ds_configs.py",
    "tests/pretrain/test_resume.py",
    "tests/pretrain/test_export.py",
    "tests/pretrain/test_run.py",
    "tests/pretrain/test_learning.py",
    "tests/pretrain/test_crashes.py",
    "tests/pretrain/test_nodes.py",
    "tests/data_prep/test_build.py",
    "tests/finetune/test_training.py",
    "tests/finetune/test_grid.py",
    "tests/benchmarks",
    "tests/multicls/test_without_project.py",
)


def whole(nodeid: str) -> str:
    """Returns the group of tests that runs in one process: a file, or all of tests/slurm (two shared node names)."""
    return next((name for name in LONGEST if nodeid.startswith(name)), nodeid.split("::")[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: a long one at the end would leave the other processes idle."""
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(whole(item.nodeid), len(order)))


@pytest.hookimpl(optionalhook=True)  # known when pytest-xdist is there
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out whole files."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return whole(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Any:
    """Lets sockets connect to this machine only."""

    def guarded(method: str) -> Any:
        original = getattr(socket.socket, method)

        def connect(self: socket.socket, address: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in (
                "127.0.0.1",
                "::1",
                "localhost",
            ):
                raise RuntimeError(f"a test tried to reach {address}")
            return original(self, address)

        return connect

    with pytest.MonkeyPatch.context() as patch:
        for method in ("connect", "connect_ex"):
            patch.setattr(socket.socket, method, guarded(method))
        yield


@pytest.fixture(autouse=True)
def own_launcher_variables() -> Iterator[None]:
    """Takes back the variables that a test sets to join a process group; later tests would inherit them."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def multicls_data() -> Path:
    """The folder of real data, from the environment variable MULTICLS_DATA."""
    folder = os.environ.get("MULTICLS_DATA")
    if not folder:
        pytest.skip("needs real data: set MULTICLS_DATA to its folder")
    return Path(folder)


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `BertForPreTraining` of random weights (3 layers x 32) and a small WordPiece vocabulary."""
    import torch
    from transformers import BertForPreTraining

    from tests.encoders import encoder_config, wordpiece

    folder, tokenizer = tmp_path_factory.mktemp("tiny_bert"), wordpiece()
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config: Any = encoder_config("bert", tokenizer)
        BertForPreTraining(config).save_pretrained(folder)
    return folder
