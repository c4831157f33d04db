"""Datasets: read the forms people have, convert them, make a small one."""
