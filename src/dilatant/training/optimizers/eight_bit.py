"""8-bit AdamW: moments in blocks of 256 bytes with one scale each, by bitsandbytes (Dettmers et al. 2022).

Masters stay fp32. A checkpoint stores the moments in fp32 by logical name, like any other: quantisation blocks fit
neither the shards of another layout nor another optimizer. Moments that are read are quantised again, which gives the
same bytes if no weight was cut differently.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dilatant.config import UserError
from dilatant.training.optimizers.master_weights import WithMasters

if TYPE_CHECKING:
    _Base = torch.optim.AdamW
else:
    _Base = object

BLOCK = 256
"""Values of a moment that share one scale."""
_PARTS = {"exp_avg": "1", "exp_avg_sq": "2"}
"""Suffix of bitsandbytes' names for each moment: `state1`, `qmap1`, `absmax1`."""


def require_bitsandbytes() -> None:
    """Raise UserError if bitsandbytes is not installed; imports nothing."""
    if find_spec("bitsandbytes") is None:
        raise UserError(
            "train.optimizer.name: adamw_8bit needs bitsandbytes, which is not installed; "
            "`pip install 'dilatant[8bit]'`, or leave the name out for AdamW with fp32 moments"
        )


@cache
def eight_bit_adamw() -> type[WithMasters]:
    """Import bitsandbytes and return the optimizer class. Raises UserError without it."""
    require_bitsandbytes()
    import bitsandbytes

    return type("EightBitAdamW", (EightBitMoments, WithMasters, bitsandbytes.optim.AdamW8bit), {})


class EightBitMoments(_Base):
    """Mixin for bitsandbytes' optimizer that exposes its moments as fp32 tensors on the host."""

    _read: dict[nn.Parameter, dict[str, Tensor]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._read = {}

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor] | None:
        """Return `step` and the moments in fp32, shaped like the parameter; None before its first update."""
        if parameter in self._read:
            return self._read[parameter]
        state: dict[str, Any] = self.state.get(parameter, {})
        if not state:
            return None
        found = {"step": torch.tensor(float(state["step"]))}
        return found | {name: _numbers(state, part) for name, part in _PARTS.items()}

    def allocate(self, parameter: nn.Parameter) -> None:
        """Allocate fp32 moments for a checkpoint to be read into, until `loaded`."""
        zeros = {name: torch.zeros(parameter.shape) for name in _PARTS}
        self._read[parameter] = {"step": torch.zeros(()), **zeros}

    @torch.no_grad()
    def loaded(self) -> None:
        """Quantise the moments that were read."""
        from bitsandbytes.functional import quantize_blockwise

        places = {
            parameter: (gindex, pindex)
            for gindex, group in enumerate(self.param_groups)
            for pindex, parameter in enumerate(group["params"])
        }
        for parameter, read in self._read.items():
            gindex, pindex = places[parameter]
            self.init_state(self.param_groups[gindex], parameter, gindex, pindex)  # type: ignore[attr-defined]  # of the other base
            state = self.state[parameter]
            state["step"] = int(read["step"])
            for name, part in _PARTS.items():
                own = state[f"state{part}"]
                if own.dtype == torch.float32:
                    own.copy_(read[name])
                    continue
                values = read[name].to(parameter.device)
                bytes_, scales = quantize_blockwise(values, state[f"qmap{part}"], blocksize=BLOCK)
                own.copy_(bytes_)
                state[f"absmax{part}"].copy_(scales.absmax)
        self._read = {}
        super().loaded()  # type: ignore[misc]  # of the other base


def _numbers(state: dict[str, Any], part: str) -> Tensor:
    """Dequantise one moment to fp32 on the host."""
    own = state[f"state{part}"].cpu()
    if own.dtype == torch.float32:
        return own
    numbers = state[f"qmap{part}"].cpu()[own.flatten().int()]
    missing = -len(numbers) % BLOCK
    blocks = nn.functional.pad(numbers, (0, missing)).view(-1, BLOCK) * state[f"absmax{part}"].cpu()[:, None]
    return blocks.flatten()[: own.numel()].view(own.shape)
