"""Nets and autoencoders of diffusers that draw in milliseconds."""

from __future__ import annotations

from typing import Any

SD3: dict[str, Any] = {
    "_class_name": "SD3Transformer2DModel", "sample_size": 4, "patch_size": 2, "in_channels": 1, "out_channels": 1,
    "num_layers": 2, "attention_head_dim": 4, "num_attention_heads": 2, "joint_attention_dim": 12,
    "caption_projection_dim": 8, "pooled_projection_dim": 6, "pos_embed_max_size": 4,
}  # fmt: skip
PIXART: dict[str, Any] = {
    "_class_name": "PixArtTransformer2DModel", "sample_size": 4, "patch_size": 2, "in_channels": 4, "out_channels": 8,
    "num_layers": 2, "attention_head_dim": 4, "num_attention_heads": 2, "cross_attention_dim": 8,
    "caption_channels": 12,
}  # fmt: skip
SANA: dict[str, Any] = {
    "_class_name": "SanaTransformer2DModel", "sample_size": 4, "patch_size": 1, "in_channels": 4, "out_channels": 4,
    "num_layers": 2, "attention_head_dim": 4, "num_attention_heads": 2, "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 4, "cross_attention_dim": 8, "caption_channels": 12,
}  # fmt: skip
UNET: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel", "sample_size": 4, "in_channels": 4, "out_channels": 4,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "block_out_channels": [4, 8], "layers_per_block": 1,
    "cross_attention_dim": 12, "attention_head_dim": 2, "norm_num_groups": 2,
}  # fmt: skip
FLUX: dict[str, Any] = {
    "_class_name": "FluxTransformer2DModel", "in_channels": 16, "num_layers": 1, "num_single_layers": 1,
    "attention_head_dim": 8, "num_attention_heads": 1, "joint_attention_dim": 12, "pooled_projection_dim": 6,
    "axes_dims_rope": [2, 4, 2], "guidance_embeds": True,
}  # fmt: skip
KL: dict[str, Any] = {
    "_class_name": "AutoencoderKL", "in_channels": 3, "out_channels": 3, "latent_channels": 4,
    "block_out_channels": [4, 4], "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2, "norm_num_groups": 2, "sample_size": 8,
}  # fmt: skip
CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 8, "patch_size": 2,
}  # fmt: skip
OF_FEATURES: dict[str, Any] = {**SD3, "in_channels": 8, "out_channels": 8, "patch_size": 1}
"""A net that draws this vision model's features."""
NETS = {"sd3": (SD3, None), "pixart": (PIXART, KL), "sana": (SANA, KL), "unet": (UNET, KL), "flux": (FLUX, KL)}
"""Family → settings of a net and of its autoencoder."""
SIZES = {"FluxTransformer2DModel": 4}
"""Class of a net whose settings have no size → that of its pictures."""
