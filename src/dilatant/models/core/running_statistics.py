"""Running statistics: buffers that a module updates in its forward while it trains (batch normalisation).

The statistics of a microbatch depend on the samples that share it, and each replica would update buffers of its own.
Therefore such modules run in evaluation mode, with the statistics that they have; their weights train. Modules whose
statistics cannot be held are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from dilatant.config.errors import UserError, list_problems

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def hold_statistics(module: nn.Module) -> None:
    """Put each module with running statistics in evaluation mode, without its children."""
    for each in module.modules():
        if has_statistics(each):
            each.training = False


def training_modules(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield paths and modules, without those whose weights are all frozen: they run in evaluation mode."""
    if {parameter.requires_grad for parameter in module.parameters()} == {False}:
        return
    yield path, module
    for name, child in module.named_children():
        yield from training_modules(f"{path}.{name}" if path else name, child)


def statistics_notes(units: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield a line for each unit in which modules with running statistics train."""
    for name, unit in units.items():
        kinds = {type(each).__name__ for _, each in training_modules("", unit) if has_statistics(each)}
        if kinds:
            yield f"{name}: {', '.join(sorted(kinds))}: the stored statistics are used and kept; only weights train"


def unheld_statistics(units: Mapping[str, nn.Module]) -> UserError | None:
    """Return an error that lists the modules which normalise by a microbatch in evaluation mode, too; None without."""
    problems = [
        f"{name}: {path} ({type(each).__name__}); set track_running_stats=True, or take another norm"
        for name, unit in units.items()
        for path, each in unit.named_modules()
        if isinstance(each, _BATCH_NORMS) and each.running_mean is None
    ]
    what = "statistics of a microbatch would change with the layout:"
    return list_problems(what, problems) if problems else None


Changes = Mapping[str, tuple[Tensor, int]]
"""Path of a persistent buffer → the buffer, and the number of changes to it."""


def changes_of(module: nn.Module) -> Changes:
    """Return the persistent buffers of a module, each with the number of changes to it so far."""
    return {
        f"{path}.{name}": (buffer, buffer._version)
        for path, each in module.named_modules()
        for name, buffer in each._buffers.items()
        if buffer is not None and name not in each._non_persistent_buffers_set
    }


def require_unchanged(unit: str, module: nn.Module, before: Changes) -> None:
    """Raise UserError if a forward has changed a persistent buffer since `before`."""
    for name, (buffer, count) in changes_of(module).items():
        old, old_count = before.get(name, (buffer, count))
        if buffer is not old or count != old_count:
            raise UserError(
                f"{unit}: its forward changes the buffer {name}, which would then depend on the layout; let the module "
                "change it in training mode only, and freeze the module, or register the buffer with persistent=False"
            )


def has_statistics(module: nn.Module) -> bool:
    """Return True for batch and instance normalisation with running statistics, and for spectral normalisation, which
    improves a vector in each forward."""
    buffers = module._buffers
    tracks = hasattr(module, "momentum") and (buffers.get("running_mean", buffers.get("running_var")) is not None)
    return tracks or any(hasattr(each, "n_power_iterations") for each in (module, *module._forward_pre_hooks.values()))
