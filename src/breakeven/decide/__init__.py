"""Numbers to verdicts: ratios of arms, break-even, knee, needed acceptance. Pure functions: no I/O, no clock."""
