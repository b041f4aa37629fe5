"""Small training runs, here or in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel, TrainerCallback

import jetspec_hf
from jetspec_hf import JetSpecDraftHead
from jetspec_hf.target import decoder_layers
from jetspec_hf.training.arguments import JetSpecTrainingArguments
from jetspec_hf.training.trainer import JetSpecTrainer
from support.tiny_targets import tiny_target

MASK = 127


def random_rows(count: int, seed: int = 0, shortest: int = 6, longest: int = 24) -> list[dict[str, Any]]:
    """Rows of random tokens with prompts and answers of very different lengths."""
    draws = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(shortest, longest + 1, (1,), generator=draws))
        prompt = int(torch.randint(1, length - 2, (1,), generator=draws))
        ids = torch.randint(3, MASK, (length,), generator=draws).tolist()
        rows.append({"input_ids": ids, "loss_mask": [0] * prompt + [1] * (length - prompt)})
    return rows


def walking_target(swaps: int = 0) -> PreTrainedModel:
    """A tiny llama whose most likely token follows from the last one: it walks round a circle of all tokens but a few.

    Heads learn it in seconds. `swaps` exchanges the successors of as many pairs of tokens: a fine-tuning of sorts.
    """
    target = tiny_target("llama")
    circle = torch.randperm(28, generator=torch.Generator().manual_seed(1)) + 3
    following = torch.arange(128)
    following[circle] = circle.roll(-1)
    for one, other in circle[: 4 * swaps].view(-1, 2, 2)[:, :, 0].tolist():
        following[[one, other]] = following[[other, one]]
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight *= 0.1
            layer.mlp.down_proj.weight *= 0.1
        embeddings = torch.randn(128, 64, generator=torch.Generator().manual_seed(2))
        target.model.embed_tokens.weight.copy_(embeddings)
        target.lm_head.weight[following] = 1.5 * embeddings / 8
        target.lm_head.weight[[*range(3), *range(31, 128)]] = 0.0
    return target


def sampled_rows(target: PreTrainedModel, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows that the walking target wrote itself, by sampling 14 tokens after prompts of two."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        prompts = torch.randint(3, 31, (count, 2))
        ids = target.generate(
            prompts, do_sample=True, max_new_tokens=14, suppress_tokens=[*range(3), *range(31, 128)], pad_token_id=0
        )
    return [{"input_ids": row, "loss_mask": [0] * 2 + [1] * 14} for row in ids.tolist()]


def tiny_head(target: PreTrainedModel, **fields: Any) -> JetSpecDraftHead:
    """A head of one layer and three drafted positions; the same arguments give the same weights."""
    fields = {"num_hidden_layers": 1, "block_size": 4, "mask_token_id": MASK, "target_layer_ids": [0, 1], **fields}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return JetSpecDraftHead.from_target(target, **fields)


def arguments(folder: str | Path, **fields: Any) -> JetSpecTrainingArguments:
    """On the CPU and silent, every anchor of a row in use, nothing saved or reported unless asked for."""
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1000}
    return JetSpecTrainingArguments(str(folder), **{**quiet, **fields})


def make_trainer(
    folder: str | Path,
    *,
    target: PreTrainedModel | None = None,
    head: JetSpecDraftHead | None = None,
    train: Sequence[Any] | None = None,
    evaluation: Any = None,
    callbacks: list[TrainerCallback] | None = None,
    **fields: Any,
) -> JetSpecTrainer:
    """A trainer of a tiny head for a tiny target."""
    target = tiny_target("llama") if target is None else target
    return JetSpecTrainer(
        model=tiny_head(target) if head is None else head,
        target=target,
        args=arguments(folder, **fields),
        train_dataset=train,
        eval_dataset=evaluation,
        callbacks=callbacks,
    )


class Announce(TrainerCallback):
    """Says what happens, so that a test knows when to kill the process."""

    def on_save(self, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        print("saved", state.global_step, flush=True)

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        print("step", state.global_step, flush=True)


def run(options: dict[str, Any]) -> None:
    """Trains as the options say, in float64; the first process writes weights and log to `out`."""
    target = tiny_target("llama").to(torch.float64)
    head = tiny_head(target, **options.get("head", {}))
    if options.get("shard"):
        torch.distributed.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in decoder_layers(target):
            fully_shard(layer, mesh=mesh)
    trainer = make_trainer(
        options["folder"],
        target=target,
        head=head,
        train=random_rows(options["rows"]),
        evaluation=random_rows(4, seed=1),
        callbacks=[Announce()],
        **options["arguments"],
    )
    trainer.train(resume_from_checkpoint=options.get("resume"))
    if trainer.is_world_process_zero():
        save_file(dict(trainer.head.state_dict()), options["out"])
        Path(options["out"]).with_suffix(".json").write_text(json.dumps(trainer.state.log_history))


def start(runs: list[dict[str, Any]], processes: int = 1) -> subprocess.Popen[str]:
    """Starts processes that do these runs one after the other; what they announce is in `stdout`."""
    paths = [str(Path(jetspec_hf.__file__).parents[1]), str(Path(__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *launcher, "-m", "support.training_runs", json.dumps(runs)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for options in json.loads(sys.argv[1]):
        run(options)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
