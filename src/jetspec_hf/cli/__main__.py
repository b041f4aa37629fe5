"""`python -m jetspec_hf.cli`, where the `jetspec` script is not on the path."""

from . import main

main()
