"""The gRPC face: the service, the session streams, and who waits for a barrier."""
