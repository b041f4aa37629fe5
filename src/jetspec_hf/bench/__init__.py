"""Measurements of the library itself, each a command.

`python -m jetspec_hf.bench` compares a head with everything a user could pick instead, `jetspec_hf.bench.doctor` says
whether to use it, `jetspec_hf.bench.phases` where the time of a step goes, `jetspec_hf.bench.numerics` how often half
precision changes a text, and `jetspec_hf.bench.build` what building a tree costs.
"""
