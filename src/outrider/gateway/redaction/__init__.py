"""Secrets and personal data, taken out before storage."""
