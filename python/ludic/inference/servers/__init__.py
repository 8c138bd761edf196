"""What clients of any server over HTTP share: calls with deadlines, errors by their meaning,
several servers behind one client, tags."""
