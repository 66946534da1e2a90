"""What happens to the message of a locked task in a worker."""
