"""Attention plan: one mask's block tables and work lists, computed once and shared by all layers of a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from dilatant.attention.kernels.mask_class import MaskClass, mask_class
from dilatant.attention.masks.blocks import BlockTable, block_table
from dilatant.attention.masks.mask import TOGETHER, AttentionMask
from dilatant.attention.masks.work import work_list


class MaskTensors(NamedTuple):
    """A mask on a device: 64-bit words (int64 `[tokens]`) and positions (int32 `[tokens]`) of queries and of keys."""

    query_fields: torch.Tensor
    query_positions: torch.Tensor
    key_fields: torch.Tensor
    key_positions: torch.Tensor


class DeviceWork(NamedTuple):
    """A `WorkList` on a device: int32 `[units, 5]`, `[intervals, 2]` and `[splits, 3]`."""

    units: torch.Tensor
    intervals: torch.Tensor
    splits: torch.Tensor
    num_slots: int


class AttentionPlan:
    """Everything that attention derives from a mask, computed on first use. Build one per microbatch for all layers.

    `keys` is the mask of the keys if they are not the queries' own row (a context-parallel rank holds some of the
    queries and all keys); its window is ignored. Tables are cached per window width, block size and device, and freed
    with the plan. `in_windows` is a separate plan, used instead of this one in layers with a window.
    """

    def __init__(
        self, mask: AttentionMask, keys: AttentionMask | None = None, in_windows: AttentionPlan | None = None
    ) -> None:
        self.mask = mask
        self.in_windows = in_windows
        self.keys = mask if keys is None else keys
        self._parent: AttentionPlan | None = None
        self._windows: dict[int | None, AttentionPlan] = {mask.window: self}
        self._remembered: dict[Any, Any] = {}
        self.has_together = bool((mask.runs.field & TOGETHER).any())

    def __repr__(self) -> str:
        keys = "" if self.keys is self.mask else f" x {self.keys.num_tokens} keys"
        window = "" if self.mask.window is None else f", window {self.mask.window}"
        return f"AttentionPlan({self.mask.num_tokens} tokens{keys}{window})"

    def derived(self, change: Callable[[AttentionMask], AttentionMask]) -> AttentionPlan:
        """Return the plan of the mask that `change` makes of this one's, for a row whose keys are its own."""
        return AttentionPlan(
            change(self.mask), in_windows=None if self.in_windows is None else self.in_windows.derived(change)
        )

    def windowed(self, window: int | None) -> AttentionPlan:
        """Return the same row's plan under another window width. It is cached, so that layers of one kind share it."""
        if self.in_windows is not None and window is not None:
            return self.in_windows.windowed(window)
        plan = self._windows.get(window)
        if plan is None:
            plan = AttentionPlan(self.mask.with_window(window), self.keys)
            plan._parent = self if self._parent is None else self._parent
            plan._windows = self._windows
            self._windows[window] = plan
        return plan

    @property
    def mask_class(self) -> MaskClass:
        """The class of the mask, which says what backends can run it."""
        found: MaskClass = self.remember("mask class", lambda plan: mask_class(plan.mask, plan.keys))
        return found

    def table(self, row_block: int, column_block: int, transposed: bool = False) -> BlockTable:
        """Return the block table of queries by keys, or of keys by queries if `transposed`."""

        def make(plan: AttentionPlan) -> BlockTable:
            if transposed:
                return plan.table(column_block, row_block).transposed()
            return block_table(plan.mask, row_block, column_block, keys=plan.keys)

        table: BlockTable = self.remember(("table", row_block, column_block, transposed), make)
        return table

    def work(
        self,
        device: torch.device,
        block: int,
        copies: int,
        processors: int,
        *,
        transposed: bool = False,
        **options: int,
    ) -> DeviceWork:
        """Return the work list of a launch (see `work_list` for the options) on `device`."""

        def make(plan: AttentionPlan) -> DeviceWork:
            work = work_list(plan.table(block, block, transposed), copies, processors, **options)
            units, intervals, splits = (upload(one, device) for one in (work.units, work.intervals, work.splits))
            return DeviceWork(units, intervals, splits, work.num_slots)

        key = "work", device, block, copies, processors, transposed, *sorted(options.items())
        work: DeviceWork = self.remember(key, make)
        return work

    def tensors(self, device: torch.device) -> MaskTensors:
        """Return the mask's words and positions on `device`; they are the same for every window width."""

        def make(plan: AttentionPlan) -> MaskTensors:
            masks = (plan.mask,) if plan.keys is plan.mask else (plan.mask, plan.keys)
            words = [(upload(mask.fields, device), upload(mask.positions, device)) for mask in masks]
            return MaskTensors(*words[0], *words[-1])

        words: MaskTensors = (self._parent or self).remember(("words", device), make)
        return words

    def remember(self, key: Any, make: Callable[[AttentionPlan], Any]) -> Any:
        """Return `make(plan)`, computed once and cached under `key`: for values that a backend derives from the
        mask."""
        if key not in self._remembered:
            self._remembered[key] = make(self)
        return self._remembered[key]


def upload(array: NDArray, device: torch.device) -> torch.Tensor:
    """Copy `array` to `device` without making the host wait."""
    return to_device(torch.tensor(array), device)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move `tensor` to `device` without making the host wait."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
