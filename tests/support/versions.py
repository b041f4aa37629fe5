"""What differs between the supported releases of transformers."""

from transformers.generation import GenerateDecoderOnlyOutput

# `past_key_values` was renamed in 5.24, in `generate`'s arguments and outputs and in the models' forward.
CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
