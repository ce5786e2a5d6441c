"""An encoder's config tells the shapes at both its ends, without weights and without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig

from cases.often import often
from cases.tiny_models import ENCODERS, vision_language
from dilatant.config import UserError
from dilatant.models.core.geometry import encoder_geometry

EXTRA = {
    "not square": {**ENCODERS["siglip"], "image_size": 8, "patch_size": 4},
    "deit": {**ENCODERS["dinov2"], "model_type": "deit", "intermediate_size": 48},
    "beit, not in the table": {**ENCODERS["dinov2"], "model_type": "beit", "intermediate_size": 48},
    "aimv2, not in the table": {**ENCODERS["dinov2"], "model_type": "aimv2_vision_model", "intermediate_size": 48},
}
KINDS = ("clip", "siglip", "dinov2_registers", "dinov3", "whisper", "not square", "aimv2, not in the table")


@pytest.mark.parametrize("features", ["all", "patch"])
@pytest.mark.parametrize("family", often([*ENCODERS, *EXTRA], *KINDS))
def test_geometry_is_what_the_forward_gives(family: str, features: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENCODERS, family, ENCODERS.get(family) or EXTRA[family])
    unit = vision_language(encoder=family, features=features)["vision"]
    geometry = encoder_geometry(unit.model.config, features)
    inputs = {geometry.input_name: torch.randn(2, *geometry.row_shape)}
    rows = inputs[geometry.input_name].split(1)  # of several, Pixtral makes one row
    raw = torch.cat([unit.model(**{geometry.input_name: row}).last_hidden_state for row in rows])
    assert raw.shape == (2, geometry.encoder_tokens, geometry.width)
    assert unit(inputs).shape == (2, geometry.tokens_per_row, 32)
    assert geometry.input_name == unit.model.main_input_name


def test_sizes_of_well_known_encoders() -> None:
    def tokens(model_type: str, **settings: int) -> int:
        return encoder_geometry(AutoConfig.for_model(model_type, **settings)).tokens_per_row

    assert tokens("clip_vision_model", image_size=336, patch_size=14) == 577
    assert tokens("siglip_vision_model", image_size=384, patch_size=14) == 729
    assert tokens("dinov2", image_size=518, patch_size=14) == 1370
    assert tokens("whisper") == 1500
    whisper = encoder_geometry(AutoConfig.for_model("whisper", num_mel_bins=128))
    assert (whisper.kind, whisper.row_shape, whisper.input_name) == ("audio", (128, 3000), "input_features")


def test_the_patches_alone_leave_out_class_and_register_tokens() -> None:
    unit = vision_language(encoder="dinov2_registers", features="patch", projector="linear")["vision"]
    pixels = torch.randn(1, 3, 8, 8)
    hidden = unit.model(pixel_values=pixels).last_hidden_state
    assert torch.equal(unit({"pixel_values": pixels}), unit.projector(hidden[:, 4:]))


def test_a_config_that_is_no_encoder_is_refused() -> None:
    with pytest.raises(UserError, match="'llama' does not look like an encoder"):
        encoder_geometry(AutoConfig.for_model("llama"))
    with pytest.raises(UserError, match=r"vit_mae.*fewer than it has patches"):
        encoder_geometry(AutoConfig.for_model("vit_mae"))


def test_geometry_imports_no_torch() -> None:
    code = "import sys, dilatant.models.core.geometry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
