"""Streams, events, pools and host memory of one device."""
