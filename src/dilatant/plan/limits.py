"""Limits of the search: how much it enumerates and simulates.

They are counts and ratios, not seconds, so that equal inputs give equal plans on every machine. Up to SMALL_CLUSTER
devices no candidate that may be the fastest is left out: more devices, or more memory, never make a plan slower.
"""

SMALL_CLUSTER = 16
"""Up to this many devices in all groups, no candidate is omitted."""
LARGE_CLUSTER = 128
"""Number of devices above which the search does less: it simulates fewer plans than requested, and cuts microbatches by
tokens only where no number of samples divides the batch."""

FEWEST = 6
"""Minimum number of simulated candidates of each kind, however many devices there are."""
SLOW, SLOW_ON_MANY = 1.25, 1.15
"""On more than SMALL_CLUSTER devices (the second: more than LARGE_CLUSTER), candidates whose estimates are above this
multiple of the best one are not enumerated, except to find a plan that fits. If the best plan takes longer than that,
on up to LARGE_CLUSTER devices, those up to this multiple of its time are."""
NEAR, WORTH = 1.0, 0.98
"""Units get separate replicas only if the estimate is below this multiple of the best other step: NEAR on more than
SMALL_CLUSTER devices, WORTH on more than LARGE_CLUSTER."""
NOTABLE = 0.02
"""Fraction of a step that interleaved chunks must save in closed form to be tried."""
MAX_UNIT_LAYOUTS = 4
"""On more than SMALL_CLUSTER devices, most layouts of the units with separate replicas that are kept for each
language-model layout."""
MAX_PROOF_CANDIDATES = 64
"""Most candidates simulated because their bounds allow them to be the fastest; fewer on more than SMALL_CLUSTER."""

MAX_EXTENDED_CANDIDATES, MAX_EXTENDED_PLANS = 4, 40
"""Most candidates whose idle devices get one more pipeline, the most promising first; and most of the resulting plans
that are simulated, fewer on more than SMALL_CLUSTER devices."""

MAX_MOVED_CUTS, MOVED_CUTS = 192, 32
"""Most plans that are simulated with single layers moved to a neighbouring stage, fewer on more than SMALL_CLUSTER
devices; and most of those that come from one plan, the fastest ones first."""

MOST_CAREFUL = 2
"""Times that as few layers as seem to do recompute more in a plan that overflows in simulation. If it still overflows,
all layers of the overflowing ranks do, level by level. As often, a plan that fits recomputes less."""

MAX_RELAXED = 32
"""Most plans whose recomputation is chosen anew by the memory that is left; fewer on more than SMALL_CLUSTER
devices."""

CLOSE, FAR = 1.25, 2.0
"""Limits for candidates that span unlike groups of more than SMALL_CLUSTER devices, as multiples of the best step on
one group. Above CLOSE they are not simulated, above FAR not enumerated."""
MOST_KINDS = 8
"""Most kinds of pipelines, per group and spanning groups, that are combined on more than SMALL_CLUSTER devices. The
limit is for each number of microbatches; the most promising kinds on at most as many devices are kept."""

HOPELESS_FACTOR = 2.0
"""Plans this many times slower than the best cannot become faster by other sharding of optimizer state. On more than
SMALL_CLUSTER devices, idle ones get no pipeline that needs as many times the best step for their share of samples."""

MATCHES_EXPLAINED, MATCHES_PLANNED = 3, 24
"""Most simulated layouts that match a user's request, best estimate first: to explain a search, and to train."""
