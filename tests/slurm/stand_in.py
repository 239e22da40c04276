"""Stands in for pretrain/run.py where a test is about the batch script: starts at once, and fails as --codes sets.

`--codes 1+,0!`: the exit code of each start, the last one for all later ones; "+" saves, "!" finishes.
"wait" saves and leaves with 0 when SIGUSR1 comes. "alone" fails on rank 1 only, with 2; the others wait for it.
"""

import json
import os
import signal
import sys
from pathlib import Path

checkpoint = Path("checkpoint")
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
start = int(os.environ.get("SLURM_RESTART_COUNT", 0))
if "--wrong" in sys.argv:
    sys.exit(2)
if "--status" in sys.argv:
    # a lost node's lock may outlive it, so the words before the checkpoint differ from start to start
    state = "running (process 1)" if start % 2 else "unfinished"
    print(f"{state}, checkpoint at step {step}" if step < 100 else "finished at step 100")
    sys.exit(0 if step == 100 else 3)

rank, port = os.environ["RANK"], os.environ["MASTER_PORT"]
plan = sys.argv[sys.argv.index("--codes") + 1].split(",") if "--codes" in sys.argv else ["0!"]
now = plan[min(start, len(plan) - 1)]
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT SLURMD_NODENAME CUDA_VISIBLE_DEVICES"
seen = {name: os.environ.get(name) for name in names.split()} | {"arguments": sys.argv[1:]}
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
Path(f"rank{rank}.json").write_text(json.dumps(seen))
if rank == "0":
    with open("ports0.txt", "a") as ports:
        print(port, file=ports)
print(f"start {start} rank {rank}", flush=True)
if now == "wait":
    signal.sigwait({signal.SIGUSR1})
    now = "0+"
if now == "alone":
    if rank != "1":
        signal.pause()
    now = "2"
if rank == "0" and now[-1] in "+!":
    checkpoint.write_text("100" if now[-1] == "!" else str(step + 1))
sys.exit(int(now.rstrip("+!")))
