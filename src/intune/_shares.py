"""Shares of the memory limit at which something is done about it, from far to near; each is for one line of defence.

What the brake plans with lies below where it holds, so that it seldom has to. The guard may plan up to there: it
predicts for a second and the brake corrects it ten times in that. They only make sense together, hence in one place.
"""

RELEASE = 0.7
"""From here on allocators are asked to give back what they keep unused."""

CROWDED = 0.8
"""More than this used without any items, and the brake's shares are laid into what is left above that."""

RELAXED = 0.85
"""Below this the brake lets all items go on that it held."""

BRAKE_PLANS = 0.87
"""As much is to be used when the bytes are in flight that the brake allows, by what it has measured so far."""

HARD = 0.9
"""Past this the brake holds all items but those that order waits for."""

GUARD_PLANS = 0.9
"""As much may be used in the next window, as the guard predicts it: with more processes, with more bytes in flight."""

STRICT = 0.98
"""Where a limit was lowered, nothing begins that would bring memory past this, not even what order waits for: the
kernel counts page tables, stacks and buffers of its own too."""

COMPARED = HARD
"""Of several limits that one counts of which the fewest bytes are left to this share: it is where the brake holds."""
