"""Traces: where the time of a request went, as spans for OpenTelemetry."""
