"""Traces of requests to an OpenTelemetry collector. Loaded only if the application has the section `tracing`."""
