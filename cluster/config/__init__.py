"""The arguments of the application and the Serve config around them."""
