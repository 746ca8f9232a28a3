"""What a run in progress shows: the interface of a view, counters, plain lines and the live terminal."""
