"""The host's side of the embedded sandbox: zygotes, their workers, and what is sent to them."""
