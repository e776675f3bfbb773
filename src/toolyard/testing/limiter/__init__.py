"""The promises of a `Limiter`, as a test suite."""
