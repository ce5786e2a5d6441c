"""A replay of a node trace, one step and one checkpoint after the other, by the written rules.

`layouts[i]` is (seconds of a step, moved bytes, state kept, restarted) from event i on; infinite seconds: no training.
"""

from __future__ import annotations

import math


def stepwise_replay(events, end, layouts, costs):
    """`events`: (seconds, is a loss). Returns steps kept, steps rolled back and seconds by cause."""
    lost = dict.fromkeys(("recovery", "saving", "unfinished", "rolled back", "stopped"), 0.0)
    total, unsaved, unsaved_seconds, rolled, credit = 0, 0, 0.0, 0, 0.0
    now = events[0][0]
    recovery = 0.0
    for number, (_, _) in enumerate(events):
        step, moved, kept, restarted = layouts[number]
        if number and math.isfinite(step):
            announced = not events[number][1]
            if restarted or not kept:
                credit = 0.0
            if restarted and announced and unsaved:
                recovery += costs.checkpoint_seconds
                unsaved, unsaved_seconds = 0, 0.0
            elif restarted or not kept:
                rolled += unsaved
                total -= unsaved
                lost["rolled back"] += unsaved_seconds
                unsaved, unsaved_seconds, credit = 0, 0.0, 0.0
            if restarted or not kept:
                recovery += costs.restart_seconds
            else:
                recovery += costs.reconfigure_seconds + moved / costs.copy_bytes_per_second
        following = events[number + 1][0] if number + 1 < len(events) else end
        following = max(following, now)
        limit = events[number + 2][0] if number + 2 < len(events) else end
        waits = number + 1 < len(events) and not events[number + 1][1]
        spent = min(recovery, following - now)
        lost["recovery"] += spent
        now = following if recovery >= following - now else now + spent
        recovery = 0.0
        if math.isinf(step):
            lost["stopped"] += following - now
            now = following
            continue
        while now < following:
            if unsaved >= costs.checkpoint_steps:
                cut = now + costs.checkpoint_seconds > following
                lost["saving"] += min(costs.checkpoint_seconds, following - now)
                now = min(now + costs.checkpoint_seconds, following)
                if cut:
                    break
                unsaved, unsaved_seconds = 0, 0.0
                continue
            lasting = (1.0 - credit) * step
            if now + lasting <= following + 1e-9 * step or (waits and now + lasting <= limit):
                now += lasting
                total, unsaved, unsaved_seconds, credit = total + 1, unsaved + 1, unsaved_seconds + step, 0.0
                if unsaved == costs.checkpoint_steps and costs.checkpoint_seconds == 0:
                    unsaved, unsaved_seconds = 0, 0.0
                continue
            stop = max(following, limit) if waits else following
            lost["unfinished"] += (stop - now) * (1.0 - costs.salvaged)
            credit += (stop - now) / step * costs.salvaged
            now = stop
        now = max(now, following)
    return total, rolled, lost
