"""Start, wait for, identify, read and stop real servers."""
