"""Benchmarks of what kvtierd promises. Run them with ``make bench``; they are measurements, not tests."""
