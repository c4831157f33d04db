"""Sending a workload to an OpenAI-compatible server and measuring what comes back."""
