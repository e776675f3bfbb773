"""The JSON exchanged by the service and `RemoteSandbox`: SandboxFusion's routes and our own."""
