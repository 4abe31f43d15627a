"""TLS for clients: certificates, and an HAProxy of Quire's own that listens with them."""
