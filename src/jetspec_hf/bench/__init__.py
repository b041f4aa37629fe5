"""Measurements of the library itself. Each module is a command: `python -m jetspec_hf.bench.phases --help`."""
