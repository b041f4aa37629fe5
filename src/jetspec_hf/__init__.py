"""JetSpec speculative decoding (arXiv 2606.18394) for Hugging Face transformers.

Importing the package is the only set-up: `target.generate(..., assistant_model=head)` then decodes with a token tree.
"""

from transformers import AutoConfig, AutoModel, processing_utils

__version__ = "0.1.0"  # before the imports: files that travel with a head name it

from .configuration_jetspec import JetSpecConfig
from .decoding.output import AcceptanceStats, JetSpecGenerateOutput
from .hub import sharing
from .integration import install
from .modeling_jetspec import JetSpecDraftHead, JetSpecHead
from .target import check_target
from .tree import TokenTree, TreePicture, build_tree, draw_tree, tree_attention_mask, tree_position_ids

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
# A pipeline looks for the classes that a config names in transformers alone. This file of it imports it once more, so
# that there are two module objects: the later one counts.
setattr(processing_utils.transformers_module, JetSpecDraftHead.__name__, JetSpecDraftHead)
JetSpecDraftHead.sharing = sharing
install()
