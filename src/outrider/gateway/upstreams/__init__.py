"""Where calls go: replicas and their health, connections, time limits, retries before the first byte."""
