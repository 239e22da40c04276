"""Fine-tuning: tasks, heads, training, grids, statistics and reports."""
