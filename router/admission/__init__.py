"""Which requests wait at the router, for how long, and which one goes next."""
