"""The promises of an `Engine`, as a test suite, and servers to try engines on."""
