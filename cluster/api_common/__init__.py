"""What the HTTP and the gRPC front end share: checks of input, explanations, structured output."""
