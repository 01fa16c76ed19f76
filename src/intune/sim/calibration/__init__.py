"""The simulator fitted to a pipeline of one's own: by a sweep over it or from a journal, checked before it answers.

`seen` reads windows back from a journal, `levels` gathers what items took by how many there were at once, `costs`,
`around` and `fitting` make a scenario of it, `replay` holds that against what was measured, and `answers` says what
would be, with an interval. `calibrating` puts it together.
"""

from intune.sim.calibration.answers import Answer, Calibration
from intune.sim.calibration.calibrating import calibrate, calibrate_journal

__all__ = ["Answer", "Calibration", "calibrate", "calibrate_journal"]
