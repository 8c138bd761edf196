"""What all clients of HTTP servers share: deadlines, retries, errors, server pools, client tags."""
