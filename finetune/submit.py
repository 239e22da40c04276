"""Packs the submission files of several runs for the site of GLUE or SuperGLUE, after a check by its rules.

python finetune/submit.py results/submissions/RUN_ID ... --output glue.zip
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/, whose names must not hide packages

from finetune.data.submissions import check_submission, submission_files
from multicls.errors import UserError, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Packs the submission files of several runs, after a check that all of a benchmark's are there and valid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="+", help="results/submissions/RUN_ID, one for each task")
    parser.add_argument("--output", required=True, metavar="FILE.zip", help="what to upload")
    args = parser.parse_args(argv)
    files = [path for folder in args.folder for path in submission_files(Path(folder))]
    if problems := check_submission(files):
        raise UserError(*problems)
    with zipfile.ZipFile(args.output, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            archive.write(path, path.name)
    print(f"{args.output}: {len(files)} files, as the site wants them")
    return 0


if __name__ == "__main__":
    run_command(main)
