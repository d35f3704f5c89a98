"""Records to numbers: windows, rates, latencies, intervals. Pure functions over arrays, no I/O."""
