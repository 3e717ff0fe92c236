"""Products of all (token, expert) rows with their experts' weights."""
