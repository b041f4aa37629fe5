"""Trains a draft head for a target from the target's own answers, and measures what the target accepts of its drafts.

    python -m jetspec_hf.training.regenerate --target TARGET --prompts prompts.jsonl --output answers.jsonl
    python examples/train_head.py --target TARGET --answers answers.jsonl --output_dir my_head
    python examples/train_head.py examples/recipes/qwen2.5-coder-1.5b-instruct.json --target TARGET \
        --answers answers.jsonl --output_dir my_head

The same as `jetspec train`; `jetspec_hf.training.recipe` tells what the options mean.
"""

from jetspec_hf.training.recipe import main

if __name__ == "__main__":
    main()
