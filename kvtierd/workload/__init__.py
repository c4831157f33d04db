"""Sending real requests to engines and measuring what comes back."""
