"""What is looked at on each node before ranks start: facts, without a judgement. Needs the standard library alone."""
