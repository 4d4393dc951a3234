"""The paper's tables, figures and claims, at a scale that two cores can run."""
