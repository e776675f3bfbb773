"""The host's side of the embedded sandbox: zygotes, their workers, and the requests sent to them."""
