"""The gRPC front end, with the services of `protos/`."""
