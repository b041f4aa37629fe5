"""What is told of the machine, and memory that was really touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jetspec_hf import AcceptanceStats
from jetspec_hf.bench import machine as machine_file
from jetspec_hf.bench.machine import PeakMemory, bytes_of, machine, machine_lines, processor_flags, waiting_phases

CPU = torch.device("cpu")


def test_flags_are_whole_words_of_the_processor_file() -> None:
    text = "model name\t: avx2 in a name\nflags\t\t: fpu avx2x avx512_bf16 amx_tile\n\nflags\t\t: fpu\n"
    assert processor_flags(text) == {"avx2": False, "avx512_bf16": True, "amx_bf16": False}
    assert processor_flags("") == dict.fromkeys(("avx2", "avx512_bf16", "amx_bf16"), False)


def test_the_machine_is_described() -> None:
    found = machine(CPU)
    assert set(found) == {"description", "device", "cores", "threads", "flags"}
    assert f"torch {torch.__version__}" in found["description"]
    assert f"device: cpu; cores: {found['cores']}, torch threads: {torch.get_num_threads()};" in machine_lines(found)


def test_memory_counts_what_is_held_for_a_moment_only() -> None:
    size = 64 * 2**20
    held = torch.ones(size // 4)  # in use before: not counted
    with PeakMemory(CPU) as memory:
        del held
        torch.ones(2 * size // 4).sum()
    if memory.bytes is None:
        pytest.skip("needs a Linux that lets a process reset its high-water mark")
    assert memory.bytes == pytest.approx(size, rel=0.15)  # of two, one takes the place of the one that was given back


def test_tied_weights_take_their_memory_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    assert bytes_of(model) == 2 * 64
    model[1].weight = model[0].weight
    assert bytes_of(model) == 64


def test_phases_wait_for_an_accelerator_at_both_ends_and_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(machine_file, "wait_for", lambda device: calls.append(device.type))

    def one_phase() -> int:
        stats = AcceptanceStats.of_batch(1)
        stats.step_seconds.append({})
        calls.clear()
        with stats.timed("verify"):
            calls.append("work")
        assert stats.step_seconds[0]["verify"] > 0
        return len(calls)

    with waiting_phases(torch.device("cuda")):
        assert one_phase() == 3
    assert calls == ["cuda", "work", "cuda"]
    assert one_phase() == 1
    with waiting_phases(CPU):
        assert one_phase() == 1
