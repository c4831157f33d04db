"""kvtierd's plugin for vLLM. Imports nothing: the engine's own interpreter loads ``kvtierd_vllm.connector`` through it."""
