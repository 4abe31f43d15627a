"""What is changed in the processes of Ray Serve's proxies."""
