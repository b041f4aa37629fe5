"""Training blocks: where heads are trained to draft, what they see there, and what the target says (arXiv 2606.18394).

Every block is what inference drafts from: `[anchor, MASK, ...]` after the features of the positions strictly before the
anchor, blind to every other block. Many blocks of a row go through the head in one forward.
"""

from dataclasses import dataclass
from typing import cast

import torch

from ..configuration_jetspec import JetSpecConfig
from ..modeling_jetspec import JetSpecDraftHead, TargetEmbeddings


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch of rows.

    Attributes:
        anchors (`torch.LongTensor` of shape `(batch, blocks)`): Slot of each anchor in its row.
        used (`torch.BoolTensor` of shape `(batch, blocks)`): `False` where a row has fewer blocks than others.
        positions (`torch.LongTensor` of shape `(batch, blocks, block_size)`): Rotary positions in the documents.
        labels (`torch.LongTensor` of shape `(batch, blocks, depth)`): The tokens 1, 2, ... places after the anchor.
        supervised (`torch.BoolTensor` of shape `(batch, blocks, depth)`): Whether there is such a token, written by the
            target, and every one before it is too.
        teacher_slots (`torch.LongTensor` of shape `(batch, blocks, depth)`): Slot whose target state predicts it.
    """

    anchors: torch.Tensor
    used: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    supervised: torch.Tensor
    teacher_slots: torch.Tensor


def document_positions(document_ids: torch.Tensor) -> torch.Tensor:
    """Positions within each document of rows, from 0; documents are runs of equal ids, -1 is padding.

    Args:
        document_ids (`torch.LongTensor` of shape `(batch, length)`): The document of each slot.

    Returns:
        `torch.LongTensor` of shape `(batch, length)`.
    """
    slots = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return slots - torch.where(begins, slots, 0).cummax(dim=1).values


def number_documents(document_ids: torch.Tensor) -> torch.Tensor:
    """Gives each run of equal ids an id of its own, in order; -1 stays.

    Args:
        document_ids (`torch.LongTensor` of shape `(batch, length)`): The document of each slot, -1 for padding.

    Returns:
        `torch.LongTensor` of shape `(batch, length)`.
    """
    runs = torch.zeros_like(document_ids)
    runs[:, 1:] = (document_ids[:, 1:] != document_ids[:, :-1]).cumsum(dim=1)
    return runs.masked_fill(document_ids < 0, -1)


def eligible_anchors(loss_mask: torch.Tensor, document_ids: torch.Tensor) -> torch.Tensor:
    """Slots that may be anchors: those whose next token, in the same document, the target wrote.

    So the last token of a prompt is one, which inference never drafts from but which costs nothing to learn, and so is
    the last but one of an answer, whose block has a single supervised token.

    Args:
        loss_mask (`torch.BoolTensor` of shape `(batch, length)`): The tokens that the target wrote.
        document_ids (`torch.LongTensor` of shape `(batch, length)`): The document of each slot, -1 for padding.

    Returns:
        `torch.BoolTensor` of shape `(batch, length)`.
    """
    eligible = torch.zeros_like(loss_mask)
    same = (document_ids[:, 1:] == document_ids[:, :-1]) & (document_ids[:, 1:] >= 0)
    eligible[:, :-1] = loss_mask[:, 1:] & same
    return eligible


def sample_anchors(
    loss_mask: torch.Tensor, document_ids: torch.Tensor, count: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws anchors of each row uniformly among the eligible slots, none twice.

    Args:
        loss_mask (`torch.BoolTensor` of shape `(batch, length)`): The tokens that the target wrote.
        document_ids (`torch.LongTensor` of shape `(batch, length)`): The document of each slot, -1 for padding.
        count (`int`): Anchors per row at most.
        generator (`torch.Generator`, *optional*): On the CPU.

    Returns:
        `tuple`: `anchors` (`torch.LongTensor`) and `used` (`torch.BoolTensor`), both of shape `(batch, blocks)`; the
        anchors of a row ascend.
    """
    priorities = torch.rand(loss_mask.shape, generator=generator).to(loss_mask.device)
    return choose_anchors(priorities, loss_mask, document_ids, count)


def choose_anchors(
    priorities: torch.Tensor, loss_mask: torch.Tensor, document_ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The eligible slots of highest priority; see [`sample_anchors`], which draws the priorities.

    Args:
        priorities (`torch.Tensor` of shape `(batch, length)`): Between 0 and 1.
        loss_mask (`torch.BoolTensor` of shape `(batch, length)`): The tokens that the target wrote.
        document_ids (`torch.LongTensor` of shape `(batch, length)`): The document of each slot, -1 for padding.
        count (`int`): Anchors per row at most.

    Returns:
        `tuple`: As [`sample_anchors`].
    """
    length = loss_mask.shape[1]
    eligible = eligible_anchors(loss_mask, document_ids)
    most = max(1, min(count, int(eligible.sum(dim=1).max())))
    chosen = priorities.masked_fill(~eligible, -1.0).topk(most, dim=1).indices
    anchors = torch.where(eligible.gather(1, chosen), chosen, length).sort(dim=1).values
    used = anchors < length
    return anchors.masked_fill(~used, 0), used


def make_blocks(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    document_ids: torch.Tensor,
    anchors: torch.Tensor,
    used: torch.Tensor,
    block_size: int,
) -> Blocks:
    """The blocks at these anchors.

    Args:
        input_ids (`torch.LongTensor` of shape `(batch, length)`): The rows.
        loss_mask (`torch.BoolTensor` of shape `(batch, length)`): The tokens that the target wrote.
        document_ids (`torch.LongTensor` of shape `(batch, length)`): The document of each slot, -1 for padding.
        anchors (`torch.LongTensor` of shape `(batch, blocks)`): Slot of each anchor.
        used (`torch.BoolTensor` of shape `(batch, blocks)`): Which of them count.
        block_size (`int`): Positions of a block, the anchor included.

    Returns:
        [`Blocks`]
    """
    (batch, length), blocks = input_ids.shape, anchors.shape[1]
    offsets = torch.arange(block_size, device=input_ids.device)
    slots = anchors[:, :, None] + offsets[1:]
    inside = slots.clamp(max=length - 1).flatten(1)

    def at_slots(values: torch.Tensor) -> torch.Tensor:
        return values.gather(1, inside).view(batch, blocks, -1)

    same_document = at_slots(document_ids) == document_ids.gather(1, anchors)[:, :, None]
    supervised = used[:, :, None] & (slots < length) & same_document & at_slots(loss_mask)
    supervised = supervised.long().cumprod(dim=2).bool()
    return Blocks(
        anchors=anchors,
        used=used,
        positions=document_positions(document_ids).gather(1, anchors)[:, :, None] + offsets,
        labels=at_slots(input_ids).masked_fill(~supervised, 0),
        supervised=supervised,
        teacher_slots=(slots - 1).clamp(max=length - 1),
    )


def training_masks(
    config: JetSpecConfig, document_ids: torch.Tensor, blocks: Blocks, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The masks under which all blocks go through the head at once.

    A block position sees the context of its own document strictly before its anchor, and of the blocks only its own: up
    to itself in causal layers, all of it in others; in sliding layers nothing at a distance of the window or more.

    Args:
        config ([`JetSpecConfig`]): The head's configuration.
        document_ids (`torch.LongTensor` of shape `(batch, length)`): The document of each slot, -1 for padding.
        blocks ([`Blocks`]): The blocks.
        dtype (`torch.dtype`): That of the head.

    Returns:
        `dict[str, torch.Tensor]`: Per layer kind, of shape `(batch, 1, blocks * block_size, length + blocks *
        block_size)`; 0 where a position sees, the dtype's lowest number where it does not.
    """
    (batch, length), (count, block_size) = document_ids.shape, blocks.positions.shape[1:]
    device = document_ids.device
    document_ids = number_documents(document_ids)
    slots = torch.arange(length, device=device)
    sees_context = (slots < blocks.anchors[:, :, None]) & (
        document_ids[:, None, :] == document_ids.gather(1, blocks.anchors)[:, :, None]
    )
    offsets = torch.arange(block_size, device=device)
    block_distance = offsets[:, None] - offsets[None, :]
    own_block = torch.eye(count, dtype=torch.bool, device=device)[:, None, :, None]
    masks = {}
    for kind in set(cast(list[str], config.layer_types)):
        context = sees_context[:, :, None, :].expand(-1, -1, block_size, -1)
        block = block_distance >= 0 if config.is_causal(kind) else torch.ones_like(block_distance, dtype=torch.bool)
        if kind == "sliding_attention":
            window = cast(int, config.sliding_window)
            context_distance = blocks.positions[..., None] - document_positions(document_ids)[:, None, None, :]
            context = context & (context_distance < window)
            block = block & (block_distance.abs() < window)
        rows = count * block_size
        blocks_part = (own_block & block[None, :, None, :]).reshape(1, rows, rows).expand(batch, -1, -1)
        visible = torch.cat([context.reshape(batch, rows, length), blocks_part], dim=2)
        mask = torch.zeros(visible.shape, dtype=dtype, device=device)
        masks[kind] = mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
    return masks


def draft_states(
    head: JetSpecDraftHead,
    embeddings: TargetEmbeddings,
    input_ids: torch.Tensor,
    document_ids: torch.Tensor,
    features: torch.Tensor,
    blocks: Blocks,
) -> torch.Tensor:
    """The head's states of every drafted position, as inference computes them.

    Args:
        head (`JetSpecDraftHead`): The head.
        embeddings (`TargetEmbeddings`): What embeds tokens as the target does.
        input_ids (`torch.LongTensor` of shape `(batch, length)`): The rows.
        document_ids (`torch.LongTensor` of shape `(batch, length)`): The document of each slot, -1 for padding.
        features (`torch.Tensor` of shape `(batch, length, taps * hidden)`): The target's tapped states.
        blocks ([`Blocks`]): The blocks.

    Returns:
        `torch.Tensor` of shape `(batch, blocks, depth, hidden)`: Row `k` drafts the token `k + 1` places after the
        anchor.
    """
    (batch, count), block_size = blocks.anchors.shape, blocks.positions.shape[2]
    config = cast(JetSpecConfig, head.config)
    block_ids = input_ids.new_full((batch, count, block_size), config.mask_token_id)
    block_ids[:, :, 0] = input_ids.gather(1, blocks.anchors)
    positions = torch.cat([document_positions(document_ids), blocks.positions.flatten(1)], dim=1)
    states: torch.Tensor = head(
        noise_embeds=head.embed(block_ids.flatten(1), embeddings),
        context_hidden_states=features.to(device=head.device, dtype=head.dtype),
        attention_mask=training_masks(config, document_ids, blocks, head.dtype),
        position_ids=positions,
    ).last_hidden_state
    return states.view(batch, count, block_size, -1)[:, :, 1:]


def branch_states(
    head: JetSpecDraftHead, embeddings: TargetEmbeddings, input_ids: torch.Tensor, states: torch.Tensor, blocks: Blocks
) -> torch.Tensor | None:
    """The branch term's states along the true continuations, without a gradient into `states`.

    Args:
        head (`JetSpecDraftHead`): The head.
        embeddings (`TargetEmbeddings`): What embeds tokens as the target does.
        input_ids (`torch.LongTensor` of shape `(batch, length)`): The rows.
        states (`torch.Tensor` of shape `(batch, blocks, depth, hidden)`): Those of [`draft_states`].
        blocks ([`Blocks`]): The blocks.

    Returns:
        `torch.Tensor` of shape `(batch, blocks, depth, rank)`, *optional*: `None` if the head has no branch term.
    """
    if head.branch is None:
        return None
    parents = input_ids.gather(1, blocks.teacher_slots.flatten(1)).view(blocks.teacher_slots.shape)
    found: torch.Tensor = head.branch.states(head.embed(parents, embeddings), states.detach())
    return found
