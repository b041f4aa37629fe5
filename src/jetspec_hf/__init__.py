"""JetSpec speculative decoding (arXiv 2606.18394) for Hugging Face transformers.

Importing the package is the only set-up: `target.generate(..., assistant_model=head)` then decodes with a token tree.
"""

from transformers import AutoConfig, AutoModel

from .configuration_jetspec import JetSpecConfig
from .decoding.output import AcceptanceStats, JetSpecGenerateOutput
from .integration import install
from .modeling_jetspec import JetSpecDraftHead, JetSpecHead
from .target import check_target
from .tree import TokenTree, TreePicture, build_tree, draw_tree, tree_attention_mask, tree_position_ids

__version__ = "0.1.0"

__all__ = [
    "AcceptanceStats",
    "JetSpecConfig",
    "JetSpecDraftHead",
    "JetSpecGenerateOutput",
    "JetSpecHead",
    "TokenTree",
    "TreePicture",
    "build_tree",
    "check_target",
    "draw_tree",
    "tree_attention_mask",
    "tree_position_ids",
]

AutoConfig.register(JetSpecConfig.model_type, JetSpecConfig, exist_ok=True)
AutoModel.register(JetSpecConfig, JetSpecDraftHead, exist_ok=True)
install()
