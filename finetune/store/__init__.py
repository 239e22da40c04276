"""The results folder: the only code that reads or writes it."""
