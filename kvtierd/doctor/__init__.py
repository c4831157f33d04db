"""kvtierctl doctor: checks over a host, and what they found."""
