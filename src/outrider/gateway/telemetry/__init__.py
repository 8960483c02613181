"""What those who run a gateway see: counts, metrics, a log line a call, spans."""
