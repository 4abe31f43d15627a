"""The life of one request, from its checked parameters to the last character of its answer."""
