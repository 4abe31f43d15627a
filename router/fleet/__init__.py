"""What this router knows of each replica: cache, load, speed, demand."""
