"""Exact continuation: prompts made of the ids that were served and sampled, plus those of new messages alone."""
