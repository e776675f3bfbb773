"""The JSON that the service and `RemoteSandbox` speak: SandboxFusion's, and our own routes."""
