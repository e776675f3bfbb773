"""The promises of a `Sandbox`, as test suites."""
