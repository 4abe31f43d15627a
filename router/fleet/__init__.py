"""The replicas as this router knows them: cache, load, speed; and the demand."""
