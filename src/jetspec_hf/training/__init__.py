"""Train a draft head: the target writes the data, the head learns what it would say next, acceptance is measured.

`regenerate`, `recipe` and `evaluation` are also commands, as in `python -m jetspec_hf.training.recipe --help`, and are
imported by name.
"""

from .adapters import add_lora, merge_lora
from .arguments import JetSpecTrainingArguments
from .draft_vocabulary import DraftVocabulary, choose_draft_token_ids
from .objective import Objective
from .rows import RowCollator, pack_rows, rows_from_answers, rows_from_messages
from .simulation import simulate_acceptance, simulate_budgets
from .target_reader import TargetReader
from .trainer import JetSpecTrainer

__all__ = [
    "DraftVocabulary",
    "JetSpecTrainer",
    "JetSpecTrainingArguments",
    "Objective",
    "RowCollator",
    "TargetReader",
    "add_lora",
    "choose_draft_token_ids",
    "merge_lora",
    "pack_rows",
    "rows_from_answers",
    "rows_from_messages",
    "simulate_acceptance",
    "simulate_budgets",
]
