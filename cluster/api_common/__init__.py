"""Code that the HTTP and the gRPC front end share: checks of input, answers, explanations, structured output."""
