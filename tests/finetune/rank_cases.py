"""The runs of `test_two_ranks_equal_one` on two ranks, all in one launch."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from finetune.run import run_finetune
from multicls.distributed import leave_deepspeed
from tests.finetune.test_isobn import normalise_on_rank
from tests.finetune.test_training import RANKS, case

if __name__ == "__main__":
    model, data, output = sys.argv[1:]
    for name in RANKS:
        run_finetune(case(name, model, data, output, several=True))
        run_finetune(case(name, model, data, output, several=True))  # already finished
    normalise_on_rank(int(os.environ["RANK"]), Path(output))
    leave_deepspeed()
