"""Schedule families: the order in which ranks compute."""

from dilatant.schedule.families.families import (
    ScheduleFamily,
    eager,
    gpipe,
    half_eager,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_h2,
)

FAMILIES: dict[str, ScheduleFamily] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "half-eager": half_eager,
    "eager": eager,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
    "zb-h2": zero_bubble_h2,
}
"""Schedule families by the name that users write."""
