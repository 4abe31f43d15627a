"""`quire top`: what a router knows, in a terminal."""
