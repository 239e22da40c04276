"""Tasks and their rows: read from official files, the Hub or a user's own; drawn, held out, tokenized and scored."""
