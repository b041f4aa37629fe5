"""`python -m jetspec_hf.bench`: see `speed`."""

from .speed import main

if __name__ == "__main__":
    main()
