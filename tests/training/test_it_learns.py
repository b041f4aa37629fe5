"""A head that has seen a text often enough drafts all of it: the whole path from rows to the decoding loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec_hf.training.evaluation import measure_acceptance
from jetspec_hf.training.rows import rows_from_answers
from jetspec_hf.training.simulation import simulate_budgets
from jetspec_hf.training.target_reader import TargetReader
from support.tiny_targets import tiny_target
from support.training_runs import make_trainer, tiny_head

PROMPTS = [[5, 9, 17], [40, 3, 8, 8], [77, 12]]
NEW_TOKENS, BLOCK_SIZE = 25, 5  # the prefill gives the first; the others are six steps of a block's depth and a bonus


@pytest.mark.parametrize("fields", [{}, {"causal": False}, {"branch_rank": 8, "draft_token_ids": list(range(126))}])
def test_a_head_overfitted_to_the_targets_own_text_drafts_whole_blocks_of_it(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    target = tiny_target("llama")
    target.generation_config.eos_token_id = None
    with torch.no_grad():
        target.lm_head.weight *= 8  # sure of what it says: a tree is as deep as its head is sure
    answers = []
    for prompt in PROMPTS:
        written = target.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        answers.append({"prompt_ids": prompt, "response_ids": written[0, len(prompt) :].tolist()})
    rows = rows_from_answers(answers)
    assert max(max(answer["response_ids"]) for answer in answers) < 126

    head = tiny_head(target, block_size=BLOCK_SIZE, **fields)
    trainer = make_trainer(
        tmp_path, target=target, head=head, train=rows, max_steps=300, learning_rate=1e-2, per_device_train_batch_size=3
    )
    before = measure_acceptance(head, target, PROMPTS, [16], max_new_tokens=NEW_TOKENS, progress=False)[16]
    trainer.train()

    real = measure_acceptance(head, target, PROMPTS, ["chain", 16], max_new_tokens=NEW_TOKENS, progress=False)
    reader = TargetReader(target, head.config.target_layer_ids)
    simulated = simulate_budgets(head, reader, rows, ["chain", 16], progress=False)
    whole_blocks = [[BLOCK_SIZE] * 4 + [4]] * len(PROMPTS)  # the last step has four tokens left
    assert before.mean_acceptance_length < 2
    for budget in ("chain", 16):
        assert real[budget].accepted_lengths == whole_blocks
        assert simulated[budget].accepted_lengths == whole_blocks
