"""The built-in checks, one module a group. Each has ``GROUP``; ``kvtierd.doctor.registry`` lists them."""
