"""The JetSpec draft head: a causal parallel drafter over the target's hidden states (arXiv 2606.18394, section 3).

One forward pass reads the fused features of the committed tokens and a block `[anchor, MASK, MASK, ...]`, and gives one
distribution per drafted position. This file travels to the Hub with a head, so it imports only its siblings
`branch`, `configuration_jetspec`, `target` and `weight_files`.
"""

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, eager_attention_forward, rotate_half

from .branch import BranchScores, JetSpecBranch
from .configuration_jetspec import JetSpecConfig
from .target import base_model, check_architecture, check_target, head_config_for
from .weight_files import KNOBS, check_files, drop_stale_weights, find_file

_COMPANIONS = ("tokenizer", "results", "license", "custom_generate", "name")
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
DRAFTING_DEFAULTS = {"tree_budget": "auto", "tree_width": 16, "draft_depth": None, "step_costs": None}
ONLY_SAFETENSORS = (
    "Heads are read from safetensors files alone: to read a pickle (.bin, .pt, .ckpt) is to run whatever it says."
)


class DraftCache(Protocol):
    """What `JetSpecDraftHead.forward` asks of a cache; transformers' `DFlashCache` and ours both have it."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values of shape `(batch, heads, new, head_dim)` and returns all that a layer may see."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of positions this layer has seen."""


class TargetEmbeddings(Protocol):
    """What embeds tokens as the target does."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's own embedding of these tokens."""


class DraftState(TargetEmbeddings, Protocol):
    """What `JetSpecDraftHead.draft_logits` asks of a generation in progress (`decoding.drafter.DraftingState`)."""

    anchor_positions: torch.Tensor
    draft_depth: int
    block_states: torch.Tensor | None  # (batch, block, hidden), what the last `run_block` returned
    branch_tables: tuple[torch.Tensor, torch.Tensor] | None  # (draft vocabulary, rank) each, made when first needed

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's own `lm_head` over these states: its rows of the draft vocabulary, where there is one."""

    def run_block(self, head: "JetSpecDraftHead", noise_embeds: torch.Tensor) -> torch.Tensor:
        """`head.forward` over the block after the committed context; the block leaves no trace."""


class JetSpecRotaryEmbedding(nn.Module):
    """Rotary embeddings whose frequencies are no buffer, so no cast of the head can round them."""

    def __init__(self, config: JetSpecConfig) -> None:
        super().__init__()
        rope, head_dim = cast(dict[str, Any], config.rope_parameters), cast(int, config.head_dim)
        rope_type = rope["rope_type"]
        self.attention_scaling = 1.0
        if rope_type == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
            self.inv_freq = 1.0 / (rope["rope_theta"] ** exponents)
        else:
            with torch.device("cpu"):  # loading makes modules on the meta device, where numbers are lost
                self.inv_freq, self.attention_scaling = ROPE_INIT_FUNCTIONS[rope_type](config, device="cpu")

    @torch.no_grad()
    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of shape `(batch, 1, positions, head_dim)` in `dtype`, computed in float32."""
        frequencies = position_ids[..., None].float() * self.inv_freq.to(position_ids.device)
        angles = torch.cat((frequencies, frequencies), dim=-1)[:, None]
        return (angles.cos() * self.attention_scaling).to(dtype), (angles.sin() * self.attention_scaling).to(dtype)


class JetSpecAttention(nn.Module):
    """Attention whose queries are the block; its keys and values come from the context's features and the block."""

    def __init__(self, config: JetSpecConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = cast(int, config.head_dim)
        key_value_heads = cast(int, config.num_key_value_heads)
        self.num_key_value_groups = config.num_attention_heads // key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = False  # causality lives in the mask: the context precedes the block
        query_width = config.num_attention_heads * self.head_dim
        key_width = key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        features: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: DraftCache | None,
    ) -> torch.Tensor:
        """Attends from the block to the context and the block.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch, block, hidden)`): The block.
            features (`torch.Tensor` of shape `(batch, new, hidden)`): Fused features not yet in `cache`.
            rotation (`tuple` of two `torch.Tensor` of shape `(batch, 1, new + block, head_dim)`): Cosines and sines.
            attention_mask (`torch.Tensor` of shape `(batch, 1, block, keys)`, *optional*): Additive; its last columns
                count.
            cache (`DraftCache`, *optional*): Keys and values of the earlier context.

        Returns:
            `torch.Tensor` of shape `(batch, block, hidden)`.
        """
        batch, block = hidden_states.shape[:2]
        sources = torch.cat([features, hidden_states], dim=1)
        queries = self.q_norm(self.q_proj(hidden_states).view(batch, block, -1, self.head_dim)).transpose(1, 2)
        keys = self.k_norm(self.k_proj(sources).view(batch, sources.shape[1], -1, self.head_dim)).transpose(1, 2)
        values = self.v_proj(sources).view(batch, sources.shape[1], -1, self.head_dim).transpose(1, 2)
        cos, sin = rotation
        keys = keys * cos + rotate_half(keys) * sin
        queries = queries * cos[..., -block:, :] + rotate_half(queries) * sin[..., -block:, :]
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        if attention_mask is not None:
            attention_mask = attention_mask[..., -keys.shape[-2] :]  # a sliding cache returns only its window
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        # without gradients there is no dropout: drafting must leave the random state to the target's own draws
        dropout = self.config.attention_dropout if self.training and torch.is_grad_enabled() else 0.0
        output, _ = attend(self, queries, keys, values, attention_mask, dropout=dropout, scaling=self.scaling)
        attended: torch.Tensor = self.o_proj(output.reshape(batch, block, -1))
        return attended


class JetSpecDecoderLayer(GradientCheckpointingLayer):
    """A Qwen3-style pre-norm layer over the block."""

    def __init__(self, config: JetSpecConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = JetSpecAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        features: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: DraftCache | None,
    ) -> torch.Tensor:
        """See [`JetSpecAttention.forward`]; only the block is normalised, the features already are."""
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(normed, features, rotation, attention_mask, cache)
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states


class JetSpecDraftHead(PreTrainedModel):
    """The draft head that plugs into `target.generate(..., assistant_model=head)`.

    It has no embedding and no `lm_head` of its own: both are the target's. The knobs `tree_budget`, `tree_width` and
    `draft_depth` live on `head.generation_config`; the statistics of the last call stay on `head.last_acceptance`.

    Args:
        config ([`JetSpecConfig`]): The configuration.

    Example:
        ```python
        >>> head = JetSpecDraftHead.from_pretrained("JetSpec/jetspec-qwen3-8b")
        >>> target.generate(**inputs, assistant_model=head, max_new_tokens=512)
        ```
    """

    config_class = JetSpecConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["JetSpecDecoderLayer"]  # noqa: RUF012  # `PreTrainedModel` declares it an instance variable
    _supports_sdpa = True
    _supports_attention_backend = True
    sharing: ClassVar[Any] = None  # the module `hub.sharing`, set by the package: a copy of this file goes without

    def __init__(self, config: JetSpecConfig) -> None:
        super().__init__(config)
        config.check_fields()
        taps = len(cast(list[int], config.target_layer_ids))
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(JetSpecDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = JetSpecRotaryEmbedding(config)
        self.branch = JetSpecBranch(config) if config.branch_rank else None
        self.draft_token_ids: torch.Tensor | None
        drafted = config.draft_vocab_size
        self.register_buffer("draft_token_ids", None if drafted is None else torch.arange(drafted))
        self.generation_config = GenerationConfig(**DRAFTING_DEFAULTS)
        self.identity = uuid.uuid4().hex  # tells whose keys and values a cache carries, also after pickling
        self.last_acceptance: Any = None
        self.experience: dict[str, Any] = {}  # what automatic budgets learned, per target, batch and way of decoding
        self.tested_targets: set[str] = set()  # kinds of targets whose numerics a generation has already tested
        self.post_init()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated

    @classmethod
    def can_generate(cls) -> bool:
        """`True`, so that the knobs in `generation_config.json` are saved and loaded beside the weights."""
        return True

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: DraftCache | None = None,
        past_key_values: DraftCache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Runs the block after the context: the contract of transformers' own DFlash assistants.

        Args:
            noise_embeds (`torch.Tensor` of shape `(batch, block, hidden)`): The target's embedding of
                `[anchor, MASK, ...]`.
            context_hidden_states (`torch.Tensor` of shape `(batch, new, taps * hidden)`): Tapped states, concatenated,
                of the committed tokens that are not in `cache` yet, strictly before the anchor.
            attention_mask (`torch.Tensor` of shape `(batch, cached + new + block)` or `dict`, *optional*): 0 where
                there is no token; or ready additive masks of shape `(batch, 1, block, cached + new + block)` per layer
                kind, as for many blocks at once in training.
            position_ids (`torch.LongTensor` of shape `(batch, new + block)`, *optional*): Absolute positions.
            cache (`DraftCache`, *optional*): Keys and values of the earlier context; the context **and** the block are
                appended, the caller crops the block. `past_key_values` is its name before transformers 5.24.
            past_key_values (`DraftCache`, *optional*): See `cache`.
            kwargs: Accepted for compatibility with callers of other assistants, and ignored.

        Returns:
            `BaseModelOutput`: `last_hidden_state` of shape `(batch, block, hidden)`, ready for the target's `lm_head`;
            row `k` drafts the token `k` places after the anchor.
        """
        cache = past_key_values if cache is None else cache
        features = self.fuse(context_hidden_states)
        new, block = features.shape[1], noise_embeds.shape[1]
        cached = int(cache.get_seq_length()) if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(cached, cached + new + block, device=noise_embeds.device)[None]
        rotation = self.rotary_emb(position_ids, noise_embeds.dtype)
        if isinstance(attention_mask, dict):
            masks: dict[str, Any] = attention_mask
        else:
            masks = {
                kind: self._block_mask(kind, noise_embeds, attention_mask, cached + new + block)
                for kind in set(self.config.layer_types)
            }
        hidden_states = noise_embeds
        for kind, layer in zip(self.config.layer_types, self.layers, strict=True):
            hidden_states = layer(hidden_states, features, rotation, masks[kind], cache)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def fuse(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """Fuses the tapped states: `hidden_norm(fc(states))`, the source of keys and values in every layer.

        Args:
            context_hidden_states (`torch.Tensor` of shape `(batch, positions, taps * hidden)`): Tapped states,
                concatenated.

        Returns:
            `torch.Tensor` of shape `(batch, positions, hidden)`.
        """
        features: torch.Tensor = self.hidden_norm(self.fc(context_hidden_states))
        return features

    def _block_mask(
        self, kind: str, noise_embeds: torch.Tensor, attention_mask: torch.Tensor | None, keys: int
    ) -> torch.Tensor | None:
        """Additive mask of shape `(batch or 1, 1, block, keys)` for one layer kind, `None` where all is visible."""
        causal = self.config.is_causal(kind)
        window = self.config.sliding_window if kind == "sliding_attention" else None
        if not causal and window is None and attention_mask is None:
            return None
        block, device = noise_embeds.shape[1], noise_embeds.device
        if attention_mask is None:
            ranks = torch.arange(keys, device=device)[None]
            visible = torch.ones(1, block, keys, dtype=torch.bool, device=device)
        else:
            ranks = attention_mask.to(torch.long).cumsum(dim=-1)  # distances skip padding and holes
            visible = attention_mask.bool()[:, None, :].expand(-1, block, -1)
        distance = ranks[:, -block:, None] - ranks[:, None, :]
        if causal:
            visible = visible & (distance >= 0)
        if window is not None:
            visible = visible & (distance.abs() < window)
        mask = torch.zeros(visible.shape, dtype=noise_embeds.dtype, device=device)
        return mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)[:, None]

    def draft_logits(self, anchor_ids: torch.Tensor, state: DraftState) -> torch.Tensor:
        """Drafts one block: the seam between the head and the decoding loop, made to be overridden.

        Args:
            anchor_ids (`torch.LongTensor` of shape `(batch,)`): The last committed token of each row.
            state (`DraftState`): The drafting state of this generation. `state.anchor_positions` (`torch.LongTensor` of
                shape `(batch,)`) are the anchors' absolute positions in their unpadded sequences; `state.draft_depth`
                (`int`) is the depth wanted.

        Returns:
            `torch.Tensor` of shape `(batch, depth, vocab)`: Row `k` scores the token `k + 1` places after the anchor.
            Any depth is right; the loop uses at most `state.draft_depth` rows. A head with a draft vocabulary returns
            its `draft_vocab_size` columns alone, column `j` for the token `draft_token_ids[j]`.
        """
        depth = state.draft_depth
        causal = all(self.config.is_causal(kind) for kind in self.config.layer_types)
        block_ids = anchor_ids.new_full(
            (anchor_ids.shape[0], depth + 1 if causal else self.config.block_size), self.config.mask_token_id
        )
        block_ids[:, 0] = anchor_ids
        hidden_states = state.run_block(self, self.embed(block_ids, state))[:, 1 : depth + 1]
        hidden_states = hidden_states.contiguous()  # else torch copies the weights of `lm_head` for every row
        return self.finish_logits(state.project(hidden_states))

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Applies `logit_scale` and `final_logit_softcapping` to what the target's `lm_head` returned."""
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def embed(self, token_ids: torch.Tensor, state: "TargetEmbeddings") -> torch.Tensor:
        """The target's embedding of tokens as the head wants it: in its dtype and on its device, scaled.

        Args:
            token_ids (`torch.LongTensor` of any shape): Tokens.
            state (`TargetEmbeddings`): What embeds tokens as the target does.

        Returns:
            `torch.Tensor` of shape `(*token_ids.shape, hidden)`.
        """
        embeds = state.embed(token_ids).to(device=self.device, dtype=self.dtype)
        scaled: torch.Tensor = embeds * self.config.embedding_scale
        return scaled

    def branch_term(self, state: DraftState) -> BranchScores | None:
        """What paths of the block drafted last add to the draft logits of their children (`tree.build.BranchTerm`).

        Args:
            state (`DraftState`): The drafting state that [`~JetSpecDraftHead.draft_logits`] was called with.

        Returns:
            `Callable`, *optional*: `None` if the head has no branch term.
        """
        return None if self.branch is None else BranchScores(self.branch, self, state)

    def check_target(self, target: PreTrainedModel) -> None:
        """Checks that this head can draft for this target.

        Args:
            target (`PreTrainedModel`): The model to be sped up.

        Raises:
            ValueError: If the target's architecture cannot be verified with a tree, or its vocabulary, hidden size or
                number of layers is not what the head was made for. Another target name is only a warning.
        """
        check_target(target, cast(JetSpecConfig, self.config))

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        num_hidden_layers: int = 5,
        block_size: int = 16,
        target_layer_ids: list[int] | None = None,
        mask_token_id: int | None = None,
        draft_token_ids: Sequence[int] | None = None,
        **config: Any,
    ) -> "JetSpecDraftHead":
        """Makes an untrained head that fits a target, in its dtype and on its device.

        Args:
            target (`PreTrainedModel`): The model to be sped up.
            num_hidden_layers (`int`, defaults to 5): Number of draft layers.
            block_size (`int`, defaults to 16): Positions of one block, the anchor included.
            target_layer_ids (`list[int]`, *optional*): Tapped layers; spread evenly when missing.
            mask_token_id (`int`, *optional*): Row of the target's embedding that fills undrafted positions; the last
                one that is no special token when missing.
            draft_token_ids (`Sequence[int]`, *optional*): The tokens the head drafts; all of them when missing. Its
                output layer, and the time it takes, shrink with them.
            config: Any other field of [`JetSpecConfig`]; widths and heads default to the target's.

        Returns:
            `JetSpecDraftHead`: In evaluation mode.

        Raises:
            ValueError: If the target cannot be verified with a tree, or a field breaks its rule.
        """
        fields = {
            "num_hidden_layers": num_hidden_layers,
            "block_size": block_size,
            "target_layer_ids": target_layer_ids,
            "mask_token_id": mask_token_id,
            "draft_vocab_size": None if draft_token_ids is None else len(draft_token_ids),
            **config,
        }
        token_ids = None if draft_token_ids is None else torch.as_tensor(draft_token_ids)
        if token_ids is not None and (token_ids.dim() != 1 or (len(token_ids) and token_ids.is_floating_point())):
            raise ValueError(
                f"`draft_token_ids` must be a list of tokens, got {token_ids.dtype} of shape {tuple(token_ids.shape)}."
            )
        if token_ids is None and (size := config.get("draft_vocab_size")) is not None:
            raise ValueError(f"`draft_token_ids` must be given with `draft_vocab_size`, got none for {size} of them.")
        check_architecture(target)
        target = base_model(target)
        head_config = JetSpecConfig(**head_config_for(target, fields))
        check_target(target, head_config)
        embeddings = cast(torch.Tensor, target.get_input_embeddings().weight)
        head: Any = cls(head_config)  # the decorator on `PreTrainedModel.to` hides its signature
        if token_ids is not None:
            head.draft_token_ids = token_ids.long()
            head.check_draft_token_ids()
        head = head.to(embeddings.dtype if embeddings.is_floating_point() else target.dtype).eval()
        placed: JetSpecDraftHead = head if embeddings.device.type == "meta" else head.to(embeddings.device)
        return placed

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads a head of our own or of the published format; no code from the checkpoint ever runs.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): A Hub id, a folder, or `"repo::subfolder"`.
            args: See `PreTrainedModel.from_pretrained`.
            kwargs: See `PreTrainedModel.from_pretrained` (`dtype`, `device_map`, `revision`, `subfolder`, ...), any
                field of [`JetSpecConfig`], and `head_type` (`"jetspec"` or `"dflash"`) for published configs whose keys
                contradict.

        Returns:
            `JetSpecDraftHead`: In evaluation mode.

        Raises:
            ValueError: If the checkpoint is of a kind that cannot be represented, if its tensors are not exactly the
                head's, or if one is of a wrong type or has a NaN or an infinity; if there are adapters beside it, both
                a whole file and shards, or an index that names files elsewhere.
            OSError: If it has no safetensors file: pickles are not read.
        """
        path = pretrained_model_name_or_path
        if isinstance(path, str) and "::" in path:
            path, kwargs["subfolder"] = path.split("::", 1)
        wants_info = kwargs.pop("output_loading_info", False)
        places = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        problems = ["missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"]
        if kwargs.get("ignore_mismatched_sizes"):
            problems.remove("mismatched_keys")
        loading = {**kwargs, "ignore_mismatched_sizes": True, "use_safetensors": True, "output_loading_info": True}
        try:
            if path is not None:
                check_files(path, places, kwargs.get("variant"), kwargs.get("dtype", "auto") in (None, "auto"))
            knobs = cls._saved_knobs(path, places)
            loaded: Any = super().from_pretrained(path, *args, **loading)
        except SafetensorError as error:
            raise ValueError(f"The safetensors files of {path} must be whole, got a damaged one: {error}.") from error
        except OSError as error:
            if "safetensors" not in str(error):
                raise
            raise OSError(f"{error} {ONLY_SAFETENSORS}") from error
        head, info = loaded
        for problem in problems:
            if info.get(problem):
                raise ValueError(
                    f"The tensors of {path} must be exactly those its config describes, got {problem}: "
                    f"{sorted(info[problem])}. `jetspec_hf.hub.read_checkpoint` reads other layouts too."
                )
        head.check_finite()
        head.check_draft_token_ids()
        head.generation_config = GenerationConfig(**{**DRAFTING_DEFAULTS, **knobs})
        return (head, info) if wants_info else head

    def save_pretrained(
        self, save_directory: Any, is_main_process: bool = True, *args: Any, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Writes the head and, with the library installed, its model card.

        Args:
            save_directory (`str` or `os.PathLike`): A folder. A card that is there is brought up to date, not replaced.
            is_main_process (`bool`, defaults to `True`): Whether this process is the one that writes.
            args: See `PreTrainedModel.save_pretrained`.
            push_to_hub (`bool`, defaults to `False`): Refused: [`JetSpecDraftHead.push_to_hub`] is the way.
            kwargs: `tokenizer`, `results`, `license`, `custom_generate` and `name` as
                [`~jetspec_hf.hub.write_companions`] takes them; any other as `PreTrainedModel.save_pretrained` does.

        Raises:
            ValueError: If adapters stand in the head, which no checkpoint of a head has; or if it is to be pushed.
        """
        if kwargs.get("state_dict") is None and any(".lora_" in name for name, _ in self.named_parameters()):
            raise ValueError(
                "A head must be saved without adapters, got one with LoRA: call `jetspec_hf.training.merge_lora` "
                "first, or save it through its trainer."
            )
        if push_to_hub:
            raise ValueError(
                "`push_to_hub` must be `False` in `save_pretrained`, got True: call `head.push_to_hub(repo_id)`."
            )
        companions = {name: kwargs.pop(name) for name in _COMPANIONS if name in kwargs}
        if self.sharing is not None and is_main_process:
            self.sharing.check_companions(self, save_directory, **companions)  # before anything is written
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if is_main_process:
            drop_stale_weights(Path(save_directory))
        if self.sharing is not None and is_main_process:
            self.sharing.write_companions(self, save_directory, **companions)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:  # type: ignore[override]  # mypy cannot read its decorator
        """Pushes the head with its card and the code that decodes without the library.

        Args:
            repo_id (`str`): Where to; made if it does not exist.
            kwargs: See [`~jetspec_hf.hub.push_head`]: `tokenizer`, `results`, `license`, `private`, `revision`, ...

        Returns:
            `CommitInfo`: The commit; as a string its address.
        """
        if self.sharing is None:
            push: Any = super().push_to_hub
            return push(repo_id, **kwargs)
        return self.sharing.push_head(self, repo_id, **kwargs)

    def check_finite(self) -> None:
        """Checks that every weight is a number: a NaN in one makes every draft a NaN.

        Raises:
            ValueError: If one is NaN or infinite; the message names the tensor.
        """
        for name, weight in self.named_parameters():
            if weight.device.type != "meta" and weight.is_floating_point() and not weight.isfinite().all():
                raise ValueError(f"`{name}` must have finite numbers only, got NaN or infinity.")

    def check_draft_token_ids(self) -> None:
        """Checks that the draft vocabulary is a list of different tokens of the target, in ascending order.

        Raises:
            ValueError: If it is not; the message has the first offending token. Or if it is not as long as the config
                says.
        """
        if self.draft_token_ids is None or self.draft_token_ids.device.type == "meta":
            return
        token_ids = self.draft_token_ids.tolist()
        if len(token_ids) != self.config.draft_vocab_size:
            raise ValueError(
                f"`draft_token_ids` must have `draft_vocab_size={self.config.draft_vocab_size}` tokens, got "
                f"{len(token_ids)}."
            )
        for before, token in zip([-1, *token_ids], token_ids, strict=False):
            if not before < token < self.config.vocab_size:
                raise ValueError(
                    f"`draft_token_ids` must be different tokens from 0 to {self.config.vocab_size - 1} in ascending "
                    f"order, got {token} after {before}."
                )

    @staticmethod
    def _saved_knobs(path: Any, places: dict[str, Any]) -> dict[str, Any]:
        """The knobs saved beside the weights; none in a published checkpoint or a bare `state_dict`."""
        if path is None:
            return {}
        if find_file(path, KNOBS, places) is None:
            return {}
        try:
            saved = GenerationConfig.from_pretrained(path, **places)
        except (TypeError, AttributeError, KeyError, ValueError, OSError) as error:
            raise ValueError(f"`{KNOBS}` of {path} must be a generation config: {error}") from error
        return {knob: getattr(saved, knob) for knob in DRAFTING_DEFAULTS if hasattr(saved, knob)}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        if self.branch is not None and module is self.branch.child_proj:
            nn.init.zeros_(module.weight)  # an untrained branch term adds nothing


JetSpecHead = JetSpecDraftHead
