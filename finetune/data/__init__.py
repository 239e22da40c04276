"""The tasks and their rows: official files, the Hub or a user's own; drawn, held out, tokenized; metrics."""
