"""Results of runs as tables, plots and one page."""
