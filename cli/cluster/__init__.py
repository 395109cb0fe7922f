"""A cluster on this machine or elsewhere: its state folder, processes and HTTP client."""
