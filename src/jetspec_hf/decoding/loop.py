"""The decoding loop (arXiv 2606.18394, algorithm 1).

Prefill, then draft, build, verify, accept, commit until every row has stopped.
"""

import time
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..modeling_jetspec import JetSpecDraftHead
from ..tree import TokenTree
from .accept import accept, to_host
from .budget import BudgetDecision, Experience, TreeBudget, make_budget
from .cache import CACHE_NAME, is_static
from .drafter import Drafter, DraftingKnobs
from .output import AcceptanceStats, HiddenStates, JetSpecGenerateOutput
from .self_test import signature
from .step_costs import STATIC_LADDER
from .taps import FeatureTaps
from .verifier import Verifier
from .writer import TokenWriter


def tree_decoding(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    head: JetSpecDraftHead,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> torch.Tensor | JetSpecGenerateOutput:
    """Generates exactly what plain decoding would, several tokens per target forward.

    Args:
        target (`PreTrainedModel`): The model to be sped up.
        input_ids (`torch.LongTensor` of shape `(batch, length)`): The prompt.
        head (`JetSpecDraftHead`): The draft head.
        logits_processor (`LogitsProcessorList`): As prepared by `generate`.
        stopping_criteria (`StoppingCriteriaList`): As prepared by `generate`.
        generation_config (`GenerationConfig`): As prepared by `generate`.
        streamer (`BaseStreamer`, *optional*): Receives every token once, after it was accepted.
        synced_gpus (`bool`): Whether ranks that share the weights must all run the same number of forwards.
        model_kwargs: As prepared by `generate`, the cache included.

    Returns:
        `torch.LongTensor` of shape `(batch, length + new)`, or `JetSpecGenerateOutput` with
        `return_dict_in_generate=True`.

    Raises:
        ValueError: If rejected tokens cannot be taken out of the cache.
    """
    taps = FeatureTaps(target, head.config.target_layer_ids)
    verifier = Verifier(target, taps, model_kwargs, generation_config)
    knobs = DraftingKnobs.resolve(head, target, generation_config)
    drafter = Drafter(head, target, verifier.cache, knobs, input_ids.shape[0])
    keeps_cache = bool(generation_config.return_dict_in_generate or getattr(verifier.cache, "_is_user_defined", False))
    lockstep = is_static(verifier.cache)  # it has no slots to spare for rows that are ahead of others
    writer = TokenWriter(input_ids, logits_processor, stopping_criteria, generation_config, streamer, lockstep)
    budget = _make_budget(knobs, head, target, writer, is_static(verifier.cache))
    verifier.fix_shapes(STATIC_LADDER if knobs.tree_budget == "auto" else [knobs.tree_budget])
    stats = head.last_acceptance = AcceptanceStats.of_batch(writer.batch_size)
    hidden_states = HiddenStates(generation_config)

    with taps.attached(), verifier:
        start = time.perf_counter()
        outputs, committed = verifier.prefill(input_ids)
        drafter.see(committed)
        hidden_states.add_prompt(outputs)
        writer.write(range(writer.batch_size), outputs.logits[:, -1])
        del outputs
        stats.prefill_seconds = time.perf_counter() - start

        while verifier.anyone_unfinished(writer.done, synced_gpus):
            if writer.done:  # another rank still needs this one's share of the weights
                verifier.idle()
                continue
            stats.step_seconds.append({})
            rows = writer.growing_rows
            tree, decision = _draft_tree(drafter, verifier, writer, budget, stats)
            with stats.timed("verify"):
                outputs = verifier.verify(tree, last_depths=[max(left - 1, 0) for left in writer.remaining])
            with stats.timed("accept"):
                on_host = to_host(tree, outputs.logits, writer)
                paths = accept(on_host, outputs.logits, writer)
            with stats.timed("commit"):
                drafter.see(verifier.commit(paths))
                hidden_states.add_path(outputs, paths)
            del outputs
            stats.record(tree, on_host.depths, paths, rows, decision)
            budget.learn(paths, rows, stats.step_seconds[-1])

        if keeps_cache:
            _catch_up(drafter, verifier, writer)
            drafter.hand_over(verifier.cache)
    head.last_acceptance = stats  # once more: a callback may have generated with the same head
    sequences = writer.close()
    if not generation_config.return_dict_in_generate:
        return sequences
    fields: dict[str, Any] = {
        "sequences": sequences,
        "scores": writer.scores,
        "logits": writer.logits,
        "hidden_states": hidden_states.per_token,
        "acceptance": stats,
        CACHE_NAME: verifier.cache,
    }
    return JetSpecGenerateOutput(**fields)


def _make_budget(
    knobs: DraftingKnobs, head: JetSpecDraftHead, target: PreTrainedModel, writer: TokenWriter, static: bool
) -> TreeBudget:
    """The budget of the knobs; what an automatic one learns stays on the head, per kind of target, batch and decoding.

    What is sampled or penalised is accepted less often than what is greedy, and takes longer to choose.
    """
    shared = (getattr(target, "tp_size", None) or 1) > 1  # ranks of one model must verify the same trees
    kind = (
        f"{signature(target)} {target.device} rows={writer.batch_size} lockstep={writer.lockstep} static={static} "
        f"{writer.decoding}"
    )
    experience = None if shared else head.experience.setdefault(kind, Experience())
    return make_budget(knobs.tree_budget, knobs.step_costs, experience, static)


def _draft_tree(
    drafter: Drafter, verifier: Verifier, writer: TokenWriter, budget: TreeBudget, stats: AcceptanceStats
) -> tuple[TokenTree, BudgetDecision]:
    """The step's tree: the root alone if no more can be accepted, padding below it in rows that only get padding."""
    anchor_ids = writer.anchors().to(verifier.device)
    depth = max(writer.remaining) - 1  # the last token is always the target's own
    free = verifier.free_nodes
    if depth < 1 or (free is not None and free < 1) or not drafter.drafts:
        return TokenTree.root_only(anchor_ids), budget.skip()
    decision = budget.before_draft(free)
    if decision.tree_budget == 0:
        return TokenTree.root_only(anchor_ids), decision
    with stats.timed("draft"):
        depth = min(depth, decision.tree_budget)  # no tree of so few nodes is deeper
        draft_logits = drafter.draft(anchor_ids, verifier.anchor_positions, depth)
    with stats.timed("build"):
        tree = drafter.build(anchor_ids, draft_logits, decision.tree_budget)
        decision = budget.after_build(tree, writer.growing_rows)
        tree = tree.prefix(decision.tree_budget)
        padding = [writer.is_padding(row) for row in range(writer.batch_size)]
        return _with_padding_chains(tree, padding, writer.pad_id) if any(padding) else tree, decision


def _with_padding_chains(tree: TokenTree, padding: list[bool], pad_id: int) -> TokenTree:
    """The tree with a chain of padding below the root in rows that only get padding.

    So, in lockstep, they never hold the others up.
    """
    tokens = torch.full_like(tree.token_ids, pad_id)
    tokens[:, 0] = tree.token_ids[:, 0]
    chain, rows = TokenTree.chain(tokens), torch.tensor(padding, device=tree.device)[:, None]
    return TokenTree(
        token_ids=torch.where(rows, chain.token_ids, tree.token_ids),
        parents=torch.where(rows, chain.parents, tree.parents),
        depths=torch.where(rows, chain.depths, tree.depths),
        log_probs=torch.where(rows, chain.log_probs, tree.log_probs),
        depth_limit=chain.depth_limit,
    )


def _catch_up(drafter: Drafter, verifier: Verifier, writer: TokenWriter) -> None:
    """Feeds the rows that stopped early their padding, so that the cache is what plain decoding leaves."""
    missing = [max(writer.lengths) - length for length in writer.lengths]
    if any(missing):
        padding = TokenTree.chain(writer.tail(max(missing)).to(verifier.device))
        verifier.verify(padding, last_depths=missing, needs_logits=False)
        drafter.see(verifier.commit([list(range(count)) for count in missing]))
