"""Kills pretraining at random moments and compares what it ends with: the examples of every step, metrics, weights.

python benchmarks/run.py soak_resume [--kills 20] [--steps 60] [--corpus FOLDER --model CHECKPOINT] [--config JSON]

Undisturbed runs of a tiny model on one and on two ranks come first. Then runs are killed (-9, all ranks or one), or
signalled (TERM or USR1, all ranks or one), at random times, and started again until they finish: a third of them on one
rank, a third on two, a third on one or two by chance. A rank is a fork of this process, which has imported everything.
Without --corpus, the embedded sample's articles.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pretrain.job
import pretrain.run
from benchmarks.compare import Report, new_parser
from benchmarks.workload import shaped_model
from multicls.errors import run_command
from multicls.files import append_jsonl, read_json, read_jsonl, sha256_of
from multicls.sample import SAMPLE_CORPUS
from pretrain.batches import MicroBatch
from pretrain.run_folder import DONE, STOPPED
from pretrain.training import Trainer

TINY = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
VARYING = ("speed/", "memory/")
PATIENCE = 60.0  # seconds that ranks may take to leave


def log_examples(file: Path, launch: int) -> None:
    """Has this process write down which examples a step begins to train on."""
    original = Trainer.train_step

    def train_step(trainer: Trainer, batches: list[MicroBatch], step: int, *args: Any, **kwargs: Any) -> Any:
        examples = {str(batch.number): batch.example_ids.tolist() for batch in batches}
        append_jsonl(file, {"launch": launch, "step": step, "examples": examples})
        return original(trainer, batches, step, *args, **kwargs)

    Trainer.train_step = train_step  # type: ignore[method-assign, assignment]


def fork_ranks(arguments: list[str], ranks: int, folder: Path, launch: int) -> list[int]:
    """Starts pretrain/run.py; process ids by rank."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        output = os.open(folder.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
        os.environ.update({name: str(value) for name, value in names.items()})
        log_examples(folder.with_suffix(".jsonl"), launch)
        code = 1
        try:
            run_command(pretrain.run.main, arguments)
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(code)
    return children


def wait(children: list[int], seconds: float) -> list[int] | None:
    """Exit codes, None if somebody is still there after `seconds`."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for child in children:
            if child not in codes:
                found, state = os.waitpid(child, os.WNOHANG)
                if found:
                    codes[child] = os.waitstatus_to_exitcode(state)
        if len(codes) == len(children):
            return [codes[child] for child in children]
        time.sleep(0.02)
    return None


def examples_of(folder: Path) -> tuple[dict[int, dict[str, Any]], int]:
    """The examples that made the final weights, by step (those of the last launch that took it); steps begun in all."""
    taken: dict[int, tuple[int, dict[str, Any]]] = {}
    begun = set()
    for record in read_jsonl(folder.with_suffix(".jsonl")):
        launch, step = record["launch"], record["step"]
        begun.add((launch, step))
        if step not in taken or launch > taken[step][0]:
            taken[step] = launch, {}
        if launch == taken[step][0]:
            taken[step][1].update(record["examples"])
    return {step: examples for step, (_, examples) in taken.items()}, len(begun)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Returns the records of metrics.jsonl without speed and memory."""
    records = read_jsonl(folder / "metrics.jsonl")
    return [{name: value for name, value in record.items() if not name.startswith(VARYING)} for record in records]


@dataclass
class Soak:
    """The runs with one choice of numbers of ranks, and what was found."""

    ranks: tuple[int, ...]
    rng: random.Random
    arguments: list[str]
    undisturbed: Path
    startup: float
    found: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    loss_difference: float = 0.0
    slowest_exit: float = 0.0

    def disturb(self, kills: int, folder: Path) -> None:
        """Runs and disturbs until `kills` have happened and the last run has finished."""
        launch = 0
        while self.found["disturbed"] < kills or launch:
            stopped = read_json(folder / STOPPED)["step"] if (folder / STOPPED).exists() else None
            arguments = [*self.arguments, "--output_dir", str(folder)]
            arguments += ["--set", f"data.num_workers={self.rng.choice((0, 1))}"]
            children = fork_ranks(arguments, self.rng.choice(self.ranks), folder, launch)
            self._disturb_once(children, enough=self.found["disturbed"] >= kills)
            self.found["launches"] += 1
            begun = [r["step"] for r in read_jsonl(folder.with_suffix(".jsonl")) if r["launch"] == launch]
            if stopped is not None and begun and min(begun) != stopped:
                self.problems.append(f"stopped at step {stopped}, went on at step {min(begun)}")
            launch += 1
            if (folder / DONE).exists():
                self._compare(folder)
                for path in (folder.with_suffix(".txt"), folder.with_suffix(".jsonl")):
                    path.unlink()
                shutil.rmtree(folder)
                launch = 0

    def _disturb_once(self, children: list[int], enough: bool) -> None:
        codes = wait(children, 600 if enough else self.rng.uniform(0.3, 1.1) * self.startup)
        if codes is None:
            number = self.rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1))
            victims = children if self.rng.random() < 0.5 else [self.rng.choice(children)]
            for child in victims:
                os.kill(child, number)
            self.found["disturbed"] += 1
            self.found[number.name] += 1
            start = time.monotonic()
            codes = wait(children, PATIENCE)
            self.slowest_exit = max(self.slowest_exit, time.monotonic() - start)
            if codes is None:
                self.problems.append(f"{number.name}: ranks still there after {PATIENCE} s")
                for child in children:
                    os.kill(child, signal.SIGKILL)
                codes = wait(children, PATIENCE) or []
            if number != signal.SIGKILL and all(code == 0 for code in codes):
                self.found["left with 0"] += 1
        elif any(codes):
            self.problems.append(f"undisturbed, but ended with {codes}")

    def _compare(self, folder: Path) -> None:
        self.found["finished"] += 1
        (ours, begun), (theirs, _) = examples_of(folder), examples_of(self.undisturbed)
        self.found["done again"] += begun - len(theirs)
        self.found["lost or repeated"] += sum(ours.get(step) != examples for step, examples in theirs.items())
        self.found["lost or repeated"] += len(ours.keys() - theirs.keys())
        weights = "hf/model.safetensors"
        if len(self.ranks) == 1:
            same = sha256_of(folder / weights) == sha256_of(self.undisturbed / weights)
            self.found["same bits"] += same and metrics_of(folder) == metrics_of(self.undisturbed)
        for one, other in zip(metrics_of(folder), metrics_of(self.undisturbed), strict=True):
            difference = abs(one["loss/total"] - other["loss/total"]) / other["loss/total"]
            self.loss_difference = max(self.loss_difference, difference)

    def row(self) -> list[str]:
        """Returns a row of the table."""
        bits = f"{self.found['same bits']}/{self.found['finished']}" if len(self.ranks) == 1 else "-"
        names = ("launches", "SIGKILL", "SIGTERM", "SIGUSR1", "left with 0", "finished", "done again")
        cells = [" or ".join(map(str, self.ranks)), *(str(self.found[name]) for name in names)]
        cells += [str(self.found["lost or repeated"]), bits, f"{self.loss_difference:.1e}", f"{self.slowest_exit:.1f}"]
        return cells


COLUMNS = (
    *("ranks", "launches", "-9", "TERM", "USR1", "left with 0", "runs finished", "steps done again"),
    *("steps with examples lost or repeated", "same weights and metrics to the bit"),
    *("largest relative loss difference", "slowest exit (s)"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it; returns 1 if anything was lost or differs."""
    parser = new_parser("soak_resume", __doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--corpus", type=Path, help="written by data_prep/run.py with the tokenizer of --model")
    parser.add_argument("--model", help="a small BERT of which only shape and tokenizer are taken")
    parser.add_argument("--config", default="ds_configs/zero2.json")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    import deepspeed  # noqa: F401
    import torch.utils.tensorboard

    torch.set_num_threads(1)  # threads do not outlive a fork
    rng = random.Random(args.seed)
    if args.corpus is None:
        pretrain.run.prepare_sample_corpus()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = ["--config", args.config, "--recipe", "pretrain/recipes/tiny.yaml", "--steps", str(args.steps)]
        arguments += ["--corpus", str(args.corpus or SAMPLE_CORPUS)]
        arguments += ["--model", args.model or str(shaped_model(folder / "model", TINY))]
        for setting in ("log_every=5", "eval_every=20", "save_every=7"):
            arguments += ["--set", f"run.{setting}"]
        soaks = []
        for ranks in ((1,), (2,), (1, 2)):
            undisturbed = folder / f"undisturbed_{ranks[0]}"
            start = time.monotonic()
            if not undisturbed.exists():
                codes = wait(fork_ranks([*arguments, "--output_dir", str(undisturbed)], ranks[0], undisturbed, 0), 600)
                assert codes == [0] * ranks[0], undisturbed.with_suffix(".txt").read_text()
                startup = time.monotonic() - start
            soaks.append(Soak(ranks, rng, arguments, undisturbed, startup))
        for soak, third in zip(soaks, range(3), strict=True):
            soak.disturb((args.kills + 2 - third) // 3, folder / "killed")
        report = Report("soak_resume", "Runs killed and signalled at random moments", argv)
        what = f"{args.kills} disturbances of runs of {args.steps} steps"
        report.table(what, COLUMNS, [soak.row() for soak in soaks])
        report.write()
        problems = [problem for soak in soaks for problem in soak.problems]
        wrong = sum(soak.found["lost or repeated"] for soak in soaks) + sum(
            soak.found["finished"] - soak.found["same bits"] for soak in soaks if len(soak.ranks) == 1
        )
        print(*problems, sep="\n")
        return int(bool(wrong or problems or any(soak.loss_difference > 1e-3 for soak in soaks)))
