"""Statistics of fine-tuning runs: frames of scores and predictions go in; means, intervals and p-values come out.

`estimates` gives a system's mean and its interval, `comparisons` the difference of two systems.
"""
