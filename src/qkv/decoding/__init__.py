"""More search: logits processors, constraints, ensembles, minimum Bayes risk, shortlists."""
