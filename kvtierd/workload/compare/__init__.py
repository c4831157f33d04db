"""One engine measured without a cache, with its own, and with the pool: settings changed for it and put back."""
