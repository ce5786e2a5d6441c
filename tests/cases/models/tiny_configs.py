"""Configs of transformers' models, small enough to be described and measured in a moment."""

from __future__ import annotations

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": True,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
WHISPER = {
    "model_type": "whisper", "d_model": 16, "encoder_ffn_dim": 32, "encoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_layers": 1, "decoder_ffn_dim": 32,
    "num_mel_bins": 8, "max_source_positions": 12,
}  # fmt: skip
